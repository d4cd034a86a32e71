"""A model of the loss that pruning adds: a sum over layers with uncertainty, fitted to evaluated profiles.

    added(profile) = sum over layers l of  w[l][option of l]
    w = scale * (mean over priors e of e  +  sum over priors of e * (sensitivity + own) / sqrt(priors))
    sensitivity[e][l] ~ N(0, 1), own[e][l][o] ~ N(0, OWN^2)

There are several priors (`build_layer_priors`), because relative output errors of different layers hardly compare. In
the Transformer layers that end a block, few outputs are huge and always right. An error of 0.4% there may cost as
much as one of 25% elsewhere. Each prior has an unknown factor for each layer, which the published search draws at
random, and a smaller unknown factor for each option. Bayesian linear regression determines all factors from the
profiles. In the form of Gaussian processes it has as many unknowns as profiles, for any number of options. No sum is
the whole loss, and it fits less the further a profile is from the best one. The difference counts as noise that grows
with that distance, so the fit is closest near the optimum.

What single layers add may be known, too, from a gradient. Each such share is a row like a profile in which only this
layer is pruned.

A draw of all w from the posterior is a problem for the exact solver. Its optimum is a profile that may be the best,
given the data (Thompson 1933, "On the likelihood that one unknown probability exceeds another"). Draws follow
Matheron's rule (Journel and Huijbregts 1978): draw from the prior, then correct it by its errors on the profiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from search.knapsack.arrays import Choice, Floats, Indices

OWN = 0.2
"""Standard deviation of an option's own factor."""

MISFIT = 0.15
"""Standard deviation of the noise, as a share of a profile's loss above the least loss."""

FLOOR = 0.02
"""Standard deviation of the noise of the best profile, as a share of the loss that pruning adds there."""

LEAST = 0.02
"""Lower limit of a drawn w, as a share of its prior mean: pruning improves no layer."""

SHARE_MISFIT = 0.3
"""Standard deviation of the noise of what one layer adds, relative to that."""

SHARE_FLOOR = 0.1
"""The same for the smallest shares, relative to the mean share."""

Prior = Sequence[Floats]
"""Loss that options are expected to add, in any unit: an array (options,) >= 0 for each layer."""


def build_layer_priors(errors: Prior, sparsities: Prior) -> list[Prior]:
    """Return three priors: the measured errors, the same with one maximum for all layers, and squared sparsities.

    The second prior uses only how errors change within a layer. All have the same size on average, and are zero for
    each layer's least error.

    Parameters
    ----------
    errors
        The measured errors: an array (options,) for each layer.
    sparsities
        Arrays of the same shapes.
    """
    worst = [float(e.max() - e.min()) for e in errors]
    level = float(np.mean(worst)) or 1.0
    return [[e - e.min() for e in errors], _scale_to(errors, level), _scale_to([s**2 for s in sparsities], level)]


class AdditiveLoss:
    """The posterior of the loss that each option adds, given the losses of profiles.

    Parameters
    ----------
    priors
        Losses that options are expected to add.
    choices
        One or more profiles.
    added
        The loss of each profile above the dense loss.
    shares
        What single options add, as a gradient says: (layer, option) -> loss.
    """

    def __init__(
        self, priors: Sequence[Prior], choices: Sequence[Choice], added: Sequence[float],
        shares: Mapping[tuple[int, int], float] | None = None,
    ) -> None:  # fmt: skip
        self._layers = [np.stack(layer) for layer in zip(*priors, strict=True)]  # (priors, options) each
        self._chosen = np.array(choices, np.intp).reshape(len(choices), len(self._layers))
        self._added = np.asarray(added, np.float64)
        total = np.sum([e.mean(axis=0)[j] for e, j in self._iterate_layers()], axis=0)
        self._scale = _fit_scale(total, self._added)
        least = float(self._added.min())
        at_least = max(abs(least), self._scale * float(total.min())) or 1.0
        self._noise = MISFIT * (self._added - least) + FLOOR * at_least
        if shares:
            self._add_shares(shares)
        covariance = np.zeros((len(self._added), len(self._added)))
        for e, j in self._iterate_layers():
            covariance += e[:, j].T @ e[:, j] * (1 + OWN**2 * (j[:, None] == j[None, :]))
        self._spread = self._scale / math.sqrt(len(priors))
        self._factor = cho_factor(self._spread**2 * covariance + np.diag(self._noise**2), lower=True)

    def draw(self, rng: np.random.Generator, temperature: float = 1.0) -> list[Floats]:
        """Draw the losses that all options add: an array (options,) for each layer.

        Parameters
        ----------
        rng
            Source of randomness.
        temperature
            Width of the draw: 1 is the posterior, 0 its mean; larger values draw from a wider distribution.
        """
        prior = []
        for e in self._layers:
            factors = rng.standard_normal((len(e), 1)) + OWN * rng.standard_normal(e.shape)
            prior.append(self._scale * e.mean(axis=0) + temperature * self._spread * (e * factors).sum(axis=0))
        drawn = np.sum([w[j] for w, j in zip(prior, self._chosen.T, strict=True)], axis=0)
        wrong = self._added - drawn - temperature * self._noise * rng.standard_normal(len(self._added))
        pull = cho_solve(self._factor, wrong)
        result = []
        for w, (e, j) in zip(prior, self._iterate_layers(), strict=True):
            at = np.bincount(j, weights=pull, minlength=len(w))
            correction = (e * ((e @ at)[:, None] + OWN**2 * e * at)).sum(axis=0)
            result.append(np.maximum(w + self._spread**2 * correction, LEAST * self._scale * e.mean(axis=0)))
        return result

    def _add_shares(self, shares: Mapping[tuple[int, int], float]) -> None:
        """Add a row for each share: a profile in which only this layer is pruned."""
        nothing = np.array([int(e.mean(axis=0).argmin()) for e in self._layers], np.intp)
        rows, added = np.tile(nothing, (len(shares), 1)), np.array(list(shares.values()), np.float64)
        for row, (layer, option) in zip(rows, shares, strict=True):
            row[layer] = option
        size = np.abs(added)
        self._chosen = np.concatenate([self._chosen, rows])
        self._added = np.append(self._added, added)
        self._noise = np.append(self._noise, SHARE_MISFIT * size + SHARE_FLOOR * (size.mean() or 1.0))

    def _iterate_layers(self) -> Iterator[tuple[Floats, Indices]]:
        """Return each layer's priors (priors, options), and the option of each profile there (profiles,)."""
        return zip(self._layers, self._chosen.T, strict=True)


def _scale_to(prior: Prior, level: float) -> list[Floats]:
    """Return the prior with the worst option of each layer at `level` and the least at zero."""
    above = [e - e.min() for e in prior]
    return [e * (level / float(e.max())) if e.max() > 0 else e for e in above]


def _fit_scale(total: Floats, added: Floats) -> float:
    """Return the loss that a unit of error adds, as the median over profiles; 1 if it is unknown."""
    pruned = total > 0
    scale = float(np.median(added[pruned] / total[pruned])) if pruned.any() else 0.0
    return scale if scale > 0 and math.isfinite(scale) else 1.0
