"""Fitted models as JSON: what they have learned, with arrays as base64. No part of it is code, unlike in a pickle.

Plain values stand for themselves. Anything else is an object with one entry, whose name says what it is:

    {"array": [dtype, shape, base64]}      an array of NumPy
    {"number": "nan"}                      a float that JSON has no word for
    {"tuple": [...]}, {"set": [...]}       in any order of a set
    {"pairs": [[key, value], ...]}         a mapping
    {"kept": name, "with": {...}}          an object of one of the classes KEPT, and its attributes
"""

from __future__ import annotations

import base64
import dataclasses
import math
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator

from cost_models.estimators.anchored_lookup import AnchoredLookup, MeasuredCurve
from cost_models.estimators.boosted import Boosted, CorrectedRates
from cost_models.estimators.error_size import ErrorSize
from cost_models.estimators.fitted_trees import TreeCorrection
from cost_models.estimators.hybrid import Hybrid
from cost_models.estimators.roofline import RatesByEngine, Roofline, WorkRates
from cost_models.estimators.transfer import Transfer
from cost_models.estimators.transfer_candidates import (
    AnchorRoofline,
    AnchorTrees,
    InputBuilder,
    ShiftedSource,
    SourceCorrection,
    SourceDevice,
    StackedModel,
)
from cost_models.estimators.tree_arrays import TreeArrays
from cost_models.features.feature_encoder import FeatureEncoder
from cost_models.refusals import BadModel
from cost_models.uncertainty.edge_calibration import Edge, Ring

KEPT: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        AnchoredLookup, Roofline, Boosted, Hybrid, Transfer, MeasuredCurve, WorkRates, RatesByEngine, CorrectedRates,
        TreeArrays, ErrorSize, FeatureEncoder, Edge, Ring, SourceDevice, InputBuilder, AnchorRoofline, AnchorTrees,
        ShiftedSource, SourceCorrection, StackedModel,
    )
}  # fmt: skip
"""The classes of which a file may hold objects: estimators and dataclasses."""

_KINDS = "biufU"
"""Kinds of arrays that a file may hold: numbers and texts."""


def encode(value: Any) -> Any:
    """Return what stands for a value in JSON. Raises TypeError for a value of another kind."""
    if isinstance(value, TreeCorrection):
        value = TreeArrays.from_fitted(value.fitted)
    if isinstance(value, np.generic):
        value = value.item()
    match value:
        case float() if not math.isfinite(value):
            return {"number": str(value)}
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [encode(each) for each in value]
        case tuple():
            return {"tuple": [encode(each) for each in value]}
        case set() | frozenset():
            return {"set": [encode(each) for each in sorted(value, key=repr)]}
        case dict():
            return {"pairs": [[encode(key), encode(each)] for key, each in value.items()]}
        case np.ndarray() if value.dtype.kind in _KINDS:
            content = np.ascontiguousarray(value)
            return {"array": [value.dtype.str, list(value.shape), base64.b64encode(content.tobytes()).decode()]}
    if KEPT.get(type(value).__name__) is not type(value):
        raise TypeError(f"a model file cannot hold a {type(value).__name__}")
    if isinstance(value, BaseEstimator):
        attributes = vars(value)
    else:
        attributes = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {"kept": type(value).__name__, "with": {name: encode(each) for name, each in attributes.items()}}


def decode(value: Any) -> Any:
    """Return the value that `encode` returned this for. Raises BadModel for anything else."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    try:
        match value:
            case {"number": str(text)}:
                return float(text)
            case {"tuple": list(values)}:
                return tuple(map(decode, values))
            case {"set": list(values)}:
                return frozenset(map(decode, values))
            case {"pairs": list(pairs)}:
                return {decode(key): decode(each) for key, each in pairs}
            case {"array": [str(dtype), list(shape), str(content)]} if np.dtype(dtype).kind in _KINDS:
                return np.frombuffer(base64.b64decode(content, validate=True), dtype).reshape(shape).copy()
            case {"kept": str(name), "with": dict(attributes)} if name in KEPT:
                return _build(KEPT[name], {key: decode(each) for key, each in attributes.items()})
    except (TypeError, ValueError, KeyError) as error:
        raise BadModel(f"what it has learned is damaged ({error})") from error
    raise BadModel(f"what it has learned holds something unknown: {', '.join(map(str, value))}")


def _build(kind: type[Any], attributes: dict[str, Any]) -> Any:
    """Return the object with these attributes."""
    if not issubclass(kind, BaseEstimator):
        return kind(**attributes)
    settings = {name: attributes.pop(name) for name in kind().get_params()}
    model = kind(**settings)
    for name, each in attributes.items():
        if not name.endswith("_") or name.startswith("_"):
            raise BadModel(f"what it has learned holds something unknown: {name}")
        setattr(model, name, each)
    return model
