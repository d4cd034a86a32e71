"""What others read of a pruned model: torch, transformers, onnxruntime, and the packed file."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from made_profile import make_profile
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from latbench.base.files import hash_file
from latbench.cli.commands.prune import prune as prune_command
from latbench.errors import BadData, LatbenchError, UsageError
from search.artifacts import onnx_export
from search.artifacts.layer_database import Database, hash_model
from search.problem.layers import Option
from search.pruning.masks.layer_targets import LayerTarget, LayerTargets, resolve_targets
from search.pruning.one_shot.fill_database import fill_database
from search.pruning.storage.model_folder import hash_manifest, load_pruned, read_manifest, read_masks, save_pruned
from search.pruning.storage.packed_file import load_packed, save_packed
from search.task import Task, load_task
from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.formats import pack
from sparse_kernels.patterns import NM, Dense
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix

TASK = Path(__file__).parents[2] / "pruning_task.py"
CHOICES = {"conv": ("vector:4", 0.75), "fc": ("nm:2:4", 0.5)}


@pytest.fixture
def task() -> Task:
    return load_task(str(TASK))


def masked(model: nn.Module, targets: LayerTargets) -> dict[str, Tensor]:
    """Prune the model in place by magnitude, with a kept weight that is zero; returns its masks."""
    masks = {}
    for layer, target in resolve_targets(targets, model).items():
        module = model.get_submodule(layer)
        matrix = weight_matrix(module).clone()
        masks[layer] = mask = target.mask(matrix.square())
        matrix[tuple(mask.nonzero()[0])] = 0.0
        set_weight_matrix(module, torch.where(mask, matrix, 0.0))
    return masks


def saved(folder: Path, model: nn.Module, choices: dict[str, tuple[str, float]]) -> dict[str, Tensor]:
    profile = make_profile("tiny", model, {**choices, "head": ("dense", 0.0)})
    masks = masked(model, choices)
    save_pruned(folder, model, masks, profile, {})
    return masks


@pytest.mark.parametrize("along", ["inputs", "outputs", "both"])
def test_the_manifest_says_what_n_of_m_masks_keep_along_which_axis(along: str, task: Task, tmp_path: Path) -> None:
    model = task.model()
    profile = make_profile("tiny", model, {"fc": ("nm:2:4", 0.5)})
    masks = masked(model, {"fc": LayerTarget(NM(2, 4), 0.5, along)})
    layer = save_pruned(tmp_path / "pruned", model, masks, profile, {})["layers"]["fc"]
    assert (layer["keep"], layer["of"], layer["along"]) == (2, 4, along)
    assert layer["packed_bytes"] == 16 * 72 // 2 * 5  # a float32 and an offset each
    assert np.array_equal(read_masks(tmp_path / "pruned")["fc"], masks["fc"].numpy())


def test_a_mask_that_is_not_of_the_profiles_pattern_is_refused_by_name(task: Task, tmp_path: Path) -> None:
    model = task.model()
    masks = masked(model, {**CHOICES, "fc": ("unstructured", 0.5)})
    with pytest.raises(UsageError, match="layer fc: its mask is not what the profile asks for: nm:2:4 keeps at most"):
        save_pruned(tmp_path / "pruned", model, masks, make_profile("tiny", model, CHOICES), {})
    assert not list(tmp_path.iterdir())


def test_weights_that_a_mask_drops_and_that_are_there_are_refused_by_name(task: Task, tmp_path: Path) -> None:
    """A packed file would be another function: what a training that goes on looks like."""
    model = task.model()
    profile = make_profile("tiny", model, {"fc": ("unstructured", 0.5)})
    masks = masked(model, {"fc": ("unstructured", 0.5)})
    with torch.no_grad():
        model.get_parameter("fc.weight")[~masks["fc"]] = 1e-9
    with pytest.raises(UsageError, match=r"layer fc: 576 weights that its mask drops are not zero: call finish\(\)"):
        save_pruned(tmp_path / "pruned", model, masks, profile, {})
    assert not list(tmp_path.iterdir())


def test_a_layer_without_the_mask_of_its_pattern_is_refused_by_name(task: Task, tmp_path: Path) -> None:
    model = task.model()
    with pytest.raises(
        UsageError, match="layer fc: the profile prunes it to unstructured, and there is no mask of it"
    ):
        save_pruned(tmp_path / "p", model, {}, make_profile("tiny", model, {"fc": ("unstructured", 0.5)}), {})


def test_a_mask_of_another_sparsity_is_refused_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    masks = masked(model, {"0": ("unstructured", 0.3)})
    with pytest.raises(UsageError, match=r"layer 0: its mask drops 30.0% of the weights, and the profile says 90.0%"):
        save_pruned(tmp_path / "p", model, masks, make_profile("own", model, {"0": ("unstructured", 0.9)}), {})


def test_a_compiled_model_is_saved_as_what_it_was_made_from(task: Task, tmp_path: Path) -> None:
    model = task.model()
    masks = masked(model, CHOICES)
    compiled = torch.compile(model, backend="eager")
    save_pruned(tmp_path / "pruned", compiled, masks, make_profile("tiny", model, CHOICES), {})  # type: ignore[arg-type]
    found, _ = load_pruned(tmp_path / "pruned", task.model())
    assert hash_model(found) == hash_model(model)


def test_a_layer_with_groups_along_its_outputs_is_dense_to_the_kernels(task: Task, tmp_path: Path) -> None:
    model = task.model()
    profile = make_profile("tiny", model, {"fc": ("nm:2:4", 0.5)})
    masks = masked(model, {"fc": LayerTarget(NM(2, 4), 0.5, "outputs")})
    save_pruned(tmp_path / "pruned", model, masks, profile, {})
    found, choices = load_pruned(tmp_path / "pruned", task.model())
    assert str(choices["fc"].pattern) == "dense" and choices["fc"].mask is None
    batch = task.example().arguments
    converted = convert(found, choices, batch)
    with torch.no_grad():
        torch.testing.assert_close(converted(*batch), model(*batch))
    _, packed = load_packed(save_packed(tmp_path / "pruned"), task.model())
    assert str(packed["fc"].pattern) == "dense"


class OnGPU(Tensor):
    """A tensor that NumPy does not take as it is."""

    def numpy(self, *, force: bool = False) -> np.ndarray:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self) -> Tensor:
        return self.as_subclass(Tensor)


def test_a_model_and_masks_on_a_gpu_are_saved_as_on_a_cpu(task: Task, tmp_path: Path) -> None:
    model = task.model()
    masks = saved(tmp_path / "cpu", model, CHOICES)
    for module in model.children():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.weight = nn.Parameter(module.weight.detach().as_subclass(OnGPU))
    on_gpu = {name: mask.as_subclass(OnGPU) for name, mask in masks.items()}
    profile = make_profile("tiny", task.model(), {**CHOICES, "head": ("dense", 0.0)})
    manifest = save_pruned(tmp_path / "gpu", model, on_gpu, profile, {})
    assert manifest["layers"] == read_manifest(tmp_path / "cpu")["layers"]
    assert all(np.array_equal(mask, masks[name].numpy()) for name, mask in read_masks(tmp_path / "gpu").items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu_a_model_is_saved_as_on_a_cpu(task: Task, tmp_path: Path) -> None:
    model = task.model()
    masks = saved(tmp_path / "cpu", model, CHOICES)
    profile = make_profile("tiny", task.model(), {**CHOICES, "head": ("dense", 0.0)})
    on_gpu = {name: mask.cuda() for name, mask in masks.items()}
    manifest = save_pruned(tmp_path / "gpu", model.cuda(), on_gpu, profile, {})
    assert manifest["layers"] == read_manifest(tmp_path / "cpu")["layers"]
    assert hash_model(load_pruned(tmp_path / "gpu", task.model())[0]) == hash_model(model)


def test_torch_reads_the_dense_file_and_prunes_on(task: Task, tmp_path: Path) -> None:
    pruned = task.model()
    masks = saved(tmp_path / "pruned", pruned, CHOICES)
    model = task.model()
    model.load_state_dict(load_file(tmp_path / "pruned" / "model.safetensors"))
    fc = model.get_submodule("fc")
    torch_prune.custom_from_mask(fc, "weight", torch.from_numpy(read_masks(tmp_path / "pruned")["fc"]))
    torch.testing.assert_close(task.example().call(model), task.example().call(pruned), rtol=0, atol=0)
    assert torch.equal(fc.get_buffer("weight_mask") != 0, masks["fc"])
    torch_prune.remove(fc, "weight")
    assert hash_model(model) == hash_model(pruned)


def test_the_dense_file_says_whose_tensors_it_holds(task: Task, tmp_path: Path) -> None:
    """Readers such as from_pretrained refuse a file that does not."""
    saved(tmp_path / "pruned", task.model(), CHOICES)
    with safe_open(tmp_path / "pruned" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs, of what they are about to change
def test_transformers_reads_the_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    choices = {"encoder.layer.0.intermediate.dense": ("nm:2:4", 0.5)}
    masks = masked(model, choices)
    save_pruned(tmp_path / "pruned", model, masks, make_profile("bert", model, choices), {})
    config.save_pretrained(tmp_path / "pruned")
    found = transformers.BertModel.from_pretrained(tmp_path / "pruned", local_files_only=True)
    assert hash_model(found) == hash_model(model)
    words = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(words).last_hidden_state
        torch.testing.assert_close(found(words).last_hidden_state, expected, rtol=0, atol=0)


def test_a_model_of_which_nothing_is_pruned_is_read_again(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    save_pruned(tmp_path / "pruned", model, {}, make_profile("one", model, {"": ("dense", 0.0)}), {})
    found, choices = load_pruned(tmp_path / "pruned", nn.Linear(4, 3))
    assert hash_model(found) == hash_model(model)
    assert choices == {"": LayerPattern(Dense())}


def test_packed_weights_give_back_the_same_model_from_a_smaller_file(task: Task, tmp_path: Path) -> None:
    folder, pruned = tmp_path / "pruned", task.model()
    saved(folder, pruned, CHOICES)
    path = save_packed(folder).rename(tmp_path / "alone.safetensors")
    found, choices = load_packed(path, task.model())
    assert hash_model(found) == hash_model(pruned)
    _, expected = load_pruned(folder, task.model())
    assert set(choices) == set(expected)
    for layer, choice in expected.items():
        assert choices[layer].pattern == choice.pattern
        assert np.array_equal(choices[layer].mask, choice.mask)
    # The bits of both masks, and a quarter and a half of the weights: of a model as small as this, headers count too.
    kept, dense = 4 * (8 * 54 // 4 + 16 * 72 // 2) + (8 * 54 + 16 * 72) // 8, 4 * (8 * 54 + 16 * 72)
    smaller = (folder / "model.safetensors").stat().st_size - path.stat().st_size
    assert smaller == pytest.approx(dense - kept, abs=512)


def flipped(path: Path, content: bytes, place: int) -> None:
    """Replace the file by what it held, with one bit flipped."""
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


@pytest.mark.parametrize("alone", [False, True])
def test_packed_weights_are_refused_as_soon_as_a_bit_is_another(
    alone: bool, task: Task, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Beside their manifest or not, wherever the bit is: in weights, masks, names or patterns."""
    saved(tmp_path / "pruned", task.model(), CHOICES)
    path = save_packed(tmp_path / "pruned")
    if alone:
        path = path.rename(tmp_path / "packed.safetensors")
    content, untouched = path.read_bytes(), task.model()
    (header,) = np.frombuffer(content[:8], "<u8")
    places = [*rng.integers(8, 8 + header, 40), *rng.integers(8 + header, len(content), 40)]
    places.append(content.index(b"vector:4") + len("vector:"))  # of another size, which would be as well-formed
    for place in places:
        flipped(path, content, int(place))
        try:
            found, choices = load_packed(path, task.model())
        except BadData as error:
            assert str(path) in str(error) and "\n" not in str(error)
        else:  # a letter of "format" or of padding: nothing that is read
            assert alone and place < 8 + header
            path.write_bytes(content)
            expected, their_choices = load_packed(path, task.model())
            assert hash_model(found) == hash_model(expected)
            assert {name: choice.pattern for name, choice in choices.items()} == {
                name: choice.pattern for name, choice in their_choices.items()
            }
    flipped(path, content, len(content) - 1)
    with pytest.raises(BadData, match="not as it was written: copy it again, or write it anew with `latbench prune"):
        load_packed(path, untouched)
    assert hash_model(untouched) == hash_model(task.model())  # not even in part


