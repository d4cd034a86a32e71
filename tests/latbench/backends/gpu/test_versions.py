"""What a row of a GPU's table timed, by version: where that is something else now, the row does not count."""

from collections.abc import Sequence

import pandas as pd
import pytest

from latbench.backends.gpu.gpu_versions import Versions, list_kernel_families
from latbench.sweeping import gpu_points
from latbench.sweeping.gpu_points import build_gpu_point
from latbench.workloads.points import Point
from sparse_kernels.cuda import family_fingerprint
from sparse_kernels.fingerprints import numba_cuda_formats
from sparse_kernels.patterns import NM, BlockWise, Dense, VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape

SHAPE, FEW = LinearShape(256, 128, 256), LinearShape(256, 128, 16)
PACKAGES = {
    "torch_gpu": "2.11.0",
    "torch_sparse": "2.11.0",
    "cublas": "14.2.0",
    "cupy": "14.2.0",
    "numba_cuda": "0.30",
}
LIBRARIES = {
    "driver": "580.159.04", "cublas": "13.1.0.3", "cudnn": "9.15", "cusparselt": "0.8.0", "nvrtc": "13.0",
    "nvvm": "13.0.88", "triton": "3.6.0",
}  # fmt: skip
NOW = Versions(PACKAGES, LIBRARIES, architecture="sm_90a")


