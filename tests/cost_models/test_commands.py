"""trace, import, fit and predict as a user meets them: what they print, and how they end."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import cost_models
from cost_models.rows.shape_groups import count_shapes, group_by_shape
from latbench.cli import main
from latbench.runners.worker import load_function
from latbench.tables.schema import KEY_COLUMNS, SCHEMA
from latbench.tables.table import hash_table, read_table
from latbench.tables.writer import write_part
from latbench.workloads.points import Point
from latbench.workloads.workload import read_workload
from sparse_kernels.patterns import VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def latbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the real command line in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["latbench", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def _refused(ran: tuple[int, str, str], code: int) -> str:
    """The one line of a refusal with this exit code."""
    assert ran[0] == code, ran
    assert "Traceback" not in ran[2]
    [line] = [line for line in ran[2].splitlines() if line.startswith("latbench: ")]
    return line


@pytest.fixture
def swept(
    tmp_path: Path,
    table: Callable[..., pd.DataFrame],
    seconds: Callable[[pd.DataFrame], np.ndarray],
    rng: np.random.Generator,
) -> Path:
    """A table of numba's vectors and of torch's dense layers."""
    shapes = [(m, k, n) for m in (64, 256, 1000) for k in (48, 320) for n in (37, 128)]
    sparse = table(shapes=shapes, patterns=["vector:32"])
    dense = table(shapes=shapes, patterns=["dense"], sparsities=(0.0,))
    X = pd.concat([sparse, dense, dense.assign(backend="torch")], ignore_index=True)
    samples = seconds(X)[:, None] * rng.lognormal(0, 0.01, (len(X), 9))
    rows = [{name: value for name, value in row.items() if value == value} for row in X.to_dict("records")]
    extra = [{"status": "ok", "samples_seconds": list(values)} for values in samples]
    write_part(tmp_path / "table", [row | more for row, more in zip(rows, extra, strict=True)])
    return tmp_path / "table"


def test_fit_says_what_it_gets_wrong_and_the_second_time_that_nothing_changed(
    latbench: Run, swept: Path, tmp_path: Path
) -> None:
    code, out, _ = latbench("fit", swept, "-o", tmp_path / "m.json")
    assert code == 0
    for said in ("held-out sparsities", "≤10%", "share inside the 90% interval", "noise floor", "× noise"):
        assert said in " ".join(out.split())
    assert out.endswith("AnchoredLookup, 96 points of 12 shapes\n")
    before = (tmp_path / "m.json").read_bytes()
    again = latbench("fit", swept, "-o", tmp_path / "m.json")[1]
    assert again.endswith("up to date, 96 points of 12 shapes\n")
    assert again.splitlines()[:-1] == out.splitlines()[:-1]
    assert (tmp_path / "m.json").read_bytes() == before
    [figures] = json.loads(before)["validation"].values()
    assert figures["within_10"] > 0.9
    # 9 samples that scatter by 1%, whose median is 1.25 / 3 times as uncertain, and half of a normal's lies within
    # 0.67 of that; an interval of so few samples is one of 96%, and is 30% off itself.
    assert figures["noise_floor"] == pytest.approx(0.67 * 1.25 * 0.01 / 3, rel=0.5)
    assert out.splitlines()[1].split()[-1] == f"{figures['median'] / figures['noise_floor']:.1f}"


def test_fit_fits_again_what_other_libraries_fitted(latbench: Run, swept: Path, tmp_path: Path) -> None:
    latbench("fit", swept, "-o", tmp_path / "m.json")
    content = json.loads((tmp_path / "m.json").read_text())
    (tmp_path / "m.json").write_text(json.dumps(content | {"libraries": {"scikit-learn": "0.1"}}))
    assert (
        latbench("predict", tmp_path / "m.json", "--table", swept, *_query())[0] == 0
    )  # it is kept as it was fitted
    assert "AnchoredLookup, 96 points" in latbench("fit", swept, "-o", tmp_path / "m.json")[1]
    assert "up to date" in latbench("fit", swept, "-o", tmp_path / "m.json")[1]


def test_fit_fits_again_what_is_damaged(latbench: Run, swept: Path, tmp_path: Path) -> None:
    latbench("fit", swept, "-o", tmp_path / "m.json")
    content = json.loads((tmp_path / "m.json").read_text())
    (tmp_path / "m.json").write_text(json.dumps(content | {"fitted": None}))
    said = _refused(latbench("predict", tmp_path / "m.json", "--table", swept, *_query()), 5)
    assert "fit it again with latbench fit" in said
    assert "AnchoredLookup, 96 points" in latbench("fit", swept, "-o", tmp_path / "m.json")[1]
    assert latbench("predict", tmp_path / "m.json", "--table", swept, *_query())[0] == 0


@pytest.fixture
def convolved(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A table of convolutions; two have the same m, k and n, and another image."""
    shapes = [
        Conv2dShape(1, c_in, h, h, c_out, kernel, kernel, (stride, stride), (kernel // 2, kernel // 2))
        for c_in in (16, 64) for h in (14, 28) for c_out in (32, 128) for kernel in (1, 3) for stride in (1, 2)
    ]  # fmt: skip
    alike = Conv2dShape(4, 16, 14, 14, 32, 1, 1)  # as (1, 16, 28, 28, 32, 1, 1)
    assert (alike.m, alike.k, alike.n) == (shapes[8].m, shapes[8].k, shapes[8].n)
    every = [Point("a-cpu", "numba", "auto", shape, VectorWise(8), s, 1) for shape in [*shapes, alike]
             for s in (0.5, 0.7, 0.9)]  # fmt: skip
    rows = [
        point.key() | {"status": "ok", "samples_seconds": list(_conv_seconds(point) * rng.lognormal(0, 0.01, 9))}
        for point in every
    ]
    write_part(tmp_path / "table", rows)
    return tmp_path / "table"


def _conv_seconds(point: Point) -> float:
    return point.shape.flop * (1 - point.sparsity) / 10e9 + 1e-6


def test_fit_counts_shapes_as_its_hold_outs_do(latbench: Run, convolved: Path, tmp_path: Path) -> None:
    X, _ = cost_models.read_training_rows(convolved)
    assert X[["op", "m", "k", "n"]].drop_duplicates().shape[0] < count_shapes(X) == 33 == len(set(group_by_shape(X)))
    assert latbench("fit", convolved, "-o", tmp_path / "m.json")[1].endswith("99 points of 33 shapes\n")


def _conv(image: str = "1x28x28", shape: str = "96x64x3x3", **more: object) -> list[object]:
    options = [word for name, value in more.items() for word in (f"--{name.replace('_', '-')}", value)]
    return ["--kind", "conv2d", "--shape", shape, "--input", image, "--pattern", "vector:8", *options]


def test_predict_asks_for_a_convolution(latbench: Run, convolved: Path, tmp_path: Path) -> None:
    latbench("fit", convolved, "-o", tmp_path / "m.json", "--estimator", "roofline")
    asked = ["predict", tmp_path / "m.json", "--table", convolved, "--sparsity", 0.7]
    code, out, err = latbench(*asked, *_conv(stride=2))
    found = re.fullmatch(
        r"conv 96x64x3x3/2 on 1x28x28 vector:8 at 70%: ([\d.]+) µs \([\d.]+ to [\d.]+ with 90%\)\n", out
    )
    assert code == 0 and found and err == ""
    shape = Conv2dShape(1, 64, 28, 28, 96, 3, 3, (2, 2), (1, 1))
    point = Point("a-cpu", "numba", "auto", shape, VectorWise(8), 0.7, 1)
    assert float(found[1]) == pytest.approx(_conv_seconds(point) * 1e6, rel=0.1)
    # Padding, stride and dilation are those that are given.
    wide = latbench(*asked, *_conv(stride="2x1", padding=0, dilation="1x2"), "--allow-extrapolation")[1]
    assert wide.startswith("conv 96x64x3x3/2 on 1x28x28")
    for said, query in (
        ("--kind conv2d needs --input", ["--kind", "conv2d", "--shape", "8x8x3x3", "--pattern", "vector:8"]),
        ("--shape takes c_out x c_in x kh x kw", _conv(shape="64x64x9")),
        ("--input takes batch x h x w", _conv("28x28")),
        ("--stride takes one whole number, or two joined by x, not 'fast'", _conv(stride="fast")),
        ("--stride takes one whole number, or two joined by x, not '1x2x3'", _conv(stride="1x2x3")),
        ("stride must be two numbers of at least 1", _conv(stride=0)),
        ("does not fit", _conv("1x1x1", padding=0)),
        ("are for --kind conv2d", ["--shape", "8x8x8", "--pattern", "vector:8", "--stride", 2]),
    ):
        assert said in _refused(latbench(*asked, *query), 2)


_OUTSIDE = "outside the measured range"


def test_predict_refuses_or_flags_what_is_beyond_the_measured(latbench: Run, convolved: Path, tmp_path: Path) -> None:
    latbench("fit", convolved, "-o", tmp_path / "m.json", "--estimator", "roofline")
    asked = ["predict", tmp_path / "m.json", "--table", convolved, "--sparsity", 0.7]
    blocks = ["vector:32" if word == "vector:8" else word for word in _conv()]
    denser = [0.2 if word == 0.7 else word for word in asked]
    for query, refusal, flag in (
        ([*asked, *_conv(shape="32x16x5x5")], *[f"kh of a convolution is 0.7 octaves {_OUTSIDE}"] * 2),
        ([*asked, *blocks], *[f"rows of a block of vector is 2.0 octaves {_OUTSIDE}"] * 2),
        (
            [*denser, *_conv()],
            "a sparsity of 0.2 is outside the measured range",
            f"density of vector is 0.7 octaves {_OUTSIDE}",
        ),
    ):
        assert refusal in _refused(latbench(*query), 5)
        code, _, err = latbench(*query, "--allow-extrapolation")
        assert (code, err) == (0, f"latbench: extrapolated: {flag}; measure it\n")


def test_predict_flags_a_sparsity_that_a_lookup_extrapolates_to(latbench: Run, swept: Path, tmp_path: Path) -> None:
    latbench("fit", swept, "-o", tmp_path / "m.json")
    asked = ("predict", tmp_path / "m.json", "--table", swept, "--allow-extrapolation")
    assert "extrapolated" not in latbench(*asked, *_query())[2]
    _, out, err = latbench(*asked, *_query(sparsity=0.975))
    assert "extrapolated: this sparsity lies outside" in err
    # What the look-up spans there was never calibrated: no share of measurements is promised.
    assert re.fullmatch(
        r"linear 256x320x37 vector:32 at 97\.5%: [\d.]+ µs \([\d.]+ to [\d.]+ with unknown coverage\)\n", out
    )


def test_fit_again_where_the_settings_changed(latbench: Run, swept: Path, tmp_path: Path) -> None:
    latbench("fit", swept, "-o", tmp_path / "m.json")
    out = latbench("fit", swept, "-o", tmp_path / "m.json", "--backend", "numba")[1]
    assert out.endswith("AnchoredLookup, 84 points of 12 shapes\n")


@pytest.mark.slow
def test_fit_boosted_is_of_one_backend_and_shows_the_lookup_beside_it(
    latbench: Run, swept: Path, tmp_path: Path
) -> None:
    refused = latbench("fit", swept, "-o", tmp_path / "m.json", "--estimator", "boosted")
    assert "give --backend numba or torch" in _refused(refused, 2)
    assert not (tmp_path / "m.json").exists()
    arguments = ("fit", swept, "-o", tmp_path / "m.json", "--estimator", "boosted", "--backend", "numba")
    out = latbench(*arguments)[1]
    ways = [line.split("  ")[0] for line in out.splitlines()[1:7]]
    assert ways[0] == "held-out shapes" and ways[-1] == "look-up, held-out sparsities of measured shapes"
    predicted = latbench("predict", tmp_path / "m.json", "--table", swept, *_query("300x300x100"))[1]
    assert re.fullmatch(r"linear 300x300x100 vector:32 at 75%: [\d.]+ µs \([\d.]+ to [\d.]+ with 90%\)\n", predicted)


def test_fit_says_how_a_learned_model_fares_by_family_and_at_the_edges(
    latbench: Run, swept: Path, tmp_path: Path
) -> None:
    arguments = ("fit", swept, "-o", tmp_path / "m.json", "--estimator", "roofline", "--backend", "numba")
    code, out, _ = latbench(*arguments)
    assert code == 0
    validation = json.loads((tmp_path / "m.json").read_text())["validation"]
    ways = ["held-out shapes", "layer families", "smallest fifth", "largest fifth"]
    assert list(validation)[:4] == ways and list(validation)[4].startswith("look-up")
    assert validation["largest fifth"]["held_out"] == 2 * 7
    assert validation["held-out shapes"]["median"] < 0.05
    assert latbench(*arguments)[1].splitlines()[:-1] == out.splitlines()[:-1]


def test_predict_flags_an_extrapolation(latbench: Run, swept: Path, tmp_path: Path) -> None:
    latbench("fit", swept, "-o", tmp_path / "m.json", "--estimator", "roofline", "--backend", "numba")
    asked = ("predict", tmp_path / "m.json", "--table", swept, *_query("4000x320x37"))
    assert "m of a linear layer is 2.0 octaves outside" in _refused(latbench(*asked), 5)
    # The six outermost of twelve shapes tell what 80% of those beyond may be wrong by.
    code, out, err = latbench(*asked, "--allow-extrapolation", "--coverage", 0.8)
    assert code == 0 and "with unknown coverage" in out
    assert (
        err == "latbench: extrapolated: m of a linear layer is 2.0 octaves outside the measured range; measure it\n"
    )
    assert "extrapolated" not in latbench(*asked[:4], *_query("300x300x100"))[2]


def test_predict_refuses_a_layer_that_the_pattern_cannot_have(latbench: Run, swept: Path, tmp_path: Path) -> None:
    latbench("fit", swept, "-o", tmp_path / "m.json")
    asked = ("predict", tmp_path / "m.json", "--table", swept, "--pattern", "nm:2:4", "--kind", "conv2d")
    refused = latbench(*asked, "--shape", "64x3x7x7", "--input", "1x224x224")
    assert "needs input channels in multiples of 4" in _refused(refused, 2)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("pattern", "vector", "pattern vector"),
        ("pattern", "profile", "pattern profile"),
        ("m", 0, "m 0"),
        ("n", -1, "n -1"),
        ("sparsity_target", 1.5, "sparsity_target 1.5"),
    ],
)
@pytest.mark.parametrize("command", ["fit", "fit --estimator roofline --backend numba", "report"])
def test_a_table_of_layers_that_cannot_be_is_refused(
    command: str, column: str, value: object, said: str, latbench: Run, swept: Path, tmp_path: Path
) -> None:
    rows = read_table(swept).convert_dtypes()
    rows[column] = rows[column].astype(object)
    rows.loc[rows["backend"].eq("numba").idxmax(), column] = value
    pq.write_table(pa.Table.from_pandas(rows, SCHEMA, preserve_index=False), tmp_path / "edited.parquet")
    name, *options = command.split()
    refused = latbench(name, tmp_path / "edited.parquet", "-o", tmp_path / "out", *options)
    assert f"layers that cannot be, such as of {said}: `latbench validate` names them" in _refused(refused, 5)


