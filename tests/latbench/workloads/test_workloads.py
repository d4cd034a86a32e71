"""Workload files: the bundled shapes against published totals, and refusals that name file, layer and key."""

import csv
from pathlib import Path

import pytest
import torch

from latbench.errors import BadData, UsageError
from latbench.workloads.workload import Layer, Workload, list_workloads, read_workload, write_workload
from sparse_kernels.shapes import Conv2dShape, LinearShape

GOOD = """\
name: two
source: a test
layers:
  - {name: a, op: linear, m: 3, k: 5, n: 7, count: 2}
  - {name: b, op: conv2d, batch: 1, c_in: 3, h: 9, w: 8, c_out: 4, kh: 3, kw: 1, stride: [2, 1], padding: [1, 0]}
"""


def multiplications(workload: Workload) -> float:
    return sum(layer.count * layer.shape.flop / 2 for layer in workload.layers)


def parameters(workload: Workload) -> int:
    return sum(layer.count * layer.shape.m * layer.shape.k for layer in workload.layers)


def test_the_bundled_workloads_are_found_and_named_after_their_files() -> None:
    assert list_workloads() == [
        "bert-base", "cpu_kernels", "gnmt", "linear-tokens", "llama-3.1-8b", "mistral-7b", "mobilenetv1",
        "qwen3-0.6b", "qwen3-8b", "resnet50", "resnet50-batch16", "transformer-base", "yolov5s",
    ]  # fmt: skip
    for name in list_workloads():
        assert read_workload(name).name == name


def test_resnet50_has_its_published_multiplications_and_parameters() -> None:
    # torchvision's: 4.09 GMACs and 25,557,032 parameters, 53,120 of them in batch norms and 1,000 a bias.
    assert multiplications(read_workload("resnet50")) == pytest.approx(4.09e9, rel=0.001)
    assert parameters(read_workload("resnet50")) == 25_557_032 - 53_120 - 1_000
    assert multiplications(read_workload("resnet50-batch16")) == 16 * multiplications(read_workload("resnet50"))


def test_mobilenet_with_its_depthwise_layers_has_the_published_569_million_multiplications() -> None:
    # Table 1 of the paper: channels and output size of the depthwise layers.
    depthwise = [
        (32, 112),
        (64, 56),
        (128, 56),
        (128, 28),
        (256, 28),
        (256, 14),
        *[(512, 14)] * 5,
        (512, 7),
        (1024, 7),
    ]
    total = multiplications(read_workload("mobilenetv1")) + sum(9 * c * size**2 for c, size in depthwise)
    assert total == pytest.approx(569e6, rel=0.001)


def test_yolov5s_has_its_published_operations_and_parameters() -> None:
    # v6.1: 16.5 GFLOPs (the convolutions and a little else), 7,235,389 parameters, batch norms and biases included.
    workload = read_workload("yolov5s")
    assert 2 * multiplications(workload) == pytest.approx(16.5e9, rel=0.005)
    norms = 2 * sum(layer.shape.m for layer in workload.layers if not layer.name.startswith("model.24"))
    assert parameters(workload) + norms + 3 * 255 == 7_235_389


def test_bert_base_has_its_published_operations() -> None:
    workload = read_workload("bert-base")
    assert parameters(workload) == 12 * (4 * 768**2 + 2 * 768 * 3072)
    # MobileBERT's table 4 gives 22.5 GFLOPs at 128 tokens; attention multiplies 128 x 128 by 768 twice a layer.
    attention = 12 * 2 * 2 * 128 * 128 * 768
    assert 2 * multiplications(workload) + attention == pytest.approx(22.5e9, rel=0.01)


def test_transformer_base_has_about_its_published_65_million_parameters() -> None:
    assert parameters(read_workload("transformer-base")) == pytest.approx(65e6, rel=0.04)


def test_gnmt_has_the_weights_of_its_lstm_layers() -> None:
    encoder = [torch.nn.LSTM(1024, 1024, bidirectional=True, bias=False), torch.nn.LSTM(2048, 1024, bias=False)]
    encoder += [torch.nn.LSTM(1024, 1024, bias=False) for _ in range(2)]
    decoder = [torch.nn.LSTM(width, 1024, bias=False) for width in (1024, 2048, 2048, 2048)]
    expected = sum(weight.numel() for lstm in encoder + decoder for weight in lstm.parameters())
    gates = [layer for layer in read_workload("gnmt").layers if "gates" in layer.name]
    assert parameters(Workload("", "", tuple(gates))) == expected


