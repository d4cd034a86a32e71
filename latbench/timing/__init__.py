"""Sampling of times: on a CPU by the wall clock, on a GPU by CUDA events."""
