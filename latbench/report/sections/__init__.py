"""Sections that stand on one frame of their own: each file computes the frame, draws it and writes the sentences."""
