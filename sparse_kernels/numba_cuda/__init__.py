"""Kernels in numba.cuda: Python that NVIDIA GPUs run. No tensor cores, float32 sums: to read, and for older cards.

Read the files in this order; each adds one idea.

- tile: what a block of threads computes, and the inner product at the heart of it
- dense: x and w staged in shared memory, a tile at a time
- vector: the same, with rows of x gathered by a list of columns, and rows of y scattered
- block: the list holds blocks of columns
- nm: offsets inside small groups choose from a tile of x
- csr: nothing to share, so a warp takes a row, without shared memory
- layouts: what x and y are: matrices, or images that are convolved (implicit GEMM)
- transpose: token-major x and y, by way of the other layout
- numba_cuda_plan: weights on the GPU, and their launches
"""