def test_fit_says_when_nothing_could_be_held_out(latbench: Run, swept: Path, tmp_path: Path) -> None:
    one = ("--where", "m=64", "--where", "k=48", "--where", "n=37", "--backend", "numba")
    code, out, err = latbench("fit", swept, "-o", tmp_path / "m.json", "--estimator", "roofline", *one)
    assert code == 0 and "look-up" in out
    assert "no point could be held out, so the model's error is unknown" in err


@pytest.mark.slow
def test_a_hybrid_looks_up_what_was_measured(latbench: Run, swept: Path, tmp_path: Path) -> None:
    learned = ("--estimator", "hybrid", "--backend", "numba")
    assert "Hybrid, 84 points" in latbench("fit", swept, "-o", tmp_path / "h.json", *learned)[1]
    latbench("fit", swept, "-o", tmp_path / "l.json", "--backend", "numba")
    hybrid, lookup = (
        latbench("predict", tmp_path / name, "--table", swept, *_query())[1] for name in ("h.json", "l.json")
    )
    assert hybrid == lookup


@pytest.mark.slow
def test_transfer_predicts_a_device_from_few_of_its_rows(
    latbench: Run, swept: Path, tmp_path: Path, seconds: Callable[[pd.DataFrame], np.ndarray]
) -> None:
    rows = read_table(swept)
    few = rows[(rows["backend"] == "numba") & (rows["n"] == 37)].assign(device="b-cpu")
    columns = [field.name for field in KEY_COLUMNS]
    write_part(tmp_path / "new", [
        {name: value for name, value in row.items() if value == value} | {"status": "ok", "samples_seconds": [s]}
        for row, s in zip(few[columns].to_dict("records"), 2 * few["median_seconds"], strict=True)
    ])  # fmt: skip
    both, model = tmp_path / "both", tmp_path / "m.json"
    assert latbench("merge", swept, tmp_path / "new", "-o", both, "--allow-mixed")[0] == 0
    transfer = ("fit", both, "-o", model, "--estimator", "transfer", "--backend", "numba")
    assert "needs the --device" in _refused(latbench(*transfer), 2)
    assert "fewer than 5 shapes were measured on c-cpu" in _refused(latbench(*transfer, "--device", "c-cpu"), 5)
    assert "Transfer, 126 points" in latbench(*transfer, "--device", "b-cpu")[1]
    beyond = ("predict", model, "--table", both, *_query("256x320x128"))
    assert "n of a linear layer is 1.8 octaves outside the measured range of 37 to 37" in _refused(
        latbench(*beyond), 5
    )
    code, out, err = latbench(*beyond, "--allow-extrapolation")
    assert code == 0 and "extrapolated: n of a linear layer is 1.8 octaves outside" in err
    truth = 2e6 * seconds(pd.DataFrame([{"m": 256, "k": 320, "n": 128, "sparsity_target": 0.75}]))[0]
    assert float(out.split(": ")[1].split()[0]) == pytest.approx(truth, rel=0.1)


