"""The tuner: every choice is right, another than the default must surely be faster, and what was found is kept."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from torch import nn

from sparse_kernels import oracle
from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.cpu.codegen import cpu_target
from sparse_kernels.cpu.kernels import transpose_tiles
from sparse_kernels.cpu.plans import autotune, linear
from sparse_kernels.formats import Packed, pack, unpack
from sparse_kernels.nn import SparseLinear
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorWise
from sparse_kernels.plan_protocol import BLOCKED_LAYOUTS, LAYOUTS
from sparse_kernels.planner import prepare

ALL_LAYOUTS = (*LAYOUTS, "token_blocked")
PATTERNS: list[Pattern] = [
    Dense(), Unstructured(), NM(2, 4), BlockWise(3, 5), VectorWise(32), VectorWise(8), VectorWise(4), ShflBW(32),
    ShflBW(4),
]  # fmt: skip
TOKENS = (0, 1, 4, 12, 33, 70, 130)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and Numba's threads as they were."""
    monkeypatch.setenv("LATBENCH_CACHE", str(tmp_path))
    threads = numba.get_num_threads()
    yield tmp_path / "tuning"
    numba.set_num_threads(threads)


def packed_of(pattern: Pattern, weight: np.ndarray, sparsity: float = 0.7) -> Packed:
    kept = 0 if isinstance(pattern, Dense) else pattern.sparsity if isinstance(pattern, NM) else sparsity
    return pack(weight, pattern.mask(weight.astype(float) ** 2, kept), pattern)


def run(plan: linear.TokenPlan | linear.RowPlan, x: np.ndarray) -> np.ndarray:
    """y (m, n) of x (k, n), in the plan's layout."""
    if plan.layout == "feature_major":
        return plan(x)
    if plan.layout == "token_blocked":
        return transpose_tiles.unpack_tiles(plan(transpose_tiles.pack_tiles(x.T)), x.shape[1]).T
    return plan(np.ascontiguousarray(x.T)).T


# ------------------------------------------------------------------------------------------------ what is tried


@pytest.mark.parametrize(
    ("pattern", "layout", "n"),
    [
        (VectorWise(32), "token_major", 12), (ShflBW(4), "token_major", 4), (VectorWise(8), "feature_major", 48),
        (Unstructured(), "token_major", 70),
    ],
    ids=str,
)  # fmt: skip
def test_every_choice_is_right_for_any_number_of_tokens(
    rng: np.random.Generator, pattern: Pattern, layout: str, n: int
) -> None:
    weight, x = oracle.build_exact_operands(rng, 100, 131, max(TOKENS))
    packed = packed_of(pattern, weight)
    expected = unpack(packed).astype(float) @ x
    for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
        numba.set_num_threads(threads)
        for choice in autotune.list_candidates(linear.describe_layer(packed, layout, n)):
            plan = linear.build_plan(linear.describe_layer(packed, layout, n), choice)
            for tokens in TOKENS:
                np.testing.assert_array_equal(run(plan, x[:, :tokens].copy()), expected[:, :tokens])


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_choices_are_few_begin_with_the_default_and_have_names_of_their_own(pattern: Pattern, layout: str) -> None:
    packed = packed_of(pattern, np.ones((96, 40), np.float32))
    for n in TOKENS:
        choices = autotune.list_candidates(linear.describe_layer(packed, layout, n))
        names = [linear.build_plan(linear.describe_layer(packed, layout, n), choice).kernel for choice in choices]
        assert choices[0] == linear.choose_kernel(linear.describe_layer(packed, layout, n))
        assert names[0] == linear.prepare_linear(packed, layout, n).kernel
        assert len(set(names)) == len(names) <= 5


