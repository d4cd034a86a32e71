"""Errors of a cost model on layers that it was not fitted to."""
