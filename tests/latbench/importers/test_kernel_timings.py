"""Kernel timings of other projects: our axes and seconds, one device at a time, refused with a line number."""

import gzip
from pathlib import Path

import pandas as pd
import pytest

from latbench.errors import BadData, UsageError
from latbench.importers.kernel_timings import read_kernel_timings
from latbench.tables.table import read_table
from latbench.tables.writer import write_part

LINEAR = (
    "OPName,Latency,Device,B,M,N,K,kernel\n"
    "linear,0.05,Tesla T4,2,58,13,141,sgemm\n"
    "linear,0.07,Tesla T4,2,58,13,141,sgemm\n"
)
CONV = (
    "OPName,Latency,Device,B,Input_Channel,Output_Channel,Kernel_Szie,Input_Size,Stride,Padding,kernel\n"
    "conv,2,NVIDIA A100 80GB PCIe,8,3,64,7,224,2,3,sgemm\n"
)
DEEPBENCH = (
    "file,sheet,kind,M,N,K,a_t,b_t,sparsity,time_ms,sparse_ms,dense_ms\n"
    "train/DeepBench_NV_V100,Results FP32,gemm,1760,16,2560,N,T,,0.038,,\n"
    "train/DeepBench_NV_V100,Results FP32,sparse_gemm,1760,16,2560,N,N,0.95,,0.02,0.04\n"
    "train/DeepBench_NV_V100,Results - Mixed Precision,gemm,35,16,2560,N,N,,0.1,,\n"
)


def _read(format: str, text: str, folder: Path, **only: str) -> list[dict[str, object]]:
    (folder / "k.csv").write_text(text)
    return read_kernel_timings(format, folder / "k.csv", only=only)[0]


def test_a_linear_layers_tokens_are_batch_times_m_and_equal_lines_are_one_point(tmp_path: Path) -> None:
    [row] = _read("neusight", LINEAR, tmp_path)
    assert (row["m"], row["k"], row["n"]) == (13, 141, 116)
    assert row["samples_seconds"] == pytest.approx([5e-5, 7e-5])
    assert (row["device"], row["dtype_w"], row["pattern"], row["kernel_used"]) == (
        "nvidia-tesla-t4", "float32", "dense", "sgemm",
    )  # fmt: skip


def test_a_convolution_is_its_implicit_product(tmp_path: Path) -> None:
    [row] = _read("neusight", CONV, tmp_path)
    assert (row["op"], row["m"], row["k"], row["n"]) == ("conv2d", 64, 7 * 7 * 3, 8 * 112 * 112)
    assert [row[name] for name in ("c_in", "c_out", "h", "kh", "stride_h", "padding_w", "dilation_h")] == [
        3, 64, 224, 7, 2, 3, 1,
    ]  # fmt: skip
    assert row["samples_seconds"] == [2e-3]


