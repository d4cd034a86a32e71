"""SPDY: which pattern at which sparsity in which layer, under a latency budget, verified."""

from search.also import Also
from search.knapsack.arrays import BadProblem, Infeasible, Solution
from search.knapsack.one_budget import solve
from search.knapsack.pareto import Frontier, frontier
from search.knapsack.two_budgets import solve_two
from search.layers import Interval, Layer, Option
from search.problem import Problem
from search.selection import Selection, TradeOffs

__all__ = [
    "Also", "BadProblem", "Frontier", "Infeasible", "Interval", "Layer", "Option", "Problem", "Selection", "Solution",
    "TradeOffs", "frontier", "solve", "solve_two",
]  # fmt: skip