@pytest.mark.skipif(
    cpu_target.find_cpu_target().name != "avx512", reason="the tiles of other vector units are others"
)
def test_the_choices_are_those_that_may_help(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(shared: bool, matrix: bool = False, halves: bool = True) -> None:
        for module in (linear, autotune):
            found = replace(cpu_target.find_cpu_target(), shared=shared, matrix=matrix, halves=halves and not shared)
            monkeypatch.setattr(module, "find_cpu_target", lambda found=found: found)

    def names(pattern: Pattern, layout: str, n: int, threads: int = 1) -> list[str]:
        numba.set_num_threads(threads)
        packed = packed_of(pattern, np.ones((96, 40), np.float32))
        plans = (
            linear.build_plan(linear.describe_layer(packed, layout, n), it)
            for it in autotune.list_candidates(linear.describe_layer(packed, layout, n))
        )
        return [plan.kernel.split(".", 2)[2].removesuffix(".avx512") for plan in plans]

    on(shared=False)
    assert names(VectorWise(32), "token_major", 1) == ["tokens2x2"]
    assert names(VectorWise(32), "token_major", 4) == ["tokens8x2", "tokens4x2"]
    assert names(VectorWise(32), "token_major", 12) == ["tokens8x2", "tokens6x2", "few8x16"]
    assert names(VectorWise(32), "token_major", 48) == ["tokens8x2", "rows8x3"]
    assert names(VectorWise(16), "token_major", 16) == ["tokens8x1", "few8x16"]
    assert names(VectorWise(16), "token_major", 128) == ["rows8x2"]
    assert names(ShflBW(32), "token_major", 32) == ["rows8x2", "tokens8x2"]
    assert names(ShflBW(32), "token_major", 128) == ["rows8x2"]
    assert names(ShflBW(32), "token_major", 100) == ["tokens8x2", "rows8x2"]
    assert names(VectorWise(4), "token_major", 4) == ["few4x4"]
    assert names(VectorWise(4), "token_major", 2) == ["few4x4"]
    assert names(VectorWise(8), "token_major", 8) == ["tokens8x1of8", "few8x8"]
    assert names(VectorWise(8), "token_major", 9)[0] == "few8x16"
    assert names(VectorWise(4), "token_major", 48) == ["rows4x3"]
    assert names(VectorWise(4), "feature_major", 128) == ["rows4x4", "rows4x4.blocks"]
    assert names(Unstructured(), "token_major", 4) == ["few1x4"]
    assert names(Unstructured(), "token_major", 128) == ["rows1x4", "rows1x3"]
    assert names(Unstructured(), "feature_major", 128) == ["rows1x4", "rows1x3", "rows1x4.blocks"]
    assert all(len(names(it, layout, n)) == 1 for it in PATTERNS for layout in BLOCKED_LAYOUTS for n in TOKENS)
    if numba.config.NUMBA_NUM_THREADS > 1:
        assert names(ShflBW(32), "token_major", 32, threads=2) == ["rows8x2", "tokens8x2", "rows8x2.pass"]
        assert names(VectorWise(4), "token_major", 64, threads=2) == ["rows4x2", "rows4x2.pass"]
    on(shared=False, halves=False)
    assert names(ShflBW(32), "token_major", 128) == ["tokens8x2", "rows8x2"]
    on(shared=True)
    assert names(VectorWise(32), "token_major", 1024) == ["tokens8x2", "rows8x3"]
    assert names(ShflBW(32), "token_major", 1024) == ["rows8x3"]
    if numba.config.NUMBA_NUM_THREADS > 1:
        assert names(VectorWise(4), "token_major", 64, threads=2) == ["rows4x2", "rows4x4.pass"]
    on(shared=True, matrix=True)
    assert names(ShflBW(32), "token_major", 512) == ["amx32x32", "rows8x3"]
    assert names(ShflBW(32), "token_major", 128) == ["rows8x2", "amx32x32"]
    assert names(ShflBW(32), "token_major", 16) == ["tokens8x2", "few8x16", "amx32x32"]
    assert names(VectorWise(4), "token_major", 48) == ["rows4x3"]


# ------------------------------------------------------------------------------------------------ the rule


class Machine:
    """Calls that take known seconds of a clock that stands still otherwise."""

    def __init__(self, rng: np.random.Generator | None = None) -> None:
        self.now = 0.0
        self.counts: dict[int, int] = {}
        self._rng = rng

    def clock(self) -> float:
        return self.now

    def call(self, seconds: float | Callable[[int], float], noise: float = 0.0) -> Callable[[], None]:
        """A call of so many seconds, or seconds(calls before it); noise: standard deviation of their logarithm."""
        place = len(self.counts)
        self.counts[place] = 0

        def run() -> None:
            cost = seconds if isinstance(seconds, float) else seconds(self.counts[place])
            factor = np.exp(noise * self._rng.standard_normal()) if self._rng is not None and noise else 1.0
            self.now += cost * factor
            self.counts[place] += 1

        return run

    def fastest(self, *calls: Callable[[], None]) -> int:
        return autotune.find_fastest(calls, self.clock)


@pytest.mark.parametrize("seconds", [1e-6, 2e-5, 3e-3, 0.5])
def test_the_fastest_is_taken(seconds: float) -> None:
    machine = Machine()
    assert machine.fastest(*(machine.call(seconds / factor) for factor in (1.0, 1.1, 1.3, 0.5, 1.2))) == 2


@pytest.mark.parametrize("factors", [(1.0,), (1.0, 0.99, 0.5), (1.0, 1.0, 1.0), (1.0, 1.04)])
def test_the_default_stays_unless_another_is_faster_by_more_than_five_percent(factors: tuple[float, ...]) -> None:
    machine = Machine()
    assert machine.fastest(*(machine.call(1e-4 / factor) for factor in factors)) == 0


def test_noise_alone_never_replaces_the_default(rng: np.random.Generator) -> None:
    # Calls of half a millisecond are blocks of their own, so that nothing averages their noise.
    for _ in range(200):
        machine = Machine(rng)
        assert machine.fastest(*(machine.call(5e-4, noise=0.3) for _ in range(6))) == 0


def test_a_gain_within_the_noise_is_left_and_one_beyond_it_is_taken(rng: np.random.Generator) -> None:
    def taken(factor: float, noise: float) -> int:
        machines = [Machine(rng) for _ in range(100)]
        return sum(
            machine.fastest(machine.call(5e-4, noise), machine.call(5e-4 / factor, noise)) for machine in machines
        )

    # The lower quartile of a ratio lies 0.67 * sqrt(2) * noise below its median: 0.05 for noise of 5%.
    assert taken(1.05, 0.05) <= 10
    assert taken(1.2, 0.05) >= 90
    assert taken(1.2, 0.4) <= 10


def test_the_luckiest_of_the_first_rounds_must_prove_itself_in_new_ones() -> None:
    machine = Machine()
    default = machine.call(5e-4)
    lucky = machine.call(lambda before: 2e-4 if before < 8 else 6e-4)
    assert machine.fastest(default, lucky) == 0
    assert machine.counts[1] > 8


def test_a_machine_that_slows_down_slows_all_of_them() -> None:
    machine = Machine()

    def slowing(seconds: float) -> Callable[[int], float]:
        return lambda before: seconds * (1 + 20 * machine.now)

    assert machine.fastest(machine.call(slowing(5e-4)), machine.call(slowing(4e-4))) == 1
    machine = Machine()
    assert machine.fastest(machine.call(slowing(5e-4)), machine.call(slowing(4.95e-4))) == 0


def test_compiling_is_not_timed() -> None:
    machine = Machine()
    assert machine.fastest(machine.call(1e-4), machine.call(lambda before: 2.0 if before == 0 else 5e-5)) == 1


def test_a_layer_takes_some_fifty_milliseconds_or_a_few_long_calls() -> None:
    machine = Machine()
    machine.fastest(*(machine.call(seconds) for seconds in (2e-5, 1.5e-5, 1.9e-5)))
    assert machine.now < 0.06
    machine = Machine()
    machine.fastest(*(machine.call(seconds) for seconds in (0.1, 0.08, 0.09)))
    assert max(machine.counts.values()) < 20


# ------------------------------------------------------------------------------------------------ what is kept


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls were compared, each time something was measured; the second one always wins."""
    counts: list[int] = []

    def fastest(calls: list[object], clock: object) -> int:
        counts.append(len(calls))
        return 1

    monkeypatch.setattr(autotune, "find_fastest", fastest)
    return counts


# Rows of a group fill half a vector: of few tokens there is a choice.
LOW = VectorWise(max(4, cpu_target.find_cpu_target().lanes // 2))


def vector_layer(m: int = 32, sparsity: float = 0.5) -> Packed:
    weight = np.random.default_rng(0).standard_normal((m, 64)).astype(np.float32)
    return packed_of(LOW, weight, sparsity)


def test_what_was_found_is_not_measured_again(measured: list[int], cache: Path) -> None:
    first = autotune.choose_fastest(linear.describe_layer(vector_layer(), "token_major", 4))
    assert first == autotune.list_candidates(linear.describe_layer(vector_layer(), "token_major", 4))[1]
    assert autotune.choose_fastest(linear.describe_layer(vector_layer(), "token_major", 4)) == first
    assert len(measured) == 1
    assert len(list(cache.iterdir())) == 1


def test_everything_that_may_change_the_answer_is_measured_anew(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)

    def choose(
        packed: Packed | None = None, layout: str = "token_major", n: int = 4, precision: str = "float32"
    ) -> int:
        """How often it had to be measured, of two times."""
        before = len(measured)
        for _ in range(2):
            autotune.choose_fastest(linear.describe_layer(packed or vector_layer(), layout, n, precision))
        return len(measured) - before

    assert choose() == 1
    assert choose(n=5) == 1
    assert choose(packed_of(VectorWise(32), weight, 0.5), n=5) == 1
    assert choose(packed_of(VectorWise(32), weight, 0.5), n=5, precision="bfloat16-weights") == 1
    for layout in LAYOUTS:
        for pattern in (Unstructured(), NM(2, 4)):
            assert choose(packed_of(pattern, weight, 0.5), layout, 128) == 1
    assert choose(vector_layer(m=36)) == 1
    assert choose(vector_layer(sparsity=0.8)) == 1
    assert choose(vector_layer(sparsity=0.5)) == 0
    threads = numba.get_num_threads()
    if threads > 1:
        numba.set_num_threads(threads - 1)
        assert choose() == 1
        numba.set_num_threads(threads)
    with monkeypatch.context() as patch:
        patch.setattr(autotune, "VERSION", autotune.VERSION + 1)
        assert choose() == 1
    with monkeypatch.context() as patch:
        patch.setattr(autotune, "describe_device", lambda: "avx512 znver9 Another Processor")
        assert choose() == 1
    assert choose() == 0


def test_the_device_is_the_vector_unit_and_the_processor() -> None:
    assert autotune.describe_device().split()[0] == cpu_target.find_cpu_target().name
    assert len(autotune.describe_device().split()) > 1


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"null", b"[]", b'"rows"', b"\xff\xfe\x00", b'{"key": 1}', b'{"choice": {"kernel": "rows"}}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_ignored_and_replaced(measured: list[int], cache: Path, content: bytes) -> None:
    choice = autotune.choose_fastest(linear.describe_layer(vector_layer(), "token_major", 4))
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    path.write_bytes(content)
    assert autotune.choose_fastest(linear.describe_layer(vector_layer(), "token_major", 4)) == choice
    assert path.read_bytes() == whole
    assert len(measured) == 2


@pytest.mark.parametrize("field", ["kernel", "tile", "key"])
def test_a_file_of_another_layer_or_program_is_ignored(measured: list[int], cache: Path, field: str) -> None:
    choice = autotune.choose_fastest(linear.describe_layer(vector_layer(), "token_major", 4))
    (path,) = cache.iterdir()
    document = json.loads(path.read_text())
    if field == "key":
        document["key"]["n"] = 7
    else:
        document["choice"][field] = {"kernel": "single", "tile": [64, 64]}[field]
    path.write_text(json.dumps(document))
    assert autotune.choose_fastest(linear.describe_layer(vector_layer(), "token_major", 4)) == choice
    assert len(measured) == 2


def test_a_folder_that_cannot_be_written_is_said_and_does_no_harm(measured: list[int], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.warns(UserWarning, match="tuning results are not kept.*set LATBENCH_CACHE"):
        choice = autotune.choose_fastest(linear.describe_layer(vector_layer(), "token_major", 4), file)
    assert choice in autotune.list_candidates(linear.describe_layer(vector_layer(), "token_major", 4))


RACE = """
import sys
from pathlib import Path
from sparse_kernels.cpu.plans import autotune
from sparse_kernels.cpu.plans.linear import Choice

path, key, choices = Path(sys.argv[1]), {"device": "one"}, [Choice("rows", (4, v, 16)) for v in (1, 2, 4)]
for turn in range(300):
    autotune._write_choice(path, key, choices[turn % 3])
    if autotune._read_choice(path, key, choices) is None:
        sys.exit("half a file was read")
"""


def test_processes_that_write_at_once_read_whole_files_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "choice.json"
    command = [sys.executable, "-W", "error", "-c", RACE, str(path)]
    workers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
    assert [found.name for found in path.parent.iterdir()] == ["choice.json"]


# ------------------------------------------------------------------------------------------------ who asks for it


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_a_tuned_plan_computes_what_the_default_does(rng: np.random.Generator, layout: str) -> None:
    weight, x = oracle.build_exact_operands(rng, 70, 90, 70)
    packed = packed_of(LOW, weight)
    for n in (0, 4):
        plan = prepare(packed, "numba", layout, n, tune=True)
        again = prepare(packed, "numba", layout, n, tune=True)
        names = [
            linear.build_plan(linear.describe_layer(packed, layout, n), it).kernel
            for it in autotune.list_candidates(linear.describe_layer(packed, layout, n))
        ]
        assert plan.kernel == again.kernel and plan.kernel in names
        for tokens in (n, 1, 33):
            np.testing.assert_array_equal(
                run(plan, x[:, :tokens].copy()), unpack(packed).astype(float) @ x[:, :tokens]
            )


def test_nothing_is_measured_unless_asked_for(measured: list[int], cache: Path) -> None:
    prepare(vector_layer(), "numba", "token_major", 4)
    SparseLinear(vector_layer(), None, None, "numba")(torch.zeros(4, 64))
    assert not measured
    assert not cache.exists()


def test_only_numba_is_tuned() -> None:
    with pytest.raises(ValueError, match="tune=True is for backend numba, not reference"):
        prepare(vector_layer(), "reference", "token_major", 4, tune=True)
    with pytest.raises(ValueError, match="tune=True is for backend numba, not reference"):
        SparseLinear(vector_layer(), None, None, "reference", tune=True)


@torch.no_grad()
def test_a_tuned_layer_has_a_plan_for_about_as_many_tokens(measured: list[int]) -> None:
    packed = packed_of(Unstructured(), np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32))
    layer, default = (SparseLinear(packed, None, "relu", "numba", tune=tune) for tune in (True, False))
    for n in (130, 140, 300, 150, 260, 130):
        x = torch.randn(n, 64)
        # Sums of at most 64 products of numbers around 1, in another order: 64 roundings of a sum around 8.
        torch.testing.assert_close(layer(x), default(x), rtol=0, atol=64 * 8 * 2.0**-23)
        assert layer.kernel != default.kernel
    assert len(measured) == 2


@torch.no_grad()
def test_convert_tunes_linear_layers(rng: np.random.Generator, measured: list[int]) -> None:
    torch.manual_seed(int(rng.integers(2**31)))
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    mask = LOW.mask(rng.random((32, 64)), 0.5)
    x = torch.randn(4, 64)
    layers = {"0": LayerPattern(LOW, mask)}
    tuned, default = convert(model, layers, (x,), tune=True), convert(model, layers, (x,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(tuned(x), default(x), rtol=0, atol=64 * 8 * 2.0**-23)
    assert len(measured) == 1
    assert tuned.get_submodule("0").kernel != default.get_submodule("0").kernel
