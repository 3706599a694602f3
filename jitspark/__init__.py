"""jitspark: cached CuTe DSL kernels and a decode runtime for Muse Spark on vLLM."""

__version__ = "0.1.0"
