"""Rewrites of the graph of a converted model around its layers, so that values lie where kernels want them."""
