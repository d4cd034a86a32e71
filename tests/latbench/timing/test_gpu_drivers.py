"""torch's driver captures each graph on a stream of its own; the pool hands the same streams out again and again."""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from latbench.timing.gpu_drivers import STREAMS, TorchDriver


class Graph:
    def replay(self) -> None:
        pass


class FakeTorch:
    """As much of torch as the driver asks for: a pool of streams in a ring, and where each graph was captured."""

    def __init__(self, pool: int = STREAMS) -> None:
        self._next, self._pool = 0, pool
        self.captured: list[int] = []
        self.int8 = "int8"
        self.cuda = SimpleNamespace(
            Stream=self._stream, CUDAGraph=Graph, graph=self._graph, set_stream=lambda stream: None,
            get_device_properties=lambda number: SimpleNamespace(L2_cache_size=1),
        )  # fmt: skip

    def empty(self, size: int, dtype: Any, device: str) -> Any:
        return None

    def _stream(self) -> Any:
        self._next += 1
        return SimpleNamespace(cuda_stream=self._next % self._pool)

    @contextlib.contextmanager
    def _graph(self, graph: Graph, stream: Any) -> Iterator[None]:
        self.captured.append(stream.cuda_stream)
        yield


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)  # type: ignore[arg-type]
    return fake


def nothing() -> None:
    pass


def test_no_two_living_graphs_share_a_stream(torch: FakeTorch) -> None:
    driver = TorchDriver()
    replays: list[Callable[[], Any]] = [driver.capture(nothing) for _ in range(STREAMS)]
    assert len(set(torch.captured)) == STREAMS
    with pytest.raises(RuntimeError, match="32 graphs of torch are in use, and it has no more streams"):
        driver.capture(nothing)
    freed = torch.captured[5]
    del replays[5]
    gc.collect()
    replays.append(driver.capture(nothing))
    assert torch.captured[-1] == freed


def test_a_block_never_has_more_graphs_of_torch_than_streams() -> None:
    from latbench.sweeping.gpu_machine import GPU_SETTINGS
    from latbench.sweeping.gpu_points import list_smoke_points, list_standard_blocks
    from latbench.workloads.points import group_into_blocks

    blocks = [*list_standard_blocks("x"), list_smoke_points("x")]
    flat = [point for block in blocks for point in block]
    for block in [*blocks, *group_into_blocks(flat, 0, GPU_SETTINGS.block_points)]:
        for process in ("torch_gpu", "torch_sparse"):
            assert sum(point.backend == process and point.launch_mode == "graph" for point in block) <= STREAMS