def test_packed_weights_of_other_weights_are_not_taken_for_these(task: Task, tmp_path: Path) -> None:
    """Whole, but not the file that the folder's manifest lists."""
    changed = task.model()
    with torch.no_grad():
        changed.get_parameter("fc.bias").add_(1)
    for name, model in {"one": task.model(), "other": changed}.items():
        saved(tmp_path / name, model, CHOICES)
        save_packed(tmp_path / name)
    (tmp_path / "other" / "packed.safetensors").replace(tmp_path / "one" / "packed.safetensors")
    with pytest.raises(BadData, match="not as it was written"):
        load_packed(tmp_path / "one" / "packed.safetensors", task.model())


def test_packed_weights_of_the_transposed_shape_are_another_models(tmp_path: Path) -> None:
    """As many weights and as many mask bits, none the wiser without the shape."""

    def model(m: int, k: int) -> nn.Module:
        return nn.ModuleDict({"fc": nn.Linear(k, m, bias=False), "head": nn.Linear(2, 2)})

    saved(tmp_path / "pruned", model(8, 16), {"fc": ("unstructured", 0.5)})
    path, own = save_packed(tmp_path / "pruned"), model(16, 8)
    before = hash_model(own)
    with pytest.raises(BadData, match=r"not the packed weights of this model: fc\.weight is of another shape"):
        load_packed(path, own)
    assert hash_model(own) == before


