"""SPDY: which pattern at which sparsity in which layer, under a latency budget, verified."""
