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
    distill: null               # outputs or layers: learn the dense model's outputs, or its layers' too, not the loss
    ema: null                   # decay of an average of the weights, such as 0.99, that the trained model gets
    transposable: null          # exact or quick: N:M masks along the outputs too; quick keeps at least half the score
    seed: 0

Missing entries have the values above; missing `settings` have those of the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from latbench import MOST_SEED
from latbench.base.declared_keys import (
    FLAG,
    MAPPING,
    NAMES,
    TEXT,
    Key,
    Kind,
    check_mapping,
    check_names,
    choice,
    declare,
    integer,
    list_declared,
    named_in_errors,
    number,
    optional,
    suggest_name,
)
from latbench.base.recipe_names import AUTO_RECIPE
from latbench.base.strict_yaml import read_yaml
from latbench.errors import BadData, UsageError
from search.pruning.saliency.fisher import MFAC, DynamicMFAC, WoodFisher
from search.pruning.saliency.scores import MagnitudeScore, Score
from search.pruning.training.dense_teacher import TAUGHT
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
    distill : {"outputs", "layers"} or None
        What the dense model teaches in place of the task's loss: `search.pruning.training.dense_teacher`.
    ema : float or None
        Decay of the moving average of the weights that the trained model gets; None for the last weights.
    transposable : {"exact", "quick"} or None
        Whether N:M masks hold along the outputs too.
    seed : int
        Seed of the training.

    Raises
    ------
    UsageError
        An entry is wrong.
    """

    method: str = declare("gmp", choice(*TRAINING_METHODS), "Method that draws the masks")
    settings: Mapping[str, Any] = field(
        default_factory=dict, metadata={"key": Key(MAPPING, "Settings of the method, such as {begin: 0.1}")}
    )
    start: str = declare("dense", choice("dense", "one_shot"), "Model at the start; `held` keeps one_shot's masks")
    steps: int = declare(300, integer(1), "Optimizer steps")
    learning_rate: float = declare(1e-3, number(above=0), "The highest learning rate")
    schedule: str = declare("cosine", choice("cosine", "linear", "constant"), "Learning rate after the warmup")
    warmup: int = declare(0, integer(0), "Steps in which the learning rate rises")
    optimizer: str = declare("adam", choice("adam", "adamw", "sgd"), "Optimizer")
    weight_decay: float = declare(0.0, number(least=0), "Weight decay of the optimizer")
    momentum: float = declare(0.9, number(least=0, below=1), "Momentum of sgd")
    clip_norm: float | None = declare(None, optional(number(above=0)), "Largest norm of all gradients together")
    accumulate: int = declare(1, integer(1), "Batches of an optimizer step")
    distill: str | None = declare(
        None,
        optional(choice(*TAUGHT)),
        "Outputs of the dense model, or of its layers too, to learn instead of the loss",
    )
    ema: float | None = declare(
        None, optional(number(above=0, below=1)), "Decay of the average of the weights that the model gets at the end"
    )
    transposable: str | None = declare(
        None,
        optional(choice("exact", "quick")),
        "N:M masks along the outputs too; quick ones keep at least half the score",
    )
    seed: int = declare(0, integer(0, MOST_SEED), "Random seed of the training")

    def __post_init__(self) -> None:
        with named_in_errors(kind=UsageError):
            for name, key in RECIPE_KEYS.items():
                key.kind.parse(getattr(self, name), name)
        if self.warmup > self.steps:
            raise UsageError(f"warmup is part of the {self.steps} steps, and not {self.warmup} of them")
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
        with named_in_errors(kind=UsageError):
            return kind(**settings | _check_settings(self.method, kind, self.settings))

    def to_dict(self) -> dict[str, Any]:
        """Return all entries as plain values, for a manifest."""
        return asdict(self)


RECIPE_KEYS = list_declared(Recipe)
"""The keys of a recipe's file."""


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
        names = [AUTO_RECIPE, *TRAINING_METHODS]
        raise BadData(f"no recipe {text}{suggest_name(text, names)}: give a YAML file, or one of {', '.join(names)}")
    content = read_yaml(path)
    with named_in_errors(path):
        entries = check_names(content, "a recipe", RECIPE_KEYS)
        MAPPING.parse(entries.get("settings", {}), "settings")
    try:
        return Recipe(**entries)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def list_setting_keys(record: Any) -> dict[str, Key]:
    """Return the keys of a method's or score's settings, by name."""
    return {
        each.name: Key(_SETTINGS[str(each.type)], "")
        for each in fields(record)
        if each.init and each.name != "given_masks"
    }


def _check_settings(name: str, record: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a method or score as the values of its fields."""
    return check_mapping(settings, f"the settings of {name}", list_setting_keys(record), f"settings of {name}: ")


def _parse_score(value: Any, what: str) -> Score:
    """Return a score from its name, or from a mapping of its name and settings."""
    entries = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = choice(*SCORES).parse(entries.pop("name", None), what)
    kind: Any = SCORES[name]
    score: Score = kind(**_check_settings(name, kind, entries))
    return score


def _parse_stages(value: Any, what: str) -> str | tuple[str, ...]:
    """Return a name, or a tuple of names."""
    parsed: str | tuple[str, ...] = TEXT.parse(value, what) if isinstance(value, str) else NAMES.parse(value, what)
    return parsed


_SETTINGS = {
    "int": integer(),
    "float": number(),
    "float | None": optional(number()),
    "bool": FLAG,
    "str": TEXT,
    "str | tuple[str, ...]": Kind("a name or a list of names", _parse_stages),
    "Score": Kind("a score, or a mapping of its name and settings", _parse_score),
}
"""The kind of a setting, by the type that the field of a method or score has."""