def test_packed_weights_are_not_made_of_a_damaged_folder(task: Task, tmp_path: Path) -> None:
    saved(tmp_path / "pruned", task.model(), CHOICES)
    weights = tmp_path / "pruned" / "model.safetensors"
    flipped(weights, content := weights.read_bytes(), len(content) - 1)
    with pytest.raises(BadData, match=r"model\.safetensors: missing, or not as it was written; prune again"):
        save_packed(tmp_path / "pruned")


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (nn.ReLU(), "not the packed weights of this model$"),
        (nn.Sequential(nn.Linear(4, 3)), "not the packed weights of this model$"),
        (nn.Linear(4, 4), "not the packed weights of this model: weight is of another shape"),
    ],
)
def test_packed_weights_of_another_model_are_refused(other: nn.Module, sentence: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    save_pruned(tmp_path / "pruned", model, {}, make_profile("one", model, {"": ("dense", 0.0)}), {})
    with pytest.raises(BadData, match=sentence):
        load_packed(save_packed(tmp_path / "pruned"), other)


@pytest.mark.parametrize("wider", ["fc", "head"])
def test_another_model_is_refused_before_anything_is_written(wider: str, task: Task, tmp_path: Path) -> None:
    """A layer that is packed, and one that is not; those before it fit."""
    saved(tmp_path / "pruned", task.model(), CHOICES)
    path, other = save_packed(tmp_path / "pruned"), task.model()
    other.register_module(wider, nn.Linear(73 if wider == "fc" else 17, 16 if wider == "fc" else 3))
    before = hash_model(other)
    with pytest.raises(BadData, match=f"not the packed weights of this model: {wider}.weight is of another shape"):
        load_packed(path, other)
    assert hash_model(other) == before


def test_weights_are_unpacked_into_a_model_of_another_type(task: Task, tmp_path: Path) -> None:
    pruned = task.model()
    saved(tmp_path / "pruned", pruned, CHOICES)
    found, _ = load_packed(save_packed(tmp_path / "pruned"), task.model().double())
    assert hash_model(found) == hash_model(pruned.double())


def test_what_is_no_packed_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "packed.safetensors").write_bytes(b"")
    for path in (tmp_path / "packed.safetensors", tmp_path / "gone.safetensors"):
        with pytest.raises(
            BadData, match=r"not the packed weights of a model \(.*\): copy it again, or write it anew"
        ):
            load_packed(path, nn.Linear(4, 3))


