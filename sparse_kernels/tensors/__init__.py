"""Tensors between sparse layers: torch's own, and those that stay as kernels read them."""
