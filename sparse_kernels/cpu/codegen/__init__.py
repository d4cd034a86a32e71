"""Emits vector code: loops over registers, tiles of the matrix unit, prefetches."""