def test_the_command_writes_packed_weights_and_onnx_also_when_nothing_else_is_to_be_done(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder, exported = task.model(), tmp_path / "pruned", tmp_path / "onnx" / "model.onnx"
    make_profile("tiny", model, CHOICES).save(tmp_path / "profile.json")
    database = Database(tmp_path / "database", hash_model(model))
    fill_database(task, model, {layer: [Option(*choice)] for layer, choice in CHOICES.items()}, database)

    def run(**options: object) -> str:
        prune_command(str(TASK), tmp_path / "profile.json", database.folder, folder, joint=False, **options)  # type: ignore[arg-type]
        return capsys.readouterr().out

    run()
    manifest, verified = read_manifest(folder), hash_manifest(folder)
    output = run(packed=True, onnx=exported)
    assert f"{exported} takes batches of any size\n" in output
    assert "ONNX Runtime gains no speed from zeros; `latbench export` writes the pruned model" in output
    assert f"up to date, and {folder / 'packed.safetensors'}, and {exported}" in output
    listed = read_manifest(folder)
    path = folder / "packed.safetensors"
    assert listed.pop("packed") == {"bytes": path.stat().st_size, "sha256": hash_file(path)}
    assert listed == manifest
    assert hash_manifest(folder) == verified  # a verification of the folder goes on counting
    pruned, _ = load_pruned(folder, task.model())
    assert hash_model(load_packed(folder / "packed.safetensors", task.model())[0]) == hash_model(pruned)
    session = onnxruntime.InferenceSession(str(exported), providers=["CPUExecutionProvider"])
    (x,) = task.example().arguments
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    (single,) = session.run(None, {session.get_inputs()[0].name: x[:1].numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found, pruned(x).numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(single, pruned(x[:1]).numpy(), rtol=1e-4, atol=1e-5)
    (folder / "manifest.json").write_text(json.dumps({**manifest, "inputs": "others"}))
    assert "is written" in run()
    assert not (folder / "packed.safetensors").exists()  # it was of the folder that this one took the place of


def test_the_command_says_what_all_weights_take_where_they_have_a_budget(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they lie in the folder, not as the profile expects it."""
    model, path = task.model(), tmp_path / "profile.json"
    expected = replace(make_profile("tiny", model, CHOICES), most_bytes=9000.0, weight_bytes=1.0, dense_bytes=8000.0)
    expected.save(path)
    database = Database(tmp_path / "database", hash_model(model))
    fill_database(task, model, {layer: [Option(*choice)] for layer, choice in CHOICES.items()}, database)
    prune_command(str(TASK), path, database.folder, tmp_path / "pruned", joint=False)
    taken = 8000
    pruned, choices = load_pruned(tmp_path / "pruned", task.model())
    for layer, choice in choices.items():
        matrix = weight_matrix(pruned.get_submodule(layer)).numpy()
        taken += pack(matrix, choice.mask, choice.pattern).nbytes - matrix.nbytes
    assert f"all weights take {taken:,} of 9,000 bytes allowed, 8,000 dense; " in capsys.readouterr().out
    replace(expected, most_bytes=None).save(path)
    prune_command(str(TASK), path, database.folder, tmp_path / "pruned", joint=False)
    assert "all weights" not in capsys.readouterr().out


def test_a_model_that_no_onnx_file_holds_is_said_before_it_is_written(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_export, "MAX_BYTES", 1000)
    with pytest.raises(LatbenchError, match=r"cannot be exported to ONNX: it has 0.00 GB of weights, and one file"):
        onnx_export.export_onnx(task.model(), task.example().arguments, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
