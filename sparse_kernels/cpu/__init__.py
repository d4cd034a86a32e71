"""Numba kernels for CPUs, one file a pattern."""
