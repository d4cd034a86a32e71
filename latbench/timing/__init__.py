"""Timing one piece of work: samples on a CPU, events and graphs on a GPU."""