@pytest.mark.parametrize("name", ["DeepBench_NV_V100.xlsx", "OLD.XLS"])
def test_a_spreadsheet_is_told_which_file_is_read_instead(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(BadData, match="no such file"):
        read_kernel_timings("deepbench", path, only={})
    path.write_bytes(b"PK\x03\x04 not read")
    with pytest.raises(BadData) as refused:
        read_kernel_timings("deepbench", path, only={})
    assert f"{path} is a spreadsheet, and deepbench timings are read from CSV" in str(refused.value)
    assert f"with the columns {DEEPBENCH.splitlines()[0].replace(',', ', ')}" in str(refused.value)
    with pytest.raises(BadData, match="aiconfigurator timings are read from Parquet"):
        read_kernel_timings("aiconfigurator", path, only={})


def test_deepbench_gives_dense_and_sparse_times_and_leaves_out_what_has_no_one_precision(tmp_path: Path) -> None:
    rows = _read("deepbench", DEEPBENCH, tmp_path)
    assert [(row["kernel_requested"], row["pattern"], row["sparsity_target"]) for row in rows] == [
        ("gemm_nt", "dense", 0.0), ("gemm_nn", "dense", 0.0), ("sparse_gemm", "unstructured", 0.95),
    ]  # fmt: skip
    assert [row["samples_seconds"] for row in rows] == [pytest.approx([s]) for s in (3.8e-5, 4e-5, 2e-5)]
    assert {(row["m"], row["k"], row["n"], row["device"]) for row in rows} == {(1760, 2560, 16, "nv-v100")}


def test_a_batched_product_is_no_linear_layer(tmp_path: Path) -> None:
    """It has another weight for each image; the same sizes would make it the same point."""
    lines = LINEAR.replace("linear,0.07", "bmm,0.07")
    (tmp_path / "k.csv").write_text(lines)
    [row], left_out = read_kernel_timings("neusight", tmp_path / "k.csv", only={})
    assert row["samples_seconds"] == pytest.approx([5e-5])
    assert left_out == {"their OPName bmm is no linear layer or convolution": 1}
    (tmp_path / "k.csv").write_text(lines.replace("linear", "bmm"))
    with pytest.raises(UsageError, match="is left: 2 lines left out, their OPName bmm is no linear layer"):
        read_kernel_timings("neusight", tmp_path / "k.csv", only={})


def test_sheets_of_several_precisions_are_left_out_unless_one_is_given(tmp_path: Path) -> None:
    (tmp_path / "k.csv").write_text(DEEPBENCH)
    rows, left_out = read_kernel_timings("deepbench", tmp_path / "k.csv", only={})
    [reason] = left_out
    assert len(rows) == 3 and "'Results - Mixed Precision' does not name one precision (--dtype says it)" in reason
    rows, left_out = read_kernel_timings("deepbench", tmp_path / "k.csv", only={}, dtype="float16")
    assert not left_out
    assert [row["dtype_w"] for row in rows] == ["float32"] * 3 + ["float16"]
    with pytest.raises(UsageError, match="unknown dtype half: known are float32, float16"):
        read_kernel_timings("deepbench", tmp_path / "k.csv", only={}, dtype="half")


def test_published_sparse_times_are_read(data: Path) -> None:
    file = data / "deepbench" / "gemm_and_sparse_gemm.csv"
    only = {"file": "inference/server/DeepBench_NV_TitanXp", "kind": "sparse_gemm"}
    with pytest.raises(UsageError, match="24 lines left out, their sheet 'Results - Mixed Precision'"):
        read_kernel_timings("deepbench", file, only=only)
    rows, left_out = read_kernel_timings("deepbench", file, only=only, dtype="float32")
    assert not left_out and sum(len(row["samples_seconds"]) for row in rows) == 48
    assert {row["pattern"] for row in rows} == {"dense", "unstructured"}
    t4 = only | {"file": "inference/DeepBench_NV_T4"}
    with pytest.raises(UsageError, match="24 lines left out, they have no time"):
        read_kernel_timings("deepbench", file, only=t4, dtype="float32")


def test_the_earlier_text_files_of_aiconfigurator_are_read(tmp_path: Path) -> None:
    (tmp_path / "gemm_perf.txt").write_text(
        "framework,version,device,op_name,kernel_source,gemm_dtype,m,n,k,latency\n"
        "TRTLLM,1.0.0rc3,NVIDIA H200,gemm,torch_flow,fp8_block,4,1024,512,0.0125\n"
    )
    [row], left_out = read_kernel_timings("aiconfigurator", tmp_path / "gemm_perf.txt", only={})
    assert (row["m"], row["k"], row["n"], row["dtype_w"]) == (1024, 512, 4, "fp8_block") and not left_out
    assert row["samples_seconds"] == [pytest.approx(1.25e-5)] and row["device"] == "nvidia-h200"


def _aiconfigurator(path: Path, **columns: object) -> Path:
    line = {
        "framework": "trtllm", "version": "1.0", "device": "NVIDIA A100-SXM4-80GB", "op_name": "gemm",
        "kernel_source": "torch", "gemm_dtype": "bfloat16", "m": 4, "n": 1024, "k": 512, "latency": 0.01,
    }  # fmt: skip
    pd.DataFrame(line | columns, index=range(2)).to_parquet(path)
    return path


def test_aiconfigurators_m_is_tokens(tmp_path: Path) -> None:
    path = _aiconfigurator(tmp_path / "gemm.parquet", m=[4, 8])
    rows, _ = read_kernel_timings("aiconfigurator", path, only={})
    assert [(row["m"], row["k"], row["n"]) for row in rows] == [(1024, 512, 4), (1024, 512, 8)]
    assert {(row["backend"], row["backend_version"], row["device"]) for row in rows} == {
        ("trtllm", "1.0", "nvidia-a100-sxm4-80gb")
    }


def test_a_line_without_a_name_is_refused_whatever_the_index(tmp_path: Path) -> None:
    path = _aiconfigurator(tmp_path / "gemm.parquet", gemm_dtype=["bfloat16", None])
    with pytest.raises(BadData, match="line 3: it has no gemm_dtype"):
        read_kernel_timings("aiconfigurator", path, only={})
    pd.read_parquet(path).set_index("op_name", drop=False).to_parquet(path)
    with pytest.raises(BadData, match="line 3: it has no gemm_dtype"):
        read_kernel_timings("aiconfigurator", path, only={})


def test_versions_and_devices_do_not_mix(tmp_path: Path) -> None:
    path = _aiconfigurator(tmp_path / "gemm.parquet", version=["1.0", "1.1"])
    with pytest.raises(UsageError, match=r"holds several: backend_version 1.0, 1.1; say which with --only"):
        read_kernel_timings("aiconfigurator", path, only={})
    [row], _ = read_kernel_timings("aiconfigurator", path, only={"version": "1.1"}, device="my-gpu")
    assert (row["backend_version"], row["device"]) == ("1.1", "my-gpu")
    both = LINEAR + "linear,0.05,Tesla P4,2,58,13,141,sgemm\n"
    with pytest.raises(UsageError, match="device nvidia-tesla-p4, nvidia-tesla-t4"):
        _read("neusight", both, tmp_path)
    assert len(_read("neusight", both, tmp_path, Device="Tesla P4")) == 1


def test_a_line_that_names_no_kernel_is_of_an_unknown_one(tmp_path: Path) -> None:
    [row] = _read("neusight", LINEAR.replace("sgemm", ""), tmp_path)
    assert row["kernel_used"] is None
    write_part(tmp_path / "table", [row])


def test_a_sparsity_beyond_one_and_a_broken_archive_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="line 3: sparsity must lie between 0 and 1, not 95"):
        _read("deepbench", DEEPBENCH.replace("0.95", "95"), tmp_path)
    packed = bytearray(gzip.compress(LINEAR.encode() * 50))
    packed[20:60] = bytes(40)
    (tmp_path / "k.csv.gz").write_bytes(packed)
    with pytest.raises(BadData, match="not a csv file"):
        read_kernel_timings("neusight", tmp_path / "k.csv.gz", only={})
    for ending in ("zip", "xz", "tar", "zst", "bz2"):
        (tmp_path / f"k.csv.{ending}").write_bytes(packed)
        with pytest.raises(BadData, match="not a csv file"):
            read_kernel_timings("neusight", tmp_path / f"k.csv.{ending}", only={})


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0.07", "-1", "line 3: a time must be positive and finite, not -1"),
        ("0.07", "fast", "line 3: time must be a number, not 'fast'"),
        ("0.07", "", "line 3: a time must be positive and finite, not nan"),
        ("58,13", "58,1.5", "line 2: N must be a whole number of at least 1, not 1.5"),
        ("58,13", "0,13", "line 2: M must be a whole number of at least 1, not 0"),
        ("Latency", "Seconds", "not neusight timings, it has no column Latency"),
        (",M,", ",Tokens,", "not neusight timings, it has no column M"),
        ("58,13", "1e30,13", "line 2: M must be a whole number of at least 1, not 1e+30"),
        ("sgemm", "sgemm,more", "not a csv file"),
        ("0.07,Tesla T4", "0.07,", "line 3: it has no Device"),
        ("linear,0.07", ",0.07", "line 3: it has no OPName"),
        (LINEAR, "", "not a csv file"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(old: str, new: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadData) as refusal:
        _read("neusight", LINEAR.replace(old, new), tmp_path)
    assert said in str(refusal.value)


@pytest.mark.parametrize(("name", "said"), [("Latency", "it has no time"), ("B", "it has no B")])
def test_a_column_without_any_value_is_refused_with_its_line(name: str, said: str, tmp_path: Path) -> None:
    header, first, *_ = LINEAR.splitlines()
    values = [
        "" if column == name else value for column, value in zip(header.split(","), first.split(","), strict=True)
    ]
    with pytest.raises(BadData, match=f"line 2: {said}"):
        _read("neusight", f"{header}\n{','.join(values)}\n", tmp_path)
    with pytest.raises(BadData, match="no line of timings, only their columns"):
        _read("neusight", f"{header}\n", tmp_path)


def test_a_column_of_lists_is_refused_with_its_line(tmp_path: Path) -> None:
    rows = {"framework": "x", "version": "1", "device": "T4", "op_name": "gemm", "kernel_source": "y"}
    rows |= {"gemm_dtype": "float16", "m": 8, "n": 8, "k": 8}
    pd.DataFrame([rows | {"latency": [1.0, 2.0]}]).to_parquet(tmp_path / "lists.parquet")
    with pytest.raises(BadData, match="line 2: time must be a number, not array"):
        read_kernel_timings("aiconfigurator", tmp_path / "lists.parquet", only={})


def test_a_missing_file_a_foreign_one_and_an_unknown_column_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="no such file"):
        read_kernel_timings("neusight", tmp_path / "none.csv", only={})
    with pytest.raises(BadData, match="no such file"):
        read_kernel_timings("aiconfigurator", tmp_path / "none.parquet", only={})
    (tmp_path / "text.parquet").write_text(LINEAR)
    with pytest.raises(BadData, match="not a Parquet file"):
        read_kernel_timings("aiconfigurator", tmp_path / "text.parquet", only={})
    with pytest.raises(UsageError, match="has no column device, only OPName"):
        _read("neusight", LINEAR, tmp_path, device="Tesla T4")
    with pytest.raises(UsageError, match=r"no line of .* has V100 as its Device, but Tesla T4"):
        _read("neusight", LINEAR, tmp_path, Device="V100")


def test_the_published_files_become_tables(data: Path, tmp_path: Path) -> None:
    deepbench = data / "deepbench" / "gemm_and_sparse_gemm.csv"
    chosen = {"file": "train/DeepBench_NV_V100", "sheet": "Results FP32"}
    rows, left_out = read_kernel_timings("deepbench", deepbench, only=chosen)
    assert not left_out
    write_part(tmp_path / "deepbench", rows)
    table = read_table(tmp_path / "deepbench")
    assert len(table) > 140 and table["point_id"].is_unique and set(table["dtype_w"]) == {"float32"}


@pytest.mark.slow
def test_every_published_kernel_of_a_gpu_is_read(data: Path) -> None:
    folder = data / "neusight_kernels"
    linear, _ = read_kernel_timings("neusight", folder / "linear_train.csv.gz", only={"Device": "Tesla T4"})
    assert sum(len(row["samples_seconds"]) for row in linear) == 6458
    conv = pd.read_csv(folder / "conv_train.csv.gz")
    rows, _ = read_kernel_timings("neusight", folder / "conv_train.csv.gz", only={"Device": "Tesla T4"})
    assert sum(len(row["samples_seconds"]) for row in rows) == (conv["Device"] == "Tesla T4").sum()
