"""SPDY: which pattern at which sparsity in which layer, under a latency budget, verified."""

from search.also import Also
from search.frontier import Frontier, frontier
from search.layers import Interval, Layer, Option
from search.problem import Problem
from search.selection import Selection, TradeOffs
from search.solve import BadProblem, Infeasible, Solution, solve
from search.two import solve_two

__all__ = [
    "Also", "BadProblem", "Frontier", "Infeasible", "Interval", "Layer", "Option", "Problem", "Selection", "Solution",
    "TradeOffs", "frontier", "solve", "solve_two",
]  # fmt: skip
