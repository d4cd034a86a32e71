"""Fingerprints of kernels in Python: which version of them a measured time belongs to."""
