"""Numba kernels for CPUs, float32, multi-threaded.

linear, conv2d    the plans: which kernel runs, where everything lies
panels            every format as rows that share their columns
tokens, rows      the two kernels for panels: loops around a register tile
single            rows that share no columns: their form, their tile, their kernel
blocks            the same as rows and single for token-major x, a block of tokens at a time
matrix            linear layers by the matrix unit that some processors have, where it pays
matrix_conv2d     convolutions by that unit
amx, thirds       what that unit's tiles do, emitted and emulated; a float32 as the sum of three bfloat16
micro, emitter    the register tiles and copies, and the vector code they are emitted as
ahead             what tiles fetch while they multiply, for those that come after them
vectors           where vectors of positions lie
transpose, images x and y as the kernels want them, and back
call              what a plan does with the arguments of a call
parts, compiled   kernels in parts that threads share, kept on disk
target, split, threads, scratch   the vector unit, shares of work, Numba's threads, buffers
"""
