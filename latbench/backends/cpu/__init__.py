"""Engines on a CPU, what prepares a point for them, and the reference work that shows the CPU's pace."""
