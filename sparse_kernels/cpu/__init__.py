"""Numba kernels for CPUs: float32, multi-threaded, for every pattern.

Read the folders from the top down; imports go down only.

- plans: which kernel runs a layer, and `autotune`, which finds the fastest by trying
- kernels: loops, one file for weights of one kind and tokens or images that lie in one way
- launch: the way from a call to a kernel on all threads
- layouts: how panels of weights, vectors of positions and padded images lie in memory
- codegen: emitters of vector code: register tiles, tiles of the matrix unit, prefetches
- runtime: the cache of compiled code, threads, scratch memory, what we rely on in Numba

The kernels:

- token_major: token-major x as it lies, outputs along the vector
- row_panels: panels of rows, positions along the vector
- unstructured_rows: the same for rows that share no columns
- token_blocks: the same for token-major x, a block of tokens at a time
- small_batch: at most one vector of tokens
- matrix_unit: linear layers and convolutions by the matrix unit that some processors have
- attention: dense attention of a converted model
- transpose_tiles, image_layout: x and y as the kernels want them, and back
"""