DECODE, PREFILL = (1, 8, 16, 64), (512, 2048)
LANGUAGE_MODELS = ["llama-3.1-8b", "mistral-7b", "qwen3-0.6b", "qwen3-8b"]


@pytest.mark.parametrize(
    ("name", "tokens", "hidden", "layers", "head_norms", "published"),
    [
        # Parameters that the safetensors files of the models count. Qwen3-0.6B's hold its tied embedding twice.
        ("llama-3.1-8b", 128_256, 4096, 32, 0, 8_030_261_248),
        ("mistral-7b", 32_000, 4096, 32, 0, 7_241_732_096),
        ("qwen3-8b", 151_936, 4096, 36, 2 * 128, 8_190_735_360),
        ("qwen3-0.6b", 151_936, 1024, 28, 2 * 128, 751_632_384 - 151_936 * 1024),
    ],
)
def test_language_models_have_their_published_parameters(
    name: str, tokens: int, hidden: int, layers: int, head_norms: int, published: int
) -> None:
    embedding, norms = tokens * hidden, layers * (2 * hidden + head_norms) + hidden
    assert parameters(read_workload(f"{name}@1")) + embedding + norms == published


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_models_decode_and_read_prompts(name: str) -> None:
    workload = read_workload(name)
    assert workload.token_counts == (*DECODE, *PREFILL) and not workload.standard
    for tokens in (*DECODE, *PREFILL):
        some = read_workload(f"{name}@{tokens}")
        assert some.name == f"{name}@{tokens}" and {layer.shape.n for layer in some.layers} == {tokens}
        assert len(some.shapes()) == len(some.layers)
        # All tokens of a prompt but the last need no head.
        has_head = "lm_head" in some.shapes()
        assert has_head == (name != "qwen3-0.6b" and tokens in DECODE)
        assert {layer.count for layer in some.layers if layer.name != "lm_head"} == {workload.layers[0].count}


def test_a_token_count_selects_layers_of_any_file(tmp_path: Path) -> None:
    path = tmp_path / "w@7.yaml"
    path.write_text(GOOD.replace("n: 7", "n: [7, 3]"))
    assert [layer.shape.n for layer in read_workload(path).layers[:2]] == [7, 3]
    assert read_workload(f"{path}@3").shapes() == {"a": LinearShape(3, 5, 3)}
    with pytest.raises(UsageError, match="lists the token counts 3, 7, not 5: copy its file, and list 5 there"):
        read_workload(f"{path}@5")
    with pytest.raises(UsageError, match=r"is for 3, 7 tokens, and each layer needs one shape here.*two@3"):
        read_workload(path).shapes()
    with pytest.raises(UsageError, match="lists no token counts, so there is no @16"):
        read_workload("bert-base@16")
    with pytest.raises(UsageError, match="unknown workload 'llama-4'"):
        read_workload("llama-4@16")


