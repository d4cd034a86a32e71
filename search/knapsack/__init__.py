"""Solve the multiple-choice knapsack on plain arrays: one budget, two budgets, every efficient trade-off."""
