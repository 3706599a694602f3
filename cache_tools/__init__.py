"""Tools for cache directories, run as `python -m cache_tools <verb>`: they know the store and nothing of kernels."""
