"""What pruning adds to a model's loss, learnt from profiles that were judged: a sum over layers, with uncertainty.

    added(profile) = sum over layers l of  w[l][option of l]
    w[l][o] = mean over priors e of  scale * e[l][o] * (1 + sensitivity[e][l] + own[e][l][o])
    sensitivity ~ N(0, 1), own ~ N(0, OWN^2)

Of the layers' measured errors there are two priors. One takes them as they are. But relative output errors of unlike
layers hardly compare: where few outputs are huge and always right, as in the Transformer layers that end a block, an
error of 0.4% may cost as much as one of 25% elsewhere. The other thus levels them: in each layer the worst option has
the same error. Either is trusted up to a factor a layer, which is what the published search draws at random, and
within the layer up to a smaller one an option. Profiles determine all factors by Bayesian linear regression, in the
form of Gaussian processes: as many unknowns as profiles, however many options there are. No sum tells the whole loss,
and the less the further a profile is from the best one: what lies between the loss and a sum is taken for noise that
grows with that distance, so the fit is closest where the optimum is looked for.

A draw of all w from the posterior is a problem for the exact solver; its optimum is a profile that may be the best as
far as is known (Thompson 1933, "On the likelihood that one unknown probability exceeds another"). Draws follow
Matheron's rule (Journel and Huijbregts 1978): one from the prior, corrected by what it gets wrong of the profiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from search.evaluations import Choice
from search.solve import Floats

OWN = 0.3
"""Standard deviation of an option's own factor."""

MISFIT = 0.15
"""That of the noise, as a share of what a profile's loss is above the least."""

FLOOR = 0.02
"""That of the noise of the best profile, as a share of what pruning adds there."""

LEAST = 0.02
"""Of its prior mean, what a drawn w is at least: no layer gains by being pruned."""


class AdditiveLoss:
    """The sum of layers' parts, given the losses of profiles.

    `errors` hold an array >= 0 a layer; `added` is what each of `choices`, one or more, has above the dense loss.
    """

    def __init__(self, errors: Sequence[Floats], choices: Sequence[Choice], added: Sequence[float]) -> None:
        self._priors = list(zip(errors, levelled(errors), strict=True))
        self._chosen = np.array(choices, np.intp).reshape(len(choices), len(errors))
        total = sum(np.mean(both, axis=0)[j] for both, j in zip(self._priors, self._chosen.T, strict=True))
        y = np.asarray(added, np.float64)
        self._scale = _scale(np.asarray(total), y)
        least = float(y.min())
        at_least = max(abs(least), self._scale * float(np.min(total))) or 1.0
        self._noise = MISFIT * (y - least) + FLOOR * at_least
        self._factor = cho_factor(self._covariance() + np.diag(self._noise**2), lower=True)
        self._added = y

    def draw(self, rng: np.random.Generator, temperature: float = 1.0) -> list[Floats]:
        """Errors of all options that may be true, an array a layer; for `temperature` 0 the likeliest.

        Higher ones draw from a posterior as much wider.
        """
        prior = [
            np.mean([self._scale * e * (1 + temperature * _factors(rng, len(e))) for e in both], axis=0)
            for both in self._priors
        ]
        drawn = sum(w[j] for w, j in zip(prior, self._chosen.T, strict=True))
        wrong = self._added - drawn - temperature * self._noise * rng.standard_normal(len(self._added))
        pull = cho_solve(self._factor, wrong)
        result = []
        for w, both, j in zip(prior, self._priors, self._chosen.T, strict=True):
            at = np.bincount(j, weights=pull, minlength=len(w))
            correction = sum(e * (e @ at + OWN**2 * e * at) for e in both)
            least = LEAST * self._scale * np.mean(both, axis=0)
            result.append(np.maximum(w + (self._scale / len(both)) ** 2 * correction, least))
        return result

    def _covariance(self) -> Floats:
        """Of what the profiles add: (profiles, profiles)."""
        total = np.zeros((len(self._chosen),) * 2)
        for both, j in zip(self._priors, self._chosen.T, strict=True):
            same = 1 + OWN**2 * (j[:, None] == j[None, :])
            for e in both:
                total += np.outer(e[j], e[j]) * same
        return np.asarray((self._scale / 2) ** 2 * total)


def levelled(errors: Sequence[Floats]) -> list[Floats]:
    """The errors with the same worst one in each layer, the mean of what it was."""
    worst = [float(e.max()) for e in errors]
    level = float(np.mean(worst))
    return [e * (level / most) if most > 0 else e for e, most in zip(errors, worst, strict=True)]


def _factors(rng: np.random.Generator, options: int) -> Floats:
    """What a layer's errors are wrong by, drawn from the prior."""
    return np.asarray(rng.standard_normal() + OWN * rng.standard_normal(options))


def _scale(total: Floats, added: Floats) -> float:
    """What a unit of error adds, in the middle of the profiles; 1 where none says."""
    told = total > 0
    scale = float(np.median(added[told] / total[told])) if told.any() else 0.0
    return scale if scale > 0 and math.isfinite(scale) else 1.0
