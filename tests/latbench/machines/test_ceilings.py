"""The roofline and the pace of a machine that the tests make up, and the ceilings of this one, once."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from latbench.machines import ceilings
from latbench.machines.ceilings import CachedCeilings, Ceilings
from latbench.workloads.minimum_work import compute_inside_share, count_inputs_read
from sparse_kernels.shapes import Conv2dShape, LinearShape

MADE_UP = Ceilings(100.0, {10: 50.0, 1000: 20.0, 100_000: 2.0}, product_seconds=1.0, sum_seconds=3.0)


def slower(product_seconds: float, sum_seconds: float, flop: float, size: float) -> float:
    """By what factor the made up machine is slower than usual when its reference kernels take so long."""
    usual = MADE_UP.reference_seconds(MADE_UP.product_seconds, MADE_UP.sum_seconds, flop, size)
    return MADE_UP.reference_seconds(product_seconds, sum_seconds, flop, size) / usual


def test_the_roofline_is_the_slower_of_computing_and_reading() -> None:
    assert MADE_UP.roofline_seconds(flop=1000, size=20) == 10.0
    assert MADE_UP.roofline_seconds(flop=10, size=20) == 20 / 50
    assert MADE_UP.roofline_seconds(flop=10, size=10_000) == 500.0
    assert (
        MADE_UP.roofline_seconds(flop=1000, size=20, dtype="bfloat16") == 10.0
    )  # of a machine without a unit for it
    twice = replace(MADE_UP, bfloat16_flop_per_second=200.0, int8_op_per_second=400.0)
    assert twice.roofline_seconds(flop=1000, size=20, dtype="bfloat16") == 5.0 == twice.compute_seconds(500)
    assert twice.roofline_seconds(flop=1000, size=20, dtype="int8") == 2.5


@pytest.mark.parametrize(("size", "rate"), [(1, 50), (10, 50), (999, 50), (1000, 20), (10**6, 2)])
def test_what_lies_between_two_sizes_is_read_as_fast_as_the_smaller(size: int, rate: float) -> None:
    assert MADE_UP.memory_seconds(size) == size / rate


def test_each_reference_counts_as_much_as_it_shows() -> None:
    bound_by_units, bound_by_memory = {"flop": 1e9, "size": 1}, {"flop": 1, "size": 1e9}
    assert slower(2.0, 3.0, **bound_by_units) == pytest.approx(2, rel=1e-3)
    assert slower(2.0, 3.0, **bound_by_memory) == pytest.approx(1, rel=1e-3)
    assert slower(1.0, 4.5, **bound_by_memory) == pytest.approx(1.5, rel=1e-3)
    assert slower(1.0, 3.0, flop=1, size=1) == 1


def test_ceilings_are_measured_once_a_device_and_thread_count(own_lock: Path) -> None:
    asked: list[int] = []

    def measure() -> Ceilings:
        asked.append(1)
        return MADE_UP

    for threads in (1, 1, 2, 2):
        assert CachedCeilings("amd-epyc", threads, "work", measure).get() == MADE_UP
    assert len(asked) == 2


def test_ceilings_that_other_work_found_do_not_count(own_lock: Path) -> None:
    other = Ceilings(1.0, {1: 1.0}, 1.0, 1.0)
    CachedCeilings("amd-epyc", 1, "product 384", lambda: other).get()
    assert CachedCeilings("amd-epyc", 1, "product 640", lambda: MADE_UP).get() == MADE_UP


def test_another_machine_of_the_same_name_measures_its_own(own_lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CachedCeilings("amd-epyc", 1, "work", lambda: MADE_UP).get()
    other = Ceilings(1.0, {1: 1.0}, 1.0, 1.0)
    monkeypatch.setattr(ceilings, "hash_machine", lambda: "another")
    assert CachedCeilings("amd-epyc", 1, "work", lambda: other).get() == other


def test_doubted_ceilings_only_rise_and_are_kept(own_lock: Path) -> None:
    """What was found while others took the machine must not call every later time impossible."""
    found = iter([Ceilings(10.0, {10: 5.0, 1000: 20.0}, 4.0, 3.0), Ceilings(100.0, {10: 50.0, 1000: 2.0}, 1.0, 6.0)])
    kept = CachedCeilings("amd-epyc", 1, "work", lambda: next(found))
    higher = Ceilings(100.0, {10: 50.0, 1000: 20.0}, 1.0, 3.0)
    assert kept.again(kept.get()) == higher
    assert kept.get() == higher


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"identity": null}', '{"identity": {}, "flop_per_second": 1}'])
def test_a_damaged_file_is_measured_again(own_lock: Path, damaged: str) -> None:
    kept = CachedCeilings("amd-epyc", 1, "work", lambda: MADE_UP)
    kept.get()
    (path,) = own_lock.rglob("amd-epyc-1.json")
    path.write_text(damaged)
    assert kept.get() == MADE_UP
    assert CachedCeilings("amd-epyc", 1, "work", lambda: pytest.fail("measured again")).get() == MADE_UP


@pytest.mark.parametrize(
    "wrong",
    [{"read_bytes_per_second": {}}, {"flop_per_second": 0.0}, {"flop_per_second": "x"}, {"sum_seconds": -1.0}],
)
def test_ceilings_that_are_none_are_measured_again(own_lock: Path, wrong: dict[str, object]) -> None:
    kept = CachedCeilings("amd-epyc", 1, "work", lambda: MADE_UP)
    kept.get()
    (path,) = own_lock.rglob("amd-epyc-1.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    assert kept.known() is None
    assert kept.get() == MADE_UP == kept.known()


def test_ceilings_that_cannot_be_kept_still_hold(own_lock: Path) -> None:
    own_lock.mkdir()
    (own_lock / "latbench").write_text("no folder")
    assert CachedCeilings("amd-epyc", 1, "work", lambda: MADE_UP).get() == MADE_UP


SHAPES = [
    Conv2dShape(2, 3, 7, 9, 4, 3, 3, padding=(1, 1)),
    Conv2dShape(1, 2, 8, 8, 4, 1, 1, stride=(2, 2)),
    Conv2dShape(1, 2, 9, 7, 4, 3, 2, stride=(2, 3), padding=(2, 0), dilation=(2, 1)),
    Conv2dShape(1, 3, 2, 2, 4, 3, 3, padding=(1, 1)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_convolution_needs_what_its_taps_fall_on(shape: Conv2dShape, rng: np.random.Generator) -> None:
    kept = rng.random((shape.m, shape.k)) < 0.3
    kept[:, :2] = False
    pairs, read = 0, set()
    for row in range(shape.out_h):
        for column in range(shape.out_w):
            for r in range(shape.kh):
                for s in range(shape.kw):
                    y = row * shape.stride[0] - shape.padding[0] + r * shape.dilation[0]
                    x = column * shape.stride[1] - shape.padding[1] + s * shape.dilation[1]
                    if 0 <= y < shape.h and 0 <= x < shape.w:
                        pairs += 1
                        used = kept[:, (r * shape.kw + s) * shape.c_in :][:, : shape.c_in].any(axis=0)
                        read |= {(c, y, x) for c in np.flatnonzero(used)}
    taps = shape.out_h * shape.out_w * shape.kh * shape.kw
    assert compute_inside_share(shape) == pytest.approx(pairs / taps)
    assert count_inputs_read(shape, kept) == shape.batch * len(read)


def test_a_linear_layer_reads_the_inputs_that_some_row_keeps() -> None:
    kept = np.array([[True, False, False], [True, False, True]])
    assert count_inputs_read(LinearShape(2, 3, 5), kept) == 10
    assert compute_inside_share(LinearShape(2, 3, 5)) == 1


def test_the_ceilings_of_this_machine_are_in_order() -> None:
    pytest.importorskip("numba")
    from latbench.backends.cpu import ceiling_kernels, cpu_reference

    x = np.ones(10_000, np.float32)
    assert ceiling_kernels.run_reads(x, 1) >= 4 * ceiling_kernels.LEAST_READ * 0.9
    assert cpu_reference.build_product()().shape == (640, 640)
    assert cpu_reference.build_sum()() == pytest.approx(2**24)
    assert cpu_reference._most(lambda: ceiling_kernels.run_multiply_adds(1)) > 1e9


def test_bytes_are_multiplied_as_fast_as_the_units_for_them_can() -> None:
    """A dense layer in eight bits takes less time than float32 could: it is not impossible."""
    pytest.importorskip("numba")
    from latbench.backends.cpu import ceiling_kernels, cpu_reference
    from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
    from sparse_kernels.cpu.codegen.vector_emitter import QUADS_BY_UNIT

    target = find_cpu_target()
    floats, quads = (
        cpu_reference._most(lambda run=run: run(1))  # type: ignore[misc]
        for run in (ceiling_kernels.run_multiply_adds, ceiling_kernels.run_multiply_quads)
    )
    if target.quads == QUADS_BY_UNIT:
        assert quads > 1.5 * floats  # four times as many in each instruction; a busy neighbour may slow one of them
    if target.matrix:
        assert cpu_reference._most(lambda: ceiling_kernels.run_matrix_bytes(1)) > 2 * quads
