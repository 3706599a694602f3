"""The compiler: a program, `python -m jitspark.compiler`, that turns specializations into linked artifacts.

A leaf: nothing in jitspark imports it except its own modules, so a serving process cannot load the CuTe DSL by
accident. It keeps torch out of its process, where tvm_ffi would import it (see `cute.py`).
"""
