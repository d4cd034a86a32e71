"""One-shot pruning: each layer is pruned and refitted from calibration data."""
