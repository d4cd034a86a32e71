"""How the profile of least loss within the budget is looked for.

spdy      every layer an option of its own: the coefficient search, begun with the uniform profiles
uniform   one pattern and sparsity everywhere, to compare with
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from search.end_to_end import Progress
from search.problem import Choice, Problem
from search.spdy import Evaluation, Found, spdy_search

STRATEGIES = ("spdy", "uniform")

FOUND_BY = {"equal": "solve once", "start": "uniform", "draw": "spdy", "neighbour": "spdy"}
"""What a profile says of how it was found."""

FINALISTS = 8


def find(
    strategy: str,
    problem: Problem,
    target: float,
    judge: Callable[[Choice], float],
    quick: Callable[[Choice], float],
    *,
    seed: int,
    evaluations: int,
    progress: Progress,
) -> Found:
    """The profile of least loss that `strategy` finds for a speedup of `target`.

    `judge` is the loss of a profile, `quick` a cheaper stand-in while many are tried. Raises Infeasible.
    """
    uniforms = problem.uniforms(target)
    if strategy == "uniform":
        chosen = min(uniforms or [problem.uniform(target)], key=judge)
        return Found(chosen, judge(chosen), "start", ())

    done = 0

    def tell(evaluation: Evaluation, best: float) -> None:
        nonlocal done
        done += 1
        progress(f"searching: calibration loss {best:.4f}", done, evaluations)

    found = spdy_search(
        quick, problem.safe_seconds, problem.errors, problem.budget(target), np.random.default_rng(seed),
        starts=uniforms, evaluations=evaluations, progress=tell,
    )  # fmt: skip
    # The least of many losses on few images flatters its profile, and so less those that were not drawn to be least.
    ranked = sorted(found.trace, key=lambda one: one.loss)
    finalists = [*ranked[:FINALISTS], *(one for one in ranked[FINALISTS:] if one.found_by in ("equal", "start"))]
    progress(f"judging the best {len(finalists)} by all calibration data", None, None)
    best = min(finalists, key=lambda one: judge(one.choice))
    return replace(found, choice=best.choice, loss=judge(best.choice), found_by=best.found_by)
