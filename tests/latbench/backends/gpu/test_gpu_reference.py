"""The products whose rates are ceilings, in eight bits: in the order of operands that tensor cores have, or none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cupy")

from latbench.backends.gpu import gpu_reference
from latbench.timing import gpu_ceilings

SIZE = 32


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The works of a GPU that is not there; a test sets its compute capability."""
    made = SimpleNamespace(capability=(9, 0))
    zeros, ones = torch.zeros, torch.ones
    monkeypatch.setattr(gpu_ceilings, "PRODUCT_SIZE", SIZE)
    monkeypatch.setattr(gpu_reference, "open_torch_driver", lambda: "a driver")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: made.capability)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, dtype, device: zeros(*sizes, dtype=dtype))
    monkeypatch.setattr(torch, "ones", lambda size, device: ones(size))
    made.products = lambda dtype: list(gpu_reference.GpuWorks.products(made, dtype))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize(("dtype", "name"), [("int8", "_int_mm"), ("fp8", "_scaled_mm")])
def test_bytes_are_multiplied_row_by_column(
    works: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, dtype: str, name: str
) -> None:
    seen: list[tuple[bool, bool, torch.dtype]] = []

    def product(left: torch.Tensor, right: torch.Tensor, **_: Any) -> None:
        seen.append((left.is_contiguous(), right.t().is_contiguous(), left.dtype))

    monkeypatch.setattr(torch, name, product)
    [work] = works.products(dtype)
    assert (work.done, work.driver) == (2.0 * SIZE**3, "a driver")
    work.call()
    assert set(seen) == {(True, True, torch.int8 if dtype == "int8" else torch.float8_e4m3fn)}


def test_a_type_that_the_gpu_or_torch_lacks_has_no_ceiling(
    works: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("not for this device")

    monkeypatch.setattr(torch, "_scaled_mm", refuses)
    assert works.products("fp8") == []
    works.capability = (8, 0)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, **__: None)
    assert works.products("fp8") == [] and len(works.products("int8")) == 1
    works.capability = (7, 5)
    assert works.products("int8") == [] and works.products("bfloat16") == []
