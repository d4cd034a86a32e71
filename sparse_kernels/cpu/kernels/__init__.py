"""Kernels: each file multiplies weights of one kind, for tokens or images that lie in one way."""
