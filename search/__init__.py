"""SPDY: which pattern at which sparsity in which layer, under a latency budget, verified."""

from search.frontier import Frontier, frontier
from search.solve import BadProblem, Infeasible, Solution, solve

__all__ = ["BadProblem", "Frontier", "Infeasible", "Solution", "frontier", "solve"]