@pytest.fixture(autouse=True)
def quick_fingerprints(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Made-up fingerprints, which a test may change."""
    digits = {
        "vector": "00000001", "vector_sm90": "00000002", "nm": "00000003", "nm_sm90": "00000004",
        "vector_few": "00000005",
    }  # fmt: skip
    monkeypatch.setattr(family_fingerprint, "fingerprint_family", lambda family, architecture: digits[family])
    monkeypatch.setattr(numba_cuda_formats, "fingerprint_module", lambda module: f"{module}-1")
    return digits


def of(kernel: gpu_points.Kernel, pattern: object = None, shape: object = SHAPE) -> Point:
    return build_gpu_point("x", shape, pattern or VectorWise(64), 0.75, kernel)  # type: ignore[arg-type]


OURS = of(gpu_points.OURS[0])


def rows(*wanted: tuple[Point, str | None]) -> pd.DataFrame:
    found = [
        (point.backend, point.kernel, point.shape.op, point.pattern.format, point.shape.n, text)
        for point, text in wanted
    ]
    return pd.DataFrame(found, columns=["backend", "kernel_requested", "op", "format", "n", "backend_version"])


@pytest.mark.parametrize(
    ("point", "text"),
    [
        (of(gpu_points.DENSE[0], Dense()), "2.11.0 (cublas 13.1.0.3, driver 580.159.04)"),
        (of(gpu_points.DENSE_CONV[0], Dense()), "2.11.0 (cudnn 9.15, driver 580.159.04)"),
        (of(gpu_points.CUSPARSELT[0], NM(2, 4)), "2.11.0 (cusparselt 0.8.0, driver 580.159.04)"),
        (of(gpu_points.CUTLASS[0], NM(2, 4)), "2.11.0 (driver 580.159.04)"),
        (of(gpu_points.BSR[0], BlockWise(64, 64)), "2.11.0 (driver 580.159.04, triton 3.6.0)"),
        (of(gpu_points.NUMBA[0]), "0.30 (driver 580.159.04, numba_vector vector-1, nvvm 13.0.88)"),
        (OURS, "14.2.0 (driver 580.159.04, nvrtc 13.0, vector 00000001, vector_sm90 00000002)"),
    ],
)
def test_a_version_names_what_the_time_depends_on(point: Point, text: str) -> None:
    assert NOW.text(point) == text
    assert NOW.current(rows((point, text))).tolist() == [True]


def test_a_row_names_the_families_that_were_asked_until_one_ran_it(quick_fingerprints: dict[str, str]) -> None:
    first = NOW.text(OURS, ["vector_sm90"])
    assert first == "14.2.0 (driver 580.159.04, nvrtc 13.0, vector_sm90 00000002)"
    table = rows(
        (OURS, first), (OURS, NOW.text(OURS)), (of(gpu_points.OURS[0], NM(2, 4)), NOW.text(OURS, ["nm_sm90"]))
    )
    assert NOW.current(table).tolist() == [True, True, True]
    quick_fingerprints["vector"] = "ffffffff"  # which the first and the last do not hang on
    assert NOW.current(table).tolist() == [True, False, True]
    quick_fingerprints["vector_sm90"] = "ffffffff"
    assert NOW.current(table).tolist() == [False, False, True]


def test_a_row_is_old_where_another_family_is_asked_first_now() -> None:
    few = of(gpu_points.OURS[0], shape=FEW)
    before, now = NOW.text(few, ["vector_sm90"]), NOW.text(few, ["vector_few"])
    assert NOW.current(rows((few, before), (few, now), (few, NOW.text(few)))).tolist() == [False, True, True]
    # Of more tokens the new family is not asked.
    assert NOW.current(rows((OURS, before), (OURS, now))).tolist() == [True, False]


@pytest.mark.parametrize("name", ["driver", "cublas"])
def test_a_new_library_or_driver_voids_what_depends_on_it(name: str) -> None:
    dense, ours, other = of(gpu_points.DENSE[0], Dense()), OURS, of(gpu_points.CUSPARSELT[0], NM(2, 4))
    table = rows(*((point, NOW.text(point)) for point in (dense, ours, other)))
    after = Versions(PACKAGES, {**LIBRARIES, name: "999"}, architecture="sm_90a")
    assert after.current(table).tolist() == ([False] * 3 if name == "driver" else [False, True, True])


@pytest.mark.parametrize(
    "text",
    [None, "", "14.2.0", "14.2.0+0123abcd", "14.1.0 (driver 580.159.04, nvrtc 13.0, vector 00000001)",
     "14.2.0 (driver 580.159.04, nvrtc 13.0)", "14.2.0 (driver 580.159.04, nvrtc 13.0, no_such_family 00000001)",
     "14.2.0 (nvrtc 13.0, vector 00000001)",
     "14.2.0 (cublas 13.1.0.3, driver 580.159.04, nvrtc 13.0, vector 00000001)"],
)  # fmt: skip
def test_what_does_not_name_all_that_is_known_now_does_not_count(text: str | None) -> None:
    assert NOW.current(rows((OURS, text))).tolist() == [False]


def test_each_process_may_have_a_library_of_its_own() -> None:
    loaded = {"torch": {"cublas": "13.0.2", "cudnn": None}, "cupy_peers": {"cublas": "13.1.1"}}
    now = Versions(PACKAGES, LIBRARIES, loaded, "sm_90a")
    assert now.text(of(gpu_points.DENSE[0], Dense())) == "2.11.0 (cublas 13.0.2, driver 580.159.04)"
    assert now.text(of(gpu_points.DENSE_AGAIN[0], Dense())) == "14.2.0 (cublas 13.1.1, driver 580.159.04)"
    assert now.text(of(gpu_points.DENSE_CONV[0], Dense())) == "2.11.0 (cudnn 9.15, driver 580.159.04)"


def test_what_is_not_known_is_not_named() -> None:
    dense = of(gpu_points.DENSE[0], Dense())
    unknown = Versions(PACKAGES, {"driver": "580.159.04", "cublas": None})
    assert unknown.text(dense) == "2.11.0 (driver 580.159.04)"
    assert Versions({"torch_gpu": "2.11.0"}).text(dense) == "2.11.0"
    assert NOW.current(rows((dense, unknown.text(dense)))).tolist() == [False]
    assert Versions({}).text(dense) is None and not Versions({}).current(rows((dense, "2.11.0"))).any()
    assert NOW.current(rows()).shape == (0,)


def test_families_are_those_of_the_operation_and_the_format() -> None:
    conv = Conv2dShape(2, 8, 5, 6, 64, 3, 3)
    wanted: list[tuple[Point, Sequence[str]]] = [
        (OURS, ("vector_sm90", "vector")),
        (of(gpu_points.OURS[0], shape=FEW), ("vector_few", "vector_sm90", "vector")),
        (of(gpu_points.OURS_CONV[0], shape=conv), ("vector",)),
        (of(gpu_points.OURS[0], NM(2, 4)), ("nm_sm90", "nm")), (of(gpu_points.NUMBA[0], NM(2, 4)), ("numba_nm",)),
        (of(gpu_points.DENSE[0], Dense()), ()),
    ]  # fmt: skip
    for point, families in wanted:
        assert list_kernel_families(point.backend, point.shape.op, point.pattern.format, point.shape.n) == families


def test_a_layer_that_no_family_takes_is_refused_once() -> None:
    refused = of(gpu_points.OURS_CONV[0], NM(2, 4), Conv2dShape(2, 8, 5, 6, 64, 3, 3))
    text = NOW.text(refused)
    assert text == "14.2.0 (driver 580.159.04, nvrtc 13.0)"
    assert NOW.current(rows((refused, text))).tolist() == [True]
