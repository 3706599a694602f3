"""The compiler: a program, `python -m jitspark.compiler`, that turns specializations into linked artifacts.

A leaf: nothing in jitspark imports it except its own modules, so a serving process cannot load the CuTe DSL by
accident. It refuses to run inside a process that has already imported torch (see `cute.py`).
"""
