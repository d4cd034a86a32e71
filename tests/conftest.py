"""What every test may use: a generator seeded from the test's own name, the folder of real data, a Ray cluster.

The folders in HELPERS hold modules that tests share. A test imports such a module by its plain name, as in
`import gpu_fakes`. A process that a test starts gets the module's `__file__`, or takes over `sys.path` as workers do.
"""

import functools
import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HELPERS = (
    "latbench/fakes", "sparse_kernels/cases", "sparse_kernels/cuda", "sparse_kernels/cuda/emulator",
    "sparse_kernels/cuda/mutations", "models", "search/fakes",
)  # fmt: skip
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in HELPERS]

# Compiled kernels of all tests, also of those with a cache folder of their own, and of the processes that they start.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "kernels"))

# OpenVINO's telemetry forks from threads of its own, in the middle of tests, and reports to the web. Some tests
# import OpenVINO themselves.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

# A shell's background jobs, and nohup's, ignore these, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


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


@pytest.fixture(scope="module")
def ray_head() -> Iterator[Any]:
    """A Ray cluster on this machine, which RAY_ADDRESS names: a head without processors, to which
    `small_node(num_cpus=1)` adds nodes; `folder` goes with it.
    """
    # Sockets of Ray lie below this folder, and their names may be 107 bytes long.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    (folder / "ray").mkdir()  # where Ray notes a cluster's address, and takes for granted that it can
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONWARNINGS", "ignore")  # of Ray's own processes
        from ray.cluster_utils import Cluster

        small: dict[str, Any] = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
        found = Cluster(True, head_node_args={"num_cpus": 0, "temp_dir": str(folder), **small})
        found.folder, found.small_node = folder, functools.partial(found.add_node, **small)
        patch.setenv("RAY_ADDRESS", found.address)
        try:
            yield found
        finally:
            found.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
