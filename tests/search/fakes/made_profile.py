"""A profile of a model without a search: every time and loss in it is made up."""

from torch import nn

from search.artifacts.layer_database import hash_model
from search.artifacts.profile import LayerChoice, Profile


def make_profile(name: str, model: nn.Module, choices: dict[str, tuple[str, float]]) -> Profile:
    """Return the profile of these options, by layer, of a task of this name."""
    layers = {layer: LayerChoice(*choice, 1e-3, 9e-4, 2e-3, 0.1) for layer, choice in choices.items()}
    return Profile(
        task=name, layers=layers, backend="numba", threads=2, batch=32, device="cpu", target=2.0,
        dense_engine="torch", dense_seconds=4e-3, dense_seconds_low=4e-3, dense_seconds_high=4e-3,
        fixed_seconds=1e-4, fixed_seconds_low=1e-4, fixed_seconds_high=1e-4, predicted_seconds=2e-3,
        predicted_low=2e-3, predicted_high=2e-3, loss=1.0, error=0.2, bound=0.2, ceiling=4.0, strategy="exact",
        confidence=0.9, additivity_before=0.1, additivity_after=0.1,
        seed=0, table_hash="t", model_hash=hash_model(model), inputs="i",
    )  # fmt: skip
