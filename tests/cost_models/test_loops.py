"""The work of our CPU kernels, counted from a row's columns: as the kernels themselves would lay it out."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from cost_models import Boosted, Roofline
from cost_models.features import cpu_kernel_work
from cost_models.features.work_terms import count_work, fit_rates
from sparse_kernels import pack, patterns
from sparse_kernels.cpu.codegen.cpu_target import CpuTarget
from sparse_kernels.cpu.kernels import image_layout, unstructured_rows
from sparse_kernels.cpu.layouts.padded_images import ImagePlaces
from sparse_kernels.cpu.plans import conv2d, linear
from sparse_kernels.shapes import Conv2dShape

AVX512 = CpuTarget("avx512", 16, 32, fused=True, halves=True)

CONVOLUTIONS = [
    Conv2dShape(batch, c_in, size, size, 32, taps, taps, (stride, stride), (taps // 2, taps // 2))
    for batch, c_in, size, taps, stride in [
        (1, 8, 56, 1, 1), (1, 8, 56, 3, 1), (2, 8, 56, 3, 2), (1, 3, 224, 7, 2), (1, 16, 14, 1, 2), (3, 8, 7, 3, 1),
        (1, 8, 7, 1, 1), (1, 8, 28, 3, 2), (1, 8, 3, 1, 1),
    ]
]  # fmt: skip


def _row(shape: Conv2dShape, pattern: str = "vector:32", sparsity: float = 0.5) -> pd.DataFrame:
    sizes = {name: getattr(shape, name) for name in ("batch", "c_in", "h", "w", "c_out", "kh", "kw")}
    steps = {f"{name}_{axis}": getattr(shape, name)[i] for name in ("stride", "padding", "dilation")
             for i, axis in enumerate("hw")}  # fmt: skip
    key = {"op": "conv2d", "m": shape.c_out, "k": shape.k, "n": shape.batch * shape.out_h * shape.out_w}
    return pd.DataFrame([key | sizes | steps | {"pattern": pattern, "sparsity_target": sparsity, "threads": 1}])


@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
def test_a_convolution_has_as_many_vectors_and_elements_laid_out_as_its_kernel(shape: Conv2dShape) -> None:
    counted = cpu_kernel_work.ConvolutionLayout.from_rows(_row(shape))
    assert counted.vectors[0] == conv2d.choose_positions(shape, AVX512, halves=False).x_starts.size
    x = ImagePlaces(shape.batch, shape.c_in, shape.h, shape.w)
    in_place = conv2d.stays_in_place(
        shape, AVX512, x, ImagePlaces(shape.batch, shape.c_out, shape.out_h, shape.out_w)
    )
    assert counted.laid[0] != in_place
    if not in_place:
        where = image_layout.build_layout(shape, 0)
        # Zeros beside and below an image are shared with the next row and image: one column, one row, left out.
        assert counted.written[0] == pytest.approx(where.size, rel=2 / where.pitch)


@pytest.mark.parametrize(
    "pattern", ["dense", "vector:32", "vector:16", "vector:8", "vector:4", "block:32x32", "shflbw:32"]
)
@pytest.mark.parametrize(("n", "k"), [(1, 64), (2, 64), (3, 64), (8, 64), (9, 64), (16, 64), (128, 64), (100, 64),
                                      (32, 130), (128, 130), (9000, 130), (128, 4000)])  # fmt: skip
@pytest.mark.parametrize("threads", [1, 2])
def test_it_knows_which_linear_layers_have_outputs_along_the_vector(
    pattern: str, n: int, k: int, threads: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(linear, "find_cpu_target", lambda: AVX512)
    monkeypatch.setattr(linear, "count_threads", lambda: threads)
    kind = patterns.parse(pattern)
    weight = rng.standard_normal((64, k), np.float32)
    packed = pack(weight, kind.mask(np.abs(weight), 0.0 if pattern == "dense" else 0.5), kind)
    X = pd.DataFrame([{"op": "linear", "m": 64, "k": k, "n": n, "pattern": pattern, "sparsity_target": 0.5,
                       "layout": "token_major", "threads": threads}])  # fmt: skip
    expected = linear.choose_kernel(linear.describe_layer(packed, "token_major", n)).kernel == "tokens"
    assert cpu_kernel_work.vectorizes_outputs(X)[0] == expected


@pytest.mark.parametrize("k", [64, 500, 2048, 5000])
@pytest.mark.parametrize("sparsity", [0.5, 0.9, 0.999])
@pytest.mark.parametrize("n", [1, 5, 16, 128])
def test_single_rows_have_the_stages_of_their_kernel(
    k: int, sparsity: float, n: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(linear, "find_cpu_target", lambda: AVX512)
    kind = patterns.parse("unstructured")
    weight = rng.standard_normal((32, k), np.float32)
    packed = pack(weight, kind.mask(np.abs(weight), sparsity), kind)
    rows = linear.prepare_linear(packed, "token_major", n).panels
    assert isinstance(rows, unstructured_rows.SingleRows)
    together = (4 if n <= 4 else 8 if n <= 8 else 16) / 16 if n <= 16 else rows.stride / 16
    density = packed.nnz / (32 * k)
    assert cpu_kernel_work.count_column_stages(np.array([k]), np.array([together]), np.array([density]))[0] == len(
        rows.table
    )


def test_few_tokens_are_multiplied_by_short_vectors_and_places_of_single_rows_take_two_bytes() -> None:
    def of(n: int) -> np.ndarray:
        X = pd.DataFrame([{"op": "linear", "m": 64, "k": 100, "n": n, "pattern": "unstructured",
                           "sparsity_target": 0.5, "layout": "token_major", "threads": 1}])  # fmt: skip
        found: np.ndarray = cpu_kernel_work.count_kernel_work(X, ["unstructured"])[0]
        return found

    kept = 64 * 50
    assert [of(n)[1] / kept for n in (1, 4, 5, 8, 9, 16, 17, 40)] == [4, 4, 8, 8, 16, 16, 32, 48]
    assert of(1)[5] == kept * (4 + 2)


def test_threads_share_all_but_the_call() -> None:
    one = cpu_kernel_work.count_kernel_work(_row(CONVOLUTIONS[1]), ["vector"])
    two = cpu_kernel_work.count_kernel_work(_row(CONVOLUTIONS[1]).assign(threads=2), ["vector"])
    np.testing.assert_allclose(two[:, 1:], one[:, 1:] / 2)
    assert two[0, 0] == one[0, 0] == 1


def test_what_is_laid_out_is_told_from_what_is_multiplied(rng: np.random.Generator) -> None:
    """Convolutions of equal multiplications, some strided: laying out rows takes most of the time of these."""
    X = pd.concat(
        [
            _row(Conv2dShape(1, c_in, size, size, c_out, 1, 1, (stride, stride)), "vector:16", sparsity)
            for c_in in (16, 32, 64) for c_out in (32, 128) for size in (16, 24, 48) for stride in (1, 2)
            for sparsity in (0.5, 0.9)
        ],
        ignore_index=True,
    ).assign(backend="numba", device="a-cpu")  # fmt: skip
    copied = np.where(X["stride_h"] == 2, X["c_in"] * X["h"] / 2, 0)
    y = 1e-6 + 2e-11 * X["m"] * X["k"] * X["n"] * (1 - X["sparsity_target"]) + 2e-8 * copied
    y = y.to_numpy() * rng.lognormal(0, 0.02, len(X))
    models = {form: Roofline(form=form).fit(X, y) for form in ("plain", "kernels")}
    errors = {form: np.median(np.abs(model.held_out_errors_)) for form, model in models.items()}
    assert errors["kernels"] < 0.03 < 2 * errors["kernels"] < errors["plain"]


def test_our_kernels_have_the_form_of_their_own(
    table: Callable[..., pd.DataFrame], seconds: Callable[[pd.DataFrame], np.ndarray]
) -> None:
    X = table()
    chosen = {
        backend: Boosted(max_iter=1).learn(X.assign(backend=backend), seconds(X)).rates.form
        for backend in ("numba", "torch")
    }
    assert chosen == {"numba": "kernels", "torch": "plain"}
    assert Boosted(max_iter=1, form="cached").learn(X, seconds(X)).rates.form == "cached"


def test_no_amount_is_negative_or_missing(table: Callable[..., pd.DataFrame]) -> None:
    X = table(patterns=["dense", "vector:4", "unstructured", "nm:2:4", "block:8x8", "shflbw:64"])
    formats = ("block", "dense", "nm", "shflbw", "unstructured", "vector")
    work = count_work(X, "kernels", formats)
    assert np.isfinite(work).all() and (work >= 0).all()
    assert (fit_rates(work, np.full(len(X), 1e-5)) >= 0).all()
