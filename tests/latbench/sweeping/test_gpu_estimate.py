"""How long a sweep of a GPU takes, said before it begins and without one."""

import runpy
from pathlib import Path

from latbench.sweeping import gpu_estimate, gpu_points
from latbench.sweeping.gpu_estimate import estimate_gpu_seconds, estimate_gpu_table_bytes
from latbench.sweeping.gpu_machine import GPU_SETTINGS
from latbench.sweeping.gpu_points import build_gpu_point, list_standard_blocks
from latbench.workloads.points import Point
from sparse_kernels.patterns import Dense, VectorWise
from sparse_kernels.shapes import LinearShape

SMALL = LinearShape(64, 64, 8)


def of(
    kernel: gpu_points.Kernel = gpu_points.OURS[0], *, device: str = "nvidia-h200", m: int = 64, v: int = 8
) -> Point:
    return build_gpu_point(device, LinearShape(m, 64, 8), VectorWise(v), 0.75, kernel)


def more(*wanted: Point) -> float:
    """By how much longer the sweep is with the later points than with the first alone."""
    return estimate_gpu_seconds(wanted) - estimate_gpu_seconds(wanted[:1])


def test_a_point_takes_what_the_settings_allow_it() -> None:
    again = build_gpu_point("nvidia-h200", SMALL, VectorWise(8), 0.5, gpu_points.OURS[0])
    assert GPU_SETTINGS.max_seconds < more(of(), again) < GPU_SETTINGS.max_seconds + 1
    assert estimate_gpu_seconds([]) == estimate_gpu_table_bytes([]) == 0


def test_kernels_count_once_and_processes_start_together() -> None:
    ours, others = of(), of(v=16)
    assert more(ours, others) > more(ours, of(m=72)) + 0.9 * gpu_estimate._COMPILE_SECONDS
    peer = build_gpu_point("nvidia-h200", SMALL, Dense(), 0.0, gpu_points.DENSE[0])
    assert more(ours, peer) < gpu_estimate._START_SECONDS / 2


def test_processes_draw_their_weights_side_by_side() -> None:
    large = LinearShape(8192, 8192, 8)
    ours, numbas = (
        build_gpu_point("nvidia-h200", large, VectorWise(8), 0.75, kernel)
        for kernel in (gpu_points.OURS[0], gpu_points.NUMBA[0])
    )
    drawing = 8192**2 / gpu_estimate._HOST_ELEMENTS_PER_SECOND
    assert more(ours, numbas) < drawing / 2  # in a process of its own
    again = build_gpu_point("nvidia-h200", large, VectorWise(8), 0.5, gpu_points.OURS[0])
    assert more(ours, again) > 0.9 * drawing  # after the first, in the same one


def test_a_search_for_parameters_takes_what_it_is_given() -> None:
    from latbench.backends.gpu.torch_sparse import TUNE_SECONDS

    plain, tuned = (of((backend, kernel, "feature_major")) for backend, kernel in (
        ("torch_sparse", "bsr"), ("torch_sparse", "bsr_tuned"),
    ))  # fmt: skip
    assert more(plain, tuned) >= TUNE_SECONDS == gpu_estimate._TUNE_SECONDS


def test_results_are_checked_slowly_on_chips_without_float64() -> None:
    large = LinearShape(4096, 4096, 8192)
    fast, slow = (
        estimate_gpu_seconds([build_gpu_point(device, large, Dense(), 0.0, gpu_points.DENSE[0])])
        for device in ("nvidia-a100-sxm4-80gb", "nvidia-l40s")
    )
    assert slow > fast + 1


def test_the_standard_sweep_fits_the_two_calls_of_a_visit() -> None:
    from latbench.cli.gpu_session import RESERVE_SECONDS

    visit = runpy.run_path(str(Path(__file__).parents[2] / "gpu_visit.py"))
    calls = visit["FIRST_SECONDS"] + visit["SECOND_SECONDS"] - 2 * RESERVE_SECONDS
    wanted = [point for block in list_standard_blocks("nvidia-h200") for point in block]
    assert estimate_gpu_seconds(wanted) < calls


def test_the_standard_session_is_about_as_long_as_its_points_say() -> None:
    wanted = [point for block in list_standard_blocks("nvidia-h200") for point in block]
    assert 200 < estimate_gpu_seconds(wanted) < 3600
    assert 1e5 < estimate_gpu_table_bytes(wanted) < 1e7
