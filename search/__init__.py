"""SPDY: which pattern at which sparsity in which layer, under a latency budget, verified."""

from search.frontier import Frontier, frontier
from search.solve import BadProblem, Infeasible, Solution, solve
from search.two import solve_two

__all__ = ["BadProblem", "Frontier", "Infeasible", "Solution", "frontier", "solve", "solve_two"]