def _query(shape: str = "256x320x37", sparsity: object = 0.75, pattern: str = "vector:32") -> tuple[object, ...]:
    return ("--shape", shape, "--pattern", pattern, "--sparsity", sparsity)


def test_predict_prints_microseconds_with_their_interval(
    latbench: Run, swept: Path, tmp_path: Path, seconds: Callable[[pd.DataFrame], np.ndarray]
) -> None:
    latbench("fit", swept, "-o", tmp_path / "m.json")
    code, out, _ = latbench("predict", tmp_path / "m.json", "--table", swept, *_query())
    found = re.fullmatch(r"linear 256x320x37 vector:32 at 75%: ([\d.]+) µs \(([\d.]+) to ([\d.]+) with 90%\)\n", out)
    assert code == 0 and found
    value, low, high = map(float, found.groups())
    truth = seconds(pd.DataFrame([{"m": 256, "k": 320, "n": 37, "sparsity_target": 0.75}]))[0] * 1e6
    assert low < value < high
    assert value == pytest.approx(truth, rel=0.05)


def test_predict_refuses_what_nothing_anchors_with_exit_code_5(latbench: Run, swept: Path, tmp_path: Path) -> None:
    latbench("fit", swept, "-o", tmp_path / "m.json")

    def refused(*query: object, code: int = 5) -> str:
        return _refused(latbench("predict", tmp_path / "m.json", "--table", swept, *query), code)

    assert "m is 256, not 255" in refused(*_query("255x320x37"))
    assert "0.99 lies outside" in refused(*_query(sparsity=0.99))
    several = refused(*_query(sparsity=0, pattern="dense"), code=2)
    assert "linear 256x320x37 dense was measured in several ways: add --backend (numba or torch)" in several
    again = several.rpartition("such as ")[2].split()  # the example in the message is one that works
    query = (*_query(sparsity=0, pattern="dense"), *again)
    assert latbench("predict", tmp_path / "m.json", "--table", swept, *query)[0] == 0
    assert "not measured with --pattern block:8x8, only with " in refused(*_query(pattern="block:8x8"))
    assert "not measured with --threads 9, only with " in refused(*_query(), "--threads", 9)
    assert "not measured with --backend torch, only with numba" in refused(*_query(), "--backend", "torch")
    assert "allow extrapolation by --allow-extrapolation" in refused(*_query(sparsity=0.99))
    assert "or predict it by a model of `latbench fit --estimator hybrid`" in refused(*_query("255x320x37"))
    assert "stripes" in refused(*_query(pattern="stripes"), code=2)
    assert "--shape takes m x k x n" in refused(*_query("256x320"), code=2)
    assert "nm:2:4 has a sparsity of 0.5 and no other" in refused(*_query(pattern="nm:2:4"), code=2)
    for share in (-0.2, 1, 1.5, "nan"):
        assert "--sparsity is a share from 0 up to, but not including, 1" in refused(*_query(sparsity=share), code=2)
    missing = refused("--shape", "1x2x3", "--pattern", "vector:32", code=2)
    assert re.search(r"vector:32 needs a --sparsity: 0\.5, .* or 0\.9\d* were measured$", missing)
    allowed = latbench(
        "predict", tmp_path / "m.json", "--table", swept, *_query(sparsity=0.99), "--allow-extrapolation"
    )
    assert allowed[0] == 0 and "µs" in allowed[1]
    dense = ("--shape", "256x320x37", "--pattern", "dense", "--backend", "torch")
    assert latbench("predict", tmp_path / "m.json", "--table", swept, *dense)[0] == 0


