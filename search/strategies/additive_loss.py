"""What pruning adds to a model's loss, learnt from profiles that were judged: a sum over layers, with uncertainty.

    added(profile) = sum over layers l of  w[l][option of l]
    w = scale * (mean over priors e of e  +  sum over priors of e * (sensitivity + own) / sqrt(priors))
    sensitivity[e][l] ~ N(0, 1), own[e][l][o] ~ N(0, OWN^2)

There are several priors, because relative output errors of unlike layers hardly compare: where few outputs are huge
and always right, as in the Transformer layers that end a block, an error of 0.4% may cost as much as one of 25%
elsewhere. See `build_layer_priors`. Each is trusted up to a factor a layer, which is what the published search draws
at random, and within the layer up to a smaller one an option. Profiles determine all factors by Bayesian linear
regression, in the form of Gaussian processes: as many unknowns as profiles, however many options there are. No sum
tells the whole loss, and the less the further a profile is from the best one: what lies between the loss and a sum is
taken for noise that grows with that distance, so the fit is closest where the optimum is looked for.

A draw of all w from the posterior is a problem for the exact solver; its optimum is a profile that may be the best as
far as is known (Thompson 1933, "On the likelihood that one unknown probability exceeds another"). Draws follow
Matheron's rule (Journel and Huijbregts 1978): one from the prior, corrected by what it gets wrong of the profiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from search.knapsack.arrays import Choice, Floats, Indices

OWN = 0.2
"""Standard deviation of an option's own factor."""

MISFIT = 0.15
"""That of the noise, as a share of what a profile's loss is above the least."""

FLOOR = 0.02
"""That of the noise of the best profile, as a share of what pruning adds there."""

LEAST = 0.02
"""Of its prior mean, what a drawn w is at least: no layer gains by being pruned."""

Prior = Sequence[Floats]
"""What options are thought to add, in any unit, an array >= 0 a layer."""


def build_layer_priors(errors: Prior, sparsities: Prior) -> list[Prior]:
    """The measured errors; the same levelled, so that only their course within a layer counts; sparsities squared.

    All are of the same size in the middle, and zero for each layer's least.
    """
    worst = [float(e.max() - e.min()) for e in errors]
    level = float(np.mean(worst)) or 1.0
    return [[e - e.min() for e in errors], _levelled(errors, level), _levelled([s**2 for s in sparsities], level)]


class AdditiveLoss:
    """The sum of layers' parts, given the losses of profiles.

    `added` is what each of `choices`, one or more, has above the dense loss.
    """

    def __init__(self, priors: Sequence[Prior], choices: Sequence[Choice], added: Sequence[float]) -> None:
        self._layers = [np.stack(layer) for layer in zip(*priors, strict=True)]  # (priors, options) each
        self._chosen = np.array(choices, np.intp).reshape(len(choices), len(self._layers))
        self._added = np.asarray(added, np.float64)
        total = np.sum([e.mean(axis=0)[j] for e, j in self._by_layer()], axis=0)
        self._scale = _scale(total, self._added)
        least = float(self._added.min())
        at_least = max(abs(least), self._scale * float(total.min())) or 1.0
        self._noise = MISFIT * (self._added - least) + FLOOR * at_least
        covariance = np.zeros((len(total), len(total)))
        for e, j in self._by_layer():
            covariance += e[:, j].T @ e[:, j] * (1 + OWN**2 * (j[:, None] == j[None, :]))
        self._spread = self._scale / math.sqrt(len(priors))
        self._factor = cho_factor(self._spread**2 * covariance + np.diag(self._noise**2), lower=True)

    def draw(self, rng: np.random.Generator, temperature: float = 1.0) -> list[Floats]:
        """What all options add, as may be true: an array a layer. For `temperature` 0 what is likeliest.

        Higher ones draw from a posterior as much wider.
        """
        prior = []
        for e in self._layers:
            factors = rng.standard_normal((len(e), 1)) + OWN * rng.standard_normal(e.shape)
            prior.append(self._scale * e.mean(axis=0) + temperature * self._spread * (e * factors).sum(axis=0))
        drawn = np.sum([w[j] for w, j in zip(prior, self._chosen.T, strict=True)], axis=0)
        wrong = self._added - drawn - temperature * self._noise * rng.standard_normal(len(self._added))
        pull = cho_solve(self._factor, wrong)
        result = []
        for w, (e, j) in zip(prior, self._by_layer(), strict=True):
            at = np.bincount(j, weights=pull, minlength=len(w))
            correction = (e * ((e @ at)[:, None] + OWN**2 * e * at)).sum(axis=0)
            result.append(np.maximum(w + self._spread**2 * correction, LEAST * self._scale * e.mean(axis=0)))
        return result

    def _by_layer(self) -> Iterator[tuple[Floats, Indices]]:
        """Each layer's priors (priors, options), and the option that each profile has there."""
        return zip(self._layers, self._chosen.T, strict=True)


def _levelled(prior: Prior, level: float) -> list[Floats]:
    """The prior with its worst option in each layer at `level`, its least at zero."""
    above = [e - e.min() for e in prior]
    return [e * (level / float(e.max())) if e.max() > 0 else e for e in above]


def _scale(total: Floats, added: Floats) -> float:
    """What a unit of error adds, in the middle of the profiles; 1 where none says."""
    told = total > 0
    scale = float(np.median(added[told] / total[told])) if told.any() else 0.0
    return scale if scale > 0 and math.isfinite(scale) else 1.0
