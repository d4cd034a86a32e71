"""Make a problem from a latency table, a data frame or SPDY's timing file."""

from search.inputs.latency_table import problem_from_table
from search.inputs.option_frame import problem_from_frame
from search.inputs.problem_source import read_problem
from search.inputs.spdy_timings import problem_from_spdy

__all__ = ["problem_from_frame", "problem_from_spdy", "problem_from_table", "read_problem"]
