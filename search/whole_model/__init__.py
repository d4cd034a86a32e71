"""Whole models timed from end to end, and what the times say about a promise."""
