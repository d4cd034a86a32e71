"""trace, import, fit and predict as a user meets them: what they print, and how they end."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from latbench import cli, tables, workloads
from sparse_kernels.shapes import LinearShape

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def latbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the real command line in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["latbench", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            cli.main()
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
    tables.write_part(tmp_path / "table", [row | more for row, more in zip(rows, extra, strict=True)])
    return tmp_path / "table"


def test_fit_says_what_it_gets_wrong_and_the_second_time_that_nothing_changed(
    latbench: Run, swept: Path, tmp_path: Path
) -> None:
    code, out, _ = latbench("fit", swept, "-o", tmp_path / "m.json")
    assert code == 0
    for said in ("held-out sparsities", "≤10%", "share inside the 90% interval", "Noise floor"):
        assert said in out
    assert out.endswith("AnchoredLookup, 96 points of 12 shapes\n")
    before = (tmp_path / "m.json").read_bytes()
    again = latbench("fit", swept, "-o", tmp_path / "m.json")[1]
    assert again.endswith("up to date, 96 points of 12 shapes\n")
    assert again.splitlines()[:-1] == out.splitlines()[:-1]
    assert (tmp_path / "m.json").read_bytes() == before
    [figures] = json.loads(before)["validation"].values()
    assert figures["within_10"] > 0.9


def test_fit_again_where_the_settings_changed(latbench: Run, swept: Path, tmp_path: Path) -> None:
    latbench("fit", swept, "-o", tmp_path / "m.json")
    out = latbench("fit", swept, "-o", tmp_path / "m.json", "--backend", "numba")[1]
    assert out.endswith("AnchoredLookup, 84 points of 12 shapes\n")


def test_fit_boosted_is_of_one_backend_and_shows_the_lookup_beside_it(
    latbench: Run, swept: Path, tmp_path: Path
) -> None:
    refused = latbench("fit", swept, "-o", tmp_path / "m.json", "--estimator", "boosted")
    assert "say --backend numba or torch" in _refused(refused, 2)
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
    assert "m is 2.0 octaves outside" in _refused(latbench(*asked), 5)
    code, out, err = latbench(*asked, "--allow-extrapolation")
    assert code == 0 and "with 90%" in out
    assert err == "latbench: extrapolated: 2.0 octaves outside the measured range; measure it\n"
    assert "extrapolated" not in latbench(*asked[:4], *_query("300x300x100"))[2]


@pytest.mark.slow
def test_a_hybrid_looks_up_what_was_measured(latbench: Run, swept: Path, tmp_path: Path) -> None:
    learned = ("--estimator", "hybrid", "--backend", "numba")
    assert "Hybrid, 84 points" in latbench("fit", swept, "-o", tmp_path / "h.json", *learned)[1]
    latbench("fit", swept, "-o", tmp_path / "l.json", "--backend", "numba")
    hybrid, lookup = (
        latbench("predict", tmp_path / name, "--table", swept, *_query())[1] for name in ("h.json", "l.json")
    )
    assert hybrid == lookup


def test_transfer_predicts_a_device_from_few_of_its_rows(
    latbench: Run, swept: Path, tmp_path: Path, seconds: Callable[[pd.DataFrame], np.ndarray]
) -> None:
    rows = tables.read(swept)
    few = rows[(rows["backend"] == "numba") & (rows["n"] == 37)].assign(device="b-cpu")
    columns = [field.name for field in tables.KEY]
    tables.write_part(tmp_path / "new", [
        {name: value for name, value in row.items() if value == value} | {"status": "ok", "samples_seconds": [s]}
        for row, s in zip(few[columns].to_dict("records"), 2 * few["median_seconds"], strict=True)
    ])  # fmt: skip
    both, model = tmp_path / "both", tmp_path / "m.json"
    assert latbench("merge", swept, tmp_path / "new", "-o", both, "--allow-mixed")[0] == 0
    transfer = ("fit", both, "-o", model, "--estimator", "transfer", "--backend", "numba")
    assert "needs a --device" in _refused(latbench(*transfer), 2)
    assert "fewer than 5 shapes were measured on c-cpu" in _refused(latbench(*transfer, "--device", "c-cpu"), 5)
    assert "Transfer, 126 points" in latbench(*transfer, "--device", "b-cpu")[1]
    out = latbench("predict", model, "--table", both, *_query("256x320x128"))[1]
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
    assert "say which backend numba or torch" in refused(*_query(sparsity=0, pattern="dense"))
    assert "nothing measured anchors linear 256x320x37 block:8x8" in refused(*_query(pattern="block:8x8"))
    assert "stripes" in refused(*_query(pattern="stripes"), code=2)
    assert "--shape is m x k x n" in refused(*_query("256x320"), code=2)
    assert "nm:2:4 has a sparsity of 0.5 and no other" in refused(*_query(pattern="nm:2:4"), code=2)
    assert "vector:32 needs a --sparsity" in refused("--shape", "1x2x3", "--pattern", "vector:32", code=2)
    allowed = latbench(
        "predict", tmp_path / "m.json", "--table", swept, *_query(sparsity=0.99), "--allow-extrapolation"
    )
    assert allowed[0] == 0 and "µs" in allowed[1]
    dense = ("--shape", "256x320x37", "--pattern", "dense", "--backend", "torch")
    assert latbench("predict", tmp_path / "m.json", "--table", swept, *dense)[0] == 0


def test_a_model_of_another_table_is_refused(latbench: Run, swept: Path, tmp_path: Path) -> None:
    latbench("fit", swept, "-o", tmp_path / "m.json")
    content = json.loads((tmp_path / "m.json").read_text())
    (tmp_path / "m.json").write_text(json.dumps(content | {"table_hash": "0" * 16}))
    said = _refused(latbench("predict", tmp_path / "m.json", "--table", swept, *_query()), 5)
    assert "was fitted to a table with the hash 0000000000000000" in said


def test_fit_refuses_a_missing_table_and_one_without_layers(latbench: Run, tmp_path: Path) -> None:
    assert "no such table" in _refused(latbench("fit", tmp_path / "none", "-o", tmp_path / "m.json"), 5)
    row = {"op": "model", "pattern": "dense", "status": "ok", "samples_seconds": [1.0]}
    tables.write_part(tmp_path / "table", [row])
    said = _refused(latbench("fit", tmp_path / "table", "-o", tmp_path / "m.json"), 5)
    assert "holds no valid time of a layer" in said


SPDY = "base\n0.5\nprunable\n0.25\nconv1\n0.0125 0.0000\n0.01 0.4000\nfc\n0.2 0.0000\n0.1 0.4\n"


def test_import_adds_a_file_once(latbench: Run, tmp_path: Path) -> None:
    (tmp_path / "net.txt").write_text(SPDY)
    arguments = ("import", "spdy", tmp_path / "net.txt", "-o", tmp_path / "table")
    assert latbench(*arguments)[1].endswith("2 layers of unknown shape (--workload gives them)\n")
    assert "up to date" in latbench(*arguments)[1]
    table = tables.read(tmp_path / "table")
    assert len(table) == 5 and set(table["model"]) == {"net", "net:conv1", "net:fc"}
    assert "is a table of unknown" in _refused(latbench(*arguments, "--device", "b-cpu"), 2)


def test_layers_of_unknown_shape_are_looked_up_all_the_same(latbench: Run, tmp_path: Path) -> None:
    curve = "\n".join(f"{1 - 0.9 * sparsity:.6f} {sparsity:.4f}" for sparsity in (0, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9))
    (tmp_path / "net.txt").write_text(f"base\n0.5\nprunable\n0.25\nconv1\n{curve}\nfc\n{curve}\n")
    latbench("import", "spdy", tmp_path / "net.txt", "-o", tmp_path / "table")
    said = latbench("fit", tmp_path / "table", "-o", tmp_path / "m.json")[1]
    assert "AnchoredLookup, 14 points" in said


def test_import_takes_shapes_from_a_workload(latbench: Run, tmp_path: Path) -> None:
    (tmp_path / "net.txt").write_text(SPDY)
    arguments = ("import", "spdy", tmp_path / "net.txt", "-o", tmp_path / "table", "--pattern", "block:1x4")
    latbench(*arguments, "--workload", "resnet50")
    table = tables.read(tmp_path / "table").set_index(["model", "sparsity_target"])
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
    assert "--only is COLUMN=VALUE" in _refused(latbench(*arguments, "--only", "T4"), 2)
    assert "--pattern: for spdy alone" in _refused(latbench(*one, "--pattern", "dense"), 2)
    spdy = ("import", "spdy", tmp_path / "k.csv", "-o", tmp_path / "other", "--only", "a=b")
    assert "--only is for kernel timings" in _refused(latbench(*spdy), 2)


FACTORY = """
from torch import nn
not_a_model = lambda: 3
def net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8 * 16, 10))
"""


def test_trace_writes_a_workload_and_says_what_is_left_out(latbench: Run, tmp_path: Path) -> None:
    (tmp_path / "nets_to_trace.py").write_text(FACTORY)
    target = f"{tmp_path / 'nets_to_trace.py'}:net"
    arguments = ("trace", target, "--input-shape", "1x3x8x8", "--batch", 5, "-o", tmp_path / "w.yaml")
    code, out, _ = latbench(*arguments)
    assert code == 0 and "left out: 1: depthwise convolution (8 groups)" in out
    assert out.endswith("w.yaml: 2 layers\n")
    workload = workloads.load(tmp_path / "w.yaml")
    assert [layer.name for layer in workload.layers] == ["0", "3"]
    assert workload.layers[1].shape == LinearShape(10, 128, 5)
    assert latbench(*arguments)[1].endswith("w.yaml: up to date\n")
    (tmp_path / "w.yaml").write_text("something else")
    assert latbench(*arguments)[1].endswith("w.yaml: 2 layers\n")


def test_trace_refuses_in_one_line(latbench: Run, tmp_path: Path) -> None:
    (tmp_path / "nets_to_refuse.py").write_text(FACTORY)
    file = tmp_path / "nets_to_refuse.py"

    def refused(*arguments: object) -> str:
        return _refused(latbench("trace", *arguments, "-o", tmp_path / "w.yaml"), 2)

    assert "running the model raised RuntimeError" in refused(f"{file}:net", "--input-shape", "1x3")
    assert "has no attribute 'nett'" in refused(f"{file}:nett", "--input-shape", "1x3x8x8")
    assert "returned a int, not a torch.nn.Module" in refused(f"{file}:not_a_model", "--input-shape", "1x3x8x8")
    assert "numbers joined by x" in refused(f"{file}:net", "--input-shape", "1,3,8,8")
    assert "say what makes the model" in refused("net", "--input-shape", "1x3x8x8")
    assert "No module named" in refused("no_such_module:net", "--input-shape", "1x3x8x8")
    assert "no layer can be timed" in refused("torch.nn:Identity", "--input-shape", "1x3")
    assert "a task fixes its own batch" in refused("digits", "--batch", 4)
    assert not (tmp_path / "w.yaml").exists()
