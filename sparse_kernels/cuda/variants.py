"""Every kernel as it may ever be compiled: what the compile gate goes through."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from sparse_kernels.cuda.program import Prepare, PrepareConv2d, Variant

# Modules of this package, each with VARIANTS and `build_program`.
FAMILIES = ("vector", "vector_few", "vector_sm90", "nm", "nm_sm90", "csr")

# The most columns of a product for which FOR_FEW is asked; the others take any number.
FOR_FEW, MOST_FEW = "vector_few", 64

# Families that may run a linear layer, by format: the first that does not refuse does.
LINEAR = {
    "dense": ("vector_few", "vector_sm90", "vector"),
    "vector": ("vector_few", "vector_sm90", "vector"),
    "shflbw": ("vector_few", "vector_sm90", "vector"),
    "block": ("vector_few", "vector_sm90", "vector"),
    "nm": ("nm_sm90", "nm"),
    "unstructured": ("csr",),
}

# The same for a convolution.
CONV2D = {"dense": ("vector",), "vector": ("vector",), "shflbw": ("vector",), "block": ("vector",)}


def list_variants(families: Iterable[str] = FAMILIES) -> list[Variant]:
    """Return the variants of families, each once."""
    found: dict[str, Variant] = {}
    for family in families:
        for variant in importlib.import_module(f"{__package__}.{family}").VARIANTS:
            if found.setdefault(variant.name, variant) != variant:
                raise ValueError(f"two different variants are called {variant.name}")
    return list(found.values())


def list_linear_families(format: str, n: int) -> tuple[str, ...]:
    """Return the families that are asked for a linear layer of about n columns, in their order.

    None for an unknown format.
    """
    return tuple(family for family in LINEAR.get(format, ()) if family != FOR_FEW or takes_few_columns(n))


def takes_few_columns(n: int) -> bool:
    """Return whether a product of n columns is of those for which FOR_FEW is asked."""
    return n <= MOST_FEW


def find_linear_builder(family: str) -> Prepare:
    """Return the function of a family that makes a linear layer's packed weight into a program."""
    prepare: Prepare = importlib.import_module(f"{__package__}.{family}").build_program
    return prepare


def find_conv2d_builder(family: str) -> PrepareConv2d:
    """Return the same for a convolution's packed weight."""
    prepare: PrepareConv2d = importlib.import_module(f"{__package__}.{family}").build_conv2d_program
    return prepare
