"""The automatic choice of a one-shot method: ExactOBS for a layer that is small enough, and AdaPrune otherwise.

ExactOBS has the lower error. It takes about k^3 multiplications for each band of rows that a pattern's units share. A
3072x768 layer has 3072 bands for single weights, and 96 for vectors of 32. So each pattern has its own choice.
"""

from __future__ import annotations

import math

from search.pruning.masks.prunable_units import find_units
from search.pruning.one_shot.adaprune import ITERATIONS, AdaPrune
from search.pruning.one_shot.exact_obs import ExactOBS
from search.pruning.one_shot.one_shot_pruner import PrunedWeight
from sparse_kernels.patterns import Pattern

MULTIPLICATIONS = 3e10
"""The most multiplications of an elimination: 11 to 30 s on two busy cores, at 1.0 to 2.8e9 a second.

An option's refit takes up to 2/5 of that again. AdaPrune takes a sixth to two fifths of both. Its errors are a few
percent larger, and 10 to 60% at half of the weights. All layers of ResNet20 are below the limit (1.2e10, 4.4 s). So
are BERT's 768x768 layers in vectors of 16 rows and more; its 3072x768 layers are not.
"""


class AutoPruner(ExactOBS):
    """A dense layer that is pruned by ExactOBS if the elimination is affordable, and by AdaPrune otherwise."""

    def prune(self, pattern: Pattern, sparsity: float) -> PrunedWeight:
        """Prune by ExactOBS if the elimination is affordable, and by AdaPrune otherwise."""
        exact = self.count_multiplications(pattern, sparsity) <= MULTIPLICATIONS
        self.iterations = math.inf if exact else ITERATIONS
        return (ExactOBS if exact else AdaPrune).prune(self, pattern, sparsity)

    def count_multiplications(self, pattern: Pattern, sparsity: float) -> float:
        """Return the multiplications of the elimination of all bands."""
        m, k = self.weight.shape
        return -(-m // find_units(pattern, sparsity).height) * float(k) ** 3
