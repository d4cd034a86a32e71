"""Numba kernels for CPUs, float32, multi-threaded.

linear, conv2d    the plans: which kernel runs, where everything lies
panels            every format in the one form that kernels read
tokens, rows      the two kernels: loops around a register tile
micro             the register tiles, emitted as vector code
transpose, images x and y as the kernels want them, and back
target, split, threads, scratch   the vector unit, shares of work, Numba's threads, buffers
"""
