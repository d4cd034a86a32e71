"""Training recipes: the method and its settings, and how the model trains, as YAML with strict keys.

    method: mask_decay          # gmp acdc ste sr_ste rigl asp mask_decay structure_decay step grow_and_prune held
    settings: {shape: exponential, dense: 0.1, final: 0.2}
    start: dense                # or one_shot: the one-shot pruned model; `held` keeps its masks
    steps: 400                  # optimizer steps
    learning_rate: 1.0e-3
    schedule: cosine            # or linear, constant
    warmup: 0                   # steps in which the learning rate rises
    optimizer: adam             # or adamw, sgd
    weight_decay: 0.0
    momentum: 0.9               # of sgd
    clip_norm: null             # largest norm of all gradients together
    accumulate: 1               # batches an optimizer step
    transposable: null          # exact or quick: N:M masks along the outputs too; quick keeps at least half the score
    seed: 0

Missing entries have the values above; missing `settings` have those of the method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from latbench import MOST_SEED
from latbench.base.strict_yaml import read_yaml, suggest_name
from latbench.errors import BadData, UsageError
from search.pruning.saliency.fisher import MFAC, DynamicMFAC, WoodFisher
from search.pruning.saliency.scores import MagnitudeScore, Score
from search.pruning.training.methods.acdc import ACDC
from search.pruning.training.methods.asp import ASP
from search.pruning.training.methods.fixed_mask import FixedMask
from search.pruning.training.methods.gmp import GMP
from search.pruning.training.methods.grow_and_prune import GrowAndPrune
from search.pruning.training.methods.mask_decay import MaskDecay
from search.pruning.training.methods.rigl import RigL
from search.pruning.training.methods.sr_ste import SRSTE
from search.pruning.training.methods.ste import STE
from search.pruning.training.methods.step import STEP
from search.pruning.training.methods.structure_decay import StructureDecay
from search.pruning.training.pruner import Pruner

TRAINING_METHODS: dict[str, type[Pruner]] = {
    "gmp": GMP,
    "acdc": ACDC,
    "ste": STE,
    "sr_ste": SRSTE,
    "rigl": RigL,
    "asp": ASP,
    "mask_decay": MaskDecay,
    "structure_decay": StructureDecay,
    "step": STEP,
    "grow_and_prune": GrowAndPrune,
    "held": FixedMask,
}
SCORES: dict[str, type[Score]] = {
    "magnitude": MagnitudeScore,
    "mfac": MFAC,
    "mfac_dynamic": DynamicMFAC,
    "woodfisher": WoodFisher,
}
"""Scores by name, as in `settings: {score: mfac}`, or with own settings `score: {name: mfac, gradients: 32}`."""

STARTS = ("dense", "one_shot")
TRANSPOSABLE = ("exact", "quick")  # by linear programs, or by sorting
SCHEDULES = ("cosine", "linear", "constant")
OPTIMIZERS = ("adam", "adamw", "sgd")


@dataclass(frozen=True)
class Recipe:
    """How a model is pruned while it trains.

    Attributes
    ----------
    method : str
        A key of TRAINING_METHODS.
    settings : mapping of str to object
        Settings of the method.
    start : {"dense", "one_shot"}
        The model at the start.
    steps : int
        Optimizer steps.
    learning_rate : float
        The highest learning rate.
    schedule : {"cosine", "linear", "constant"}
        Curve of the learning rate after the warmup.
    warmup : int
        Steps in which the learning rate rises.
    optimizer : {"adam", "adamw", "sgd"}
        The optimizer.
    weight_decay, momentum : float
        Settings of the optimizer; momentum is that of sgd.
    clip_norm : float or None
        Largest norm of all gradients together; None does not clip.
    accumulate : int
        Batches an optimizer step.
    transposable : {"exact", "quick"} or None
        Whether N:M masks hold along the outputs too.
    seed : int
        Seed of the training.

    Raises
    ------
    UsageError
        An entry is wrong.
    """

    method: str = "gmp"
    settings: Mapping[str, Any] = field(default_factory=dict)
    start: str = "dense"
    steps: int = 300
    learning_rate: float = 1e-3
    schedule: str = "cosine"
    warmup: int = 0
    optimizer: str = "adam"
    weight_decay: float = 0.0
    momentum: float = 0.9
    clip_norm: float | None = None
    accumulate: int = 1
    transposable: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (
            ("method", tuple(TRAINING_METHODS)),
            ("start", STARTS),
            ("schedule", SCHEDULES),
            ("optimizer", OPTIMIZERS),
        ):
            if getattr(self, name) not in known:
                raise UsageError(
                    f"{name} {getattr(self, name)!r} is unknown{suggest_name(getattr(self, name), known)}: "
                    f"known are {', '.join(known)}"
                )
        for name, least, most in (
            ("steps", 1, math.inf),
            ("warmup", 0, math.inf),
            ("accumulate", 1, math.inf),
            ("seed", 0, MOST_SEED),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
                raise UsageError(f"{name} is a whole number {bounds}, not {value!r}")
        for name, above in (
            ("learning_rate", True),
            ("weight_decay", False),
            ("momentum", False),
            ("clip_norm", True),
        ):
            value = getattr(self, name)
            if name == "clip_norm" and value is None:
                continue
            if not _is_number(value) or value < 0 or (above and value == 0):
                raise UsageError(f"{name} is a number {'above' if above else 'of at least'} 0, not {value!r}")
        if self.warmup > self.steps:
            raise UsageError(f"warmup is part of the {self.steps} steps, and not {self.warmup} of them")
        if self.momentum >= 1:
            raise UsageError(f"momentum is a number below 1, not {self.momentum!r}")
        if self.transposable not in (None, *TRANSPOSABLE):
            raise UsageError(f"transposable is {' or '.join(TRANSPOSABLE)}, not {self.transposable!r}")
        if self.method == "step" and self.optimizer == "sgd":
            raise UsageError("step freezes Adam's second moments: the optimizer is adam or adamw, not sgd")
        if self.method == "held" and self.start != "one_shot":
            raise UsageError("held keeps the masks of one-shot pruning: add `start: one_shot` to the recipe")
        if self.method == "held" and self.transposable:
            raise UsageError("held keeps the masks that there are: it cannot make them transposable")
        if getattr(self.build_pruner(), "every", None) == 1 and self.transposable == "exact":
            raise UsageError(
                f"{self.method} draws masks at every step, and exact transposable ones take a linear program each: "
                "take `transposable: quick`, or settings {every: 100}"
            )

    def build_pruner(self, masks: Mapping[str, Tensor] | None = None) -> Pruner:
        """Build a pruner with the settings.

        Parameters
        ----------
        masks : mapping of str to bool Tensor of shape (m, k), optional
            Masks of the model at the start, for the method `held`.

        Returns
        -------
        Pruner
            It also knows the recipe's seed, and that the model is trained.

        Raises
        ------
        UsageError
            The method does not have a setting.
        """
        kind = TRAINING_METHODS[self.method]
        own: dict[str, Any] = {"given_masks": masks or {}, "seed": self.seed, "trained": True}
        settings = {each.name: own[each.name] for each in fields(kind) if each.name in own}
        return kind(**settings | _check_settings(self.method, kind, self.settings))

    def to_dict(self) -> dict[str, Any]:
        """Return all entries as plain values, for a manifest."""
        return asdict(self)


def read_recipe(text: str) -> Recipe:
    """Read a recipe from a YAML file, or return the default recipe of a method.

    Parameters
    ----------
    text : str
        Path of a YAML file, or a key of TRAINING_METHODS.

    Returns
    -------
    Recipe
        The recipe.

    Raises
    ------
    BadData
        The file is missing or not YAML, or an entry is unknown or appears twice.
    UsageError
        An entry has a wrong value.
    """
    if text in TRAINING_METHODS:
        return Recipe(method=text)
    path = Path(text)
    if not path.is_file():
        methods = ", ".join(TRAINING_METHODS)
        raise BadData(
            f"no recipe {text}{suggest_name(text, TRAINING_METHODS)}: give a YAML file, or one of {methods}"
        )
    content = read_yaml(path)
    known = [each.name for each in fields(Recipe)]
    if not isinstance(content, dict):
        raise BadData(f"{path}: a recipe is a mapping with entries such as `method: gmp`")
    if unknown := [name for name in content if name not in known]:
        raise BadData(
            f"{path}: unknown entry {unknown[0]!r}{suggest_name(unknown[0], known)}: a recipe has {', '.join(known)}"
        )
    if not isinstance(content.get("settings", {}), dict):
        raise BadData(f"{path}: settings are a mapping, such as {{begin: 0.1}}")
    try:
        return Recipe(**content)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _check_settings(what: str, kind: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check YAML values against the fields of a method or score, and return them as their values."""
    kinds = {each.name: str(each.type) for each in fields(kind) if each.init and each.name != "given_masks"}
    for name in settings:
        if name not in kinds:
            raise UsageError(
                f"{what} has no setting {name!r}{suggest_name(name, kinds)}: it has "
                f"{', '.join(sorted(kinds)) or 'none'}"
            )
    return {name: _check_setting(f"{what}'s {name}", value, kinds[name]) for name, value in settings.items()}


def _check_setting(what: str, value: Any, kind: str) -> Any:
    """Check a YAML value against the type that the field's annotation names, and return the field's value."""
    if kind == "Score":
        return _build_score(what, value)
    if isinstance(value, list) and "tuple" in kind and all(isinstance(item, str) for item in value):
        return tuple(value)
    fits = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": _is_number(value),
        "float | None": value is None or _is_number(value),
        "bool": isinstance(value, bool),
    }.get(kind, isinstance(value, str))
    if not fits:
        raise UsageError(f"{what} must be of kind {kind}, not {value!r}")
    return value


def _build_score(what: str, value: Any) -> Score:
    entries = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = entries.pop("name", None)
    if name not in tuple(SCORES):
        raise UsageError(f"{what} is one of {', '.join(SCORES)}, not {name!r}{suggest_name(name, SCORES)}")
    kind: Any = SCORES[name]
    score: Score = kind(**_check_settings(name, kind, entries))
    return score


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
