"""Checking kernels against their references, on a GPU or a CPU. Needs torch; what serves never imports it."""
