"""The problem to solve: layers, their options with seconds and errors, limits, budgets, and the answer."""