@pytest.mark.parametrize("name", ["resnet50", "mobilenetv1"])
def test_convolutions_agree_with_nn_meters_list_of_the_same_model(name: str, data: Path) -> None:
    with (data / "nnmeter_layer_shapes" / "conv.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == name]
    columns = ("input_h", "cin", "cout", "ks", "stride")
    # Its MobileNet writes the classifier as a convolution of 1001 outputs.
    theirs = sorted(tuple(int(row[c]) for c in columns) for row in rows if row["cout"] != "1001")
    ours = sorted(
        (shape.h, shape.c_in, shape.c_out, shape.kh, shape.stride[0])
        for shape in (layer.shape for layer in read_workload(name).layers)
        if isinstance(shape, Conv2dShape)
    )
    assert ours == theirs


@pytest.mark.parametrize("name", ["rn50_unstr", "yolov5s_unstr"])
def test_layer_names_are_those_that_published_timing_tables_use(name: str, data: Path) -> None:
    lines = (data / "spdy_tables" / f"{name}.txt").read_text().splitlines()[4:]
    theirs = {line for line in lines if " " not in line}
    ours = {
        layer.name for layer in read_workload({"rn50_unstr": "resnet50", "yolov5s_unstr": "yolov5s"}[name]).layers
    }
    assert ours == theirs


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    conv = Conv2dShape(batch=2, c_in=3, h=9, w=8, c_out=4, kh=3, kw=1, stride=(2, 1), padding=(1, 0), dilation=(1, 2))
    for workload in (
        Workload("yes", "1.5: of a 'test'", (Layer("on", LinearShape(1, 2, 3), 4), Layer("é: ü, {}", conv))),
        *map(read_workload, list_workloads()),
    ):
        write_workload(workload, tmp_path / "w.yaml")
        assert read_workload(tmp_path / "w.yaml") == workload


def test_a_file_is_read_as_written(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(GOOD)
    conv = Conv2dShape(batch=1, c_in=3, h=9, w=8, c_out=4, kh=3, kw=1, stride=(2, 1), padding=(1, 0))
    expected = Workload("two", "a test", (Layer("a", LinearShape(3, 5, 7), 2), Layer("b", conv)))
    assert read_workload(tmp_path / "w.yaml") == expected


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("name: two\n", "", "name missing; a workload needs name, source, layers"),
        ("source: a test", "source:", "source must be a text that is not empty, not None"),
        ("source: a test", "sauce: a test", "unknown key 'sauce' (source?); known are name, source,"),
        ("name: two", "name: two\nauthor: me", "unknown key 'author'; known are name,"),
        ("m: 3, ", "", "layer 'a': m missing; layer 'a' needs name, op, m, k, n"),
        ("m: 3", "m: 3.0", "layer 'a': m must be a whole number of at least 1, not 3.0"),
        ("m: 3", "m: .nan", "layer 'a': m must be a whole number of at least 1, not nan"),
        ("m: 3", "m: -3", "layer 'a': m must be"),
        ("m: 3", "m: true", "layer 'a': m must be"),
        ("m: 3", "m: 3, m: 4", "line 4: not readable YAML: 'm' is given twice"),
        ("n: 7", "n: 0", "layer 'a': n must be"),
        ("n: 7", "n: []", "layer 'a': n must be a whole number of at least 1, or a list of different ones, not []"),
        ("n: 7", "n: [7, 7]", "layer 'a': n must be a whole number of at least 1, or a list of different ones"),
        ("n: 7", "n: [1, 0]", "layer 'a': n (item 2) must be a whole number of at least 1, not 0"),
        ("name: two", "name: two\nstandard: yes please", "standard must be true or false, not 'yes please'"),
        ("count: 2", "count: 0", "layer 'a': count must be"),
        ("count: 2", "counts: 2", "layer 'a': unknown key 'counts' (count?); known are name,"),
        ("count: 2", "stride: [1, 1]", "layer 'a': unknown key 'stride'; known are"),
        ("op: linear", "op: conv3d", "layer 'a': op must be one of linear, conv2d, not 'conv3d'"),
        ("op: linear", "op: [linear]", "layer 'a': op must be one of"),
        ("name: a", "name: 5", "item 1 of layers must be a mapping with a name"),
        ("name: a", "name: b", "layer 'b' is listed 2 times"),
        ("stride: [2, 1]", "stride: 2", "layer 'b': stride must be two whole numbers"),
        ("stride: [2, 1]", "stride: [2, 0]", "layer 'b': stride must be two numbers of at least 1"),
        ("stride: [2, 1]", "dilation: [9, 1]", "layer 'b': a 3x1 kernel does not fit"),
        (GOOD, "", "a workload must be a mapping"),
        (GOOD, "[", "not readable YAML"),
        (GOOD, "2020-13-45", "not readable YAML"),
        (GOOD, "name: x\nsource: y\nlayers: []", "layers must be a list of at least one layer, not []"),
        (GOOD, "name: x\nsource: y\nlayers: [a]", "item 1 of layers must be a mapping with a name, not 'a'"),
    ],
)
def test_a_malformed_file_is_refused_with_its_place(old: str, new: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(BadData) as refusal:
        read_workload(path)
    assert said in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(BadData, match="not readable YAML"):
        read_workload(tmp_path / "w.yaml")


def test_an_unknown_name_lists_the_known_ones_and_a_missing_file_is_called_missing() -> None:
    with pytest.raises(UsageError, match=r"unknown workload 'resnet51'.*bert-base.*yolov5s"):
        read_workload("resnet51")
    with pytest.raises(BadData, match="no such workload file"):
        read_workload("nowhere/resnet50.yaml")
