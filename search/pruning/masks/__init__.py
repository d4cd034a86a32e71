"""Masks: which units of a layer a pattern keeps, for how much sparsity, and as bits."""
