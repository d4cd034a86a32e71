"""Starts a kernel on all threads, with little to do beside its work."""
