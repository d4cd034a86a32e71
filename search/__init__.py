"""Choose a sparsity pattern and a sparsity for each layer under a latency budget, prune, and verify the speedup."""

from search.knapsack.arrays import BadProblem, Infeasible, Solution
from search.knapsack.one_budget import solve
from search.knapsack.pareto import Frontier, frontier
from search.knapsack.two_budgets import solve_two
from search.problem.layers import Interval, LayerOptions, Option
from search.problem.problem import Problem
from search.problem.second_budget import SecondBudget
from search.problem.selection import Selection, TradeOffs

__all__ = [
    "BadProblem", "Frontier", "Infeasible", "Interval", "LayerOptions", "Option", "Problem", "SecondBudget",
    "Selection", "Solution", "TradeOffs", "frontier", "solve", "solve_two",
]  # fmt: skip