def test_the_benchmark_judges_tables_of_ones_own(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = load_function(f"{Path(__file__).parents[1] / 'benchmarks' / 'prediction.py'}:own")
    own([str(swept)], "numba")
    first, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ points of \d+ shapes", first)
    assert [line.split(" held out")[0].strip() for line in lines[:2]] == [
        "look-up, other sparsities",
        "Roofline, shapes",
    ]


def test_rows_are_told_apart_by_any_column(latbench: Run, swept: Path, tmp_path: Path) -> None:
    rows = read_table(swept)
    columns = [field.name for field in KEY_COLUMNS]
    own = rows[rows["backend"] == "numba"]
    narrow = own[columns].assign(dtype_w="bfloat16").to_dict("records")
    write_part(swept, [
        {name: value for name, value in row.items() if value == value} | {"status": "ok", "samples_seconds": [t]}
        for row, t in zip(narrow, own["median_seconds"] / 2, strict=True)
    ])  # fmt: skip
    fit = ("fit", swept, "-o", tmp_path / "m.json", "--estimator", "roofline", "--backend", "numba")
    apart = "dtype_w bfloat16 and float32: fit them apart, with --where dtype_w=bfloat16"
    assert apart in _refused(latbench(*fit), 5)
    assert latbench(*fit, "--where", "dtype_w=bfloat16")[1].endswith("Roofline, 84 points of 12 shapes\n")
    assert json.loads((tmp_path / "m.json").read_text())["where"] == {"dtype_w": "bfloat16", "backend": "numba"}
    predict = ("predict", tmp_path / "m.json", "--table", swept, *_query())
    half = latbench(*predict)[1]
    # A look-up of everything has to be told.
    latbench("fit", swept, "-o", tmp_path / "m.json")
    assert "add --where dtype_w= (bfloat16 or float32), such as --where dtype_w=" in _refused(latbench(*predict), 2)
    looked_up = [latbench(*predict, "--where", f"dtype_w={dtype}")[1] for dtype in ("bfloat16", "float32")]
    times = [float(out.split(": ")[1].split()[0]) for out in (half, *looked_up)]
    assert times[0] == pytest.approx(times[1], rel=0.1) == pytest.approx(times[2] / 2, rel=0.1)
    assert "--where k=7: no measured row has it; known are 320, 48" in _refused(
        latbench(*predict, "--where", "k=7"), 2
    )
    assert "this column is not part of a point's key" in _refused(latbench(*predict, "--where", "colour=red"), 2)
    assert "no valid time of a layer with dtype_w int8" in _refused(latbench(*fit, "--where", "dtype_w=int8"), 5)
    assert "colour does not identify rows; filter by one of" in _refused(latbench(*fit, "--where", "colour=red"), 2)
    assert "--where takes COLUMN=VALUE, not 'numba'" in _refused(latbench(*fit, "--where", "numba"), 2)
    twice = ("--where", "k=48", "--where", "k=320")
    assert "--where k is given twice: 48 and 320" in _refused(latbench(*fit, *twice), 2)


def test_fit_says_that_versions_are_mixed_and_takes_one(latbench: Run, swept: Path, tmp_path: Path) -> None:
    rows = read_table(swept)
    columns = [field.name for field in KEY_COLUMNS]
    first, second = (rows[columns].assign(backend_version=version, threads=t) for version, t in (("1", 3), ("2", 4)))
    for own in (first, second):
        write_part(tmp_path / "both", [
            {name: value for name, value in row.items() if value == value} | {"status": "ok", "samples_seconds": [t]}
            for row, t in zip(own.to_dict("records"), rows["median_seconds"], strict=True)
        ])  # fmt: skip
    fit = ("fit", tmp_path / "both", "-o", tmp_path / "m.json")
    code, _, err = latbench(*fit)
    assert code == 0
    *mixed, old = err.splitlines()
    assert [line.partition(";")[0] for line in mixed] == [
        f"latbench: times of several versions of {backend} on a-cpu are used together (package 1 and 2)"
        for backend in ("numba", "torch")
    ]
    assert "times of latbench's kernels are of other versions than the installed ones (unknown)" in old
    code, out, err = latbench(*fit, "--where", "backend_version=2")
    assert code == 0 and len(err.splitlines()) == 1 and "(unknown)" in err and "96 points" in out


def test_fit_judges_a_model_that_was_saved_without_figures(latbench: Run, swept: Path, tmp_path: Path) -> None:
    X, seconds = cost_models.read_training_rows(swept, {})
    cost_models.save(tmp_path / "m.json", cost_models.AnchoredLookup().fit(X, seconds), hash_table(swept), X)
    assert "AnchoredLookup, 96 points" in latbench("fit", swept, "-o", tmp_path / "m.json")[1]
    assert json.loads((tmp_path / "m.json").read_text())["validation"]


def test_a_model_of_another_table_is_refused(latbench: Run, swept: Path, tmp_path: Path) -> None:
    latbench("fit", swept, "-o", tmp_path / "m.json")
    content = json.loads((tmp_path / "m.json").read_text())
    (tmp_path / "m.json").write_text(json.dumps(content | {"table_hash": "0" * 16}))
    said = _refused(latbench("predict", tmp_path / "m.json", "--table", swept, *_query()), 5)
    assert "was fitted to a table with the hash 0000000000000000" in said


def test_fit_refuses_a_missing_table_and_one_without_layers(latbench: Run, tmp_path: Path) -> None:
    assert "no such table" in _refused(latbench("fit", tmp_path / "none", "-o", tmp_path / "m.json"), 5)
    row = {"op": "model", "pattern": "dense", "status": "ok", "samples_seconds": [1.0]}
    write_part(tmp_path / "table", [row])
    said = _refused(latbench("fit", tmp_path / "table", "-o", tmp_path / "m.json"), 5)
    assert "holds no valid time of a layer" in said


SPDY = "base\n0.5\nprunable\n0.25\nconv1\n0.0125 0.0000\n0.01 0.4000\nfc\n0.2 0.0000\n0.1 0.4\n"


def test_import_adds_a_file_once(latbench: Run, tmp_path: Path) -> None:
    (tmp_path / "net.txt").write_text(SPDY)
    arguments = ("import", "spdy", tmp_path / "net.txt", "-o", tmp_path / "table")
    assert latbench(*arguments)[1].endswith("2 layers of unknown shape (--workload gives them)\n")
    assert "up to date" in latbench(*arguments)[1]
    table = read_table(tmp_path / "table")
    assert len(table) == 5 and set(table["model"]) == {"net", "net:conv1", "net:fc"}
    assert "is a table of unknown" in _refused(latbench(*arguments, "--device", "b-cpu"), 2)


def test_a_file_that_grew_is_added_to_and_one_that_changed_is_refused(latbench: Run, tmp_path: Path) -> None:
    file, folder = tmp_path / "net.txt", tmp_path / "table"
    arguments = ("import", "spdy", file, "-o", folder)
    file.write_text(SPDY)
    latbench(*arguments)
    file.write_text(SPDY.replace("0.01 0.4000", "0.01 0.4000\n0.008 0.5"))
    assert "1 rows from" in latbench(*arguments)[1]
    assert "up to date" in latbench(*arguments)[1]
    file.write_text(SPDY)  # all of it is there
    assert "up to date" in latbench(*arguments)[1]
    before = read_table(folder)
    file.write_text(SPDY.replace("0.01 0.4000", "0.011 0.4000"))
    said = _refused(latbench(*arguments), 2)
    assert "holds other times of net:conv1 unstructured on deepsparse than this file" in said
    file.write_text(SPDY.replace("conv1", "conv1").replace("0.4", "0.45"))
    said = _refused(latbench(*arguments, "--workload", "resnet50"), 2)
    assert "net:conv1 with another shape" in said
    assert len(read_table(folder)) == len(before) == 6


def test_another_version_of_the_same_kernels_is_refused(latbench: Run, tmp_path: Path) -> None:
    line = {
        "framework": "trtllm", "version": ["1.0", "1.1"], "device": "NVIDIA A100-SXM4-80GB", "op_name": "gemm",
        "kernel_source": "torch", "gemm_dtype": "bfloat16", "m": [4, 8], "n": 1024, "k": 512, "latency": 0.01,
    }  # fmt: skip
    pd.DataFrame(line).to_parquet(tmp_path / "gemm.parquet")
    arguments = ("import", "aiconfigurator", tmp_path / "gemm.parquet", "-o", tmp_path / "table", "--only")
    assert latbench(*arguments, "version=1.0")[0] == 0
    said = _refused(latbench(*arguments, "version=1.1"), 2)
    assert "holds times of trtllm 1.0, not 1.1: give another folder" in said


def test_layers_of_unknown_shape_are_looked_up_all_the_same(latbench: Run, tmp_path: Path) -> None:
    curve = "\n".join(f"{1 - 0.9 * sparsity:.6f} {sparsity:.4f}" for sparsity in (0, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9))
    (tmp_path / "net.txt").write_text(f"base\n0.5\nprunable\n0.25\nconv1\n{curve}\nfc\n{curve}\n")
    latbench("import", "spdy", tmp_path / "net.txt", "-o", tmp_path / "table")
    said = latbench("fit", tmp_path / "table", "-o", tmp_path / "m.json")[1]
    assert "AnchoredLookup, 14 points" in said
    assert latbench("validate", tmp_path / "table")[0] == 0
    refused = latbench("report", tmp_path / "table", "-o", tmp_path / "report.html")
    assert "the table lacks the sizes of its layers" in _refused(refused, 5)


def test_import_takes_shapes_from_a_workload(latbench: Run, tmp_path: Path) -> None:
    (tmp_path / "net.txt").write_text(SPDY)
    arguments = ("import", "spdy", tmp_path / "net.txt", "-o", tmp_path / "table", "--pattern", "block:1x4")
    latbench(*arguments, "--workload", "resnet50")
    table = read_table(tmp_path / "table").set_index(["model", "sparsity_target"])
    assert table.loc[("net:conv1", 0.4), ["op", "kh", "pattern"]].tolist() == ["conv2d", 7, "block:1x4"]
    assert table.loc[("net:fc", 0.0), ["op", "m", "pattern"]].tolist() == ["linear", 1000, "dense"]
    other = (*arguments[:4], tmp_path / "other", "--workload", "bert-base")
    assert "no layer of" in _refused(latbench(*other), 5)


def test_import_refuses_in_one_line(latbench: Run, tmp_path: Path) -> None:
    (tmp_path / "net.txt").write_text(SPDY.replace("0.2", "nan"))
    folder = ("-o", tmp_path / "table")
    assert "line 4" in _refused(latbench("import", "spdy", tmp_path / "net.txt", *folder), 5)
    assert "known are spdy" in _refused(latbench("import", "csv", tmp_path / "net.txt", *folder), 2)
    said = _refused(latbench("import", "spdy", tmp_path / "net.txt", *folder, "--pattern", "stripes"), 2)
    assert "stripes" in said
    (tmp_path / "net.txt").write_text(SPDY)
    for pattern, said in (("dense", "--pattern names the pattern"), ("nm:2:4", "nm:2:4 has a sparsity of 0.5")):
        arguments = ("import", "spdy", tmp_path / "net.txt", *folder, "--pattern", pattern)
        assert said in _refused(latbench(*arguments), 2)
    assert "--dtype are for kernel timings" in _refused(latbench(*arguments[:3], *folder, "--dtype", "float16"), 2)
    assert not (tmp_path / "table").exists()


NEUSIGHT = """OPName,Latency,Device,B,M,N,K,kernel
linear,0.5,Tesla T4,1,64,128,256,sgemm_128x64
linear,0.7,Tesla T4,1,64,256,256,sgemm_128x64
linear,0.2,Tesla P4,1,64,128,256,sgemm_64x64
"""


def test_import_takes_one_device_of_a_table_of_kernels(latbench: Run, tmp_path: Path) -> None:
    (tmp_path / "k.csv").write_text(NEUSIGHT)
    arguments = ("import", "neusight", tmp_path / "k.csv", "-o", tmp_path / "table")
    assert "device nvidia-tesla-p4, nvidia-tesla-t4; say which" in _refused(latbench(*arguments), 2)
    one = (*arguments, "--only", "Device=Tesla T4")
    assert latbench(*one)[1].endswith(f"table: 2 rows from {tmp_path / 'k.csv'}\n")
    assert "up to date" in latbench(*one)[1]
    other = (*arguments, "--only", "Device=Tesla P4")
    assert "is a table of nvidia-tesla-t4, not nvidia-tesla-p4" in _refused(latbench(*other), 2)
    assert "--only takes COLUMN=VALUE" in _refused(latbench(*arguments, "--only", "T4"), 2)
    assert "--dtype: only for deepbench" in _refused(latbench(*one, "--dtype", "float16"), 2)
    (tmp_path / "k.csv").write_text(NEUSIGHT + "bmm,0.1,Tesla T4,8,64,128,256,sgemm\n")
    assert latbench(*one[:4], tmp_path / "more", *one[5:])[2] == (
        f"latbench: {tmp_path / 'k.csv'}: 1 lines left out, their OPName bmm is no linear layer or convolution\n"
    )
    assert "--pattern: only for spdy" in _refused(latbench(*one, "--pattern", "dense"), 2)
    spdy = ("import", "spdy", tmp_path / "k.csv", "-o", tmp_path / "other", "--only", "a=b")
    assert "--only and --dtype are for kernel timings" in _refused(latbench(*spdy), 2)


FACTORY = """
from torch import nn
not_a_model = lambda: 3
def net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8 * 16, 10))
class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 10), nn.Linear(8, 10)
    def forward(self, left, right):
        return self.first(left) - self.second(right)
"""


def test_trace_writes_a_workload_and_says_what_is_left_out(latbench: Run, tmp_path: Path) -> None:
    (tmp_path / "nets_to_trace.py").write_text(FACTORY)
    target = f"{tmp_path / 'nets_to_trace.py'}:net"
    arguments = ("trace", target, "--input-shape", "1x3x8x8", "--batch", 5, "-o", tmp_path / "w.yaml")
    code, out, _ = latbench(*arguments)
    assert code == 0 and "1 left out a depthwise convolution (8 groups)" in " ".join(out.split())
    assert out.endswith("w.yaml: 2 layers\n")
    workload = read_workload(tmp_path / "w.yaml")
    assert [layer.name for layer in workload.layers] == ["0", "3"]
    assert workload.layers[1].shape == LinearShape(10, 128, 5)
    assert latbench(*arguments)[1].endswith("w.yaml: up to date\n")
    (tmp_path / "w.yaml").write_text("something else")
    assert latbench(*arguments)[1].endswith("w.yaml: 2 layers\n")


@pytest.mark.parametrize("inputs", [("4x8,4x8",), ("4x8", "--input-shape", "4x8")])
def test_trace_takes_two_inputs_of_one_size(latbench: Run, tmp_path: Path, inputs: tuple[str, ...]) -> None:
    (tmp_path / "twin_nets.py").write_text(FACTORY)
    target = f"{tmp_path / 'twin_nets.py'}:Twins"
    code, _, error = latbench("trace", target, "--input-shape", *inputs, "-o", tmp_path / "w.yaml")
    assert code == 0, error
    assert [layer.shape for layer in read_workload(tmp_path / "w.yaml").layers] == [LinearShape(10, 8, 4)] * 2


def test_trace_refuses_in_one_line(latbench: Run, tmp_path: Path) -> None:
    (tmp_path / "nets_to_refuse.py").write_text(FACTORY)
    file = tmp_path / "nets_to_refuse.py"

    def refused(*arguments: object) -> str:
        return _refused(latbench("trace", *arguments, "-o", tmp_path / "w.yaml"), 2)

    assert "running the model raised RuntimeError" in refused(f"{file}:net", "--input-shape", "1x3")
    assert "has no attribute 'nett'" in refused(f"{file}:nett", "--input-shape", "1x3x8x8")
    assert "returned a int, not a torch.nn.Module" in refused(f"{file}:not_a_model", "--input-shape", "1x3x8x8")
    assert "takes sizes joined by x such as 1x3x224x224, or" in refused(f"{file}:net", "--input-shape", "1x3:a:b:c")
    assert "one input of these sizes is 1x3x8x8" in refused(f"{file}:net", "--input-shape", "1,3,8,8")
    assert "TARGET is the function that makes the model" in refused("net", "--input-shape", "1x3x8x8")
    assert "No module named" in refused("no_such_module:net", "--input-shape", "1x3x8x8")
    assert "no layer can be timed" in refused("torch.nn:Identity", "--input-shape", "1x3")
    assert "because a task fixes its own batch" in refused("digits", "--batch", 4)
    assert not (tmp_path / "w.yaml").exists()
