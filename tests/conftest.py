"""What every test may use: a generator seeded from the test's own name, and the folder of real data."""

import os
import zlib
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's name: the same test draws the same numbers, different tests different ones."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real data (LATBENCH_DATA, or ../shared/data beside the project); skips where it is absent."""
    folder = Path(os.environ.get("LATBENCH_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set LATBENCH_DATA")
    return folder
