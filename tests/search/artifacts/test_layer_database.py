"""The layer database gives back what was stored, and says what is missing, stale or damaged."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from latbench.errors import BadData, EnvironmentUnusable
from search.artifacts.layer_database import Database, Entry, hash_model
from search.problem.layers import Option


def entry(rng: np.random.Generator, m: int, k: int) -> Entry:
    mask = torch.from_numpy(rng.random((m, k)) < 0.3)
    return Entry(torch.from_numpy(rng.standard_normal((m, k)).astype(np.float32)) * mask, mask, 0.0)


@pytest.mark.parametrize(("m", "k"), [(1, 1), (7, 13), (16, 32)])
def test_entries_come_back_bit_for_bit(tmp_path: Path, rng: np.random.Generator, m: int, k: int) -> None:
    made = entry(rng, m, k)
    weight, mask = made.weight, made.mask
    if mask.any():
        weight[mask.nonzero()[0].tolist()[0], mask.nonzero()[0].tolist()[1]] = 0.0  # a kept weight may be zero
    Database(tmp_path, "abc").put("a.b/c", Option("nm:2:4", 0.5), Entry(weight, mask, 0.1 + 0.2))
    database = Database(tmp_path, "abc")
    assert database.has("a.b/c", Option("nm:2:4", 0.5))
    assert not database.has("a.b/c", Option("nm:2:4", 0.75))
    found = database.get("a.b/c", Option("nm:2:4", 0.5))
    assert torch.equal(found.weight, weight)
    assert torch.equal(found.mask, mask)
    assert found.error == database.error("a.b/c", Option("nm:2:4", 0.5)) == 0.1 + 0.2


def test_an_absent_entry_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"no layer fc1 as vector:32 at 0\.9"):
        Database(tmp_path, "abc").get("fc1", Option("vector:32", 0.9))


def test_a_database_of_another_model_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    Database(tmp_path, "abc").put("fc1", Option("unstructured", 0.5), entry(rng, 3, 5))
    with pytest.raises(BadData, match=r"other weights .abc, this one is xyz.*--database"):
        Database(tmp_path, "xyz")
    (tmp_path / "database.json").write_text('{"version": 99, "model_hash": "abc"}')
    with pytest.raises(BadData, match="version 99, this latbench reads 4"):
        Database(tmp_path, "abc")
    (tmp_path / "database.json").write_text("[]")
    with pytest.raises(BadData, match="not the index"):
        Database(tmp_path, "abc")


def test_a_database_built_another_way_is_refused_where_that_matters(tmp_path: Path, rng: np.random.Generator) -> None:
    Database(tmp_path, "abc", "these images").put("fc1", Option("unstructured", 0.5), entry(rng, 3, 5))
    assert Database(tmp_path, "abc", "these images").has("fc1", Option("unstructured", 0.5))
    assert Database(tmp_path, "abc").has("fc1", Option("unstructured", 0.5))
    with pytest.raises(BadData, match=r"other calibration data.*--database"):
        Database(tmp_path, "abc", "those images")


@pytest.mark.parametrize("keep", [0, 5, 90, -1])
def test_a_truncated_entry_is_said(tmp_path: Path, rng: np.random.Generator, keep: int) -> None:
    database = Database(tmp_path, "abc")
    database.put("fc1", Option("unstructured", 0.5), entry(rng, 16, 16))
    (path,) = tmp_path.glob("fc1/*")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadData, match="damaged; delete it"):
        database.get("fc1", Option("unstructured", 0.5))


def test_values_that_do_not_fit_the_mask_are_damage(tmp_path: Path, rng: np.random.Generator) -> None:
    from safetensors.torch import save_file

    database = Database(tmp_path, "abc")
    made = entry(rng, 4, 4)
    weight, mask = made.weight, made.mask
    database.put("fc1", Option("unstructured", 0.5), Entry(weight, mask, 0.0))
    (path,) = tmp_path.glob("fc1/*")
    tensors = {"values": torch.zeros(int(mask.sum()) + 1), "mask": torch.from_numpy(np.packbits(mask.numpy()))}
    save_file(tensors, path, metadata={"shape": "4,4", "error": "0.0"})
    with pytest.raises(BadData, match="damaged"):
        database.get("fc1", Option("unstructured", 0.5))


def test_a_disk_that_refuses_is_said(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr("search.artifacts.layer_database.save_file", full)
    with pytest.raises(EnvironmentUnusable, match=r"cannot write .*unstructured@0.5.*No space left"):
        Database(tmp_path, "abc").put("fc1", Option("unstructured", 0.5), entry(rng, 3, 5))
    assert not list(tmp_path.glob("fc1/*"))


def test_wrong_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="float32 weight and a bool mask"):
        Database(tmp_path, "abc").put("fc1", Option("vector:2", 0.5), Entry(torch.ones(2, 2), torch.ones(2, 2), 0.0))


def test_the_model_hash_sees_every_tensor() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    before = hash_model(model)
    assert before == hash_model(model)
    model[1].num_batches_tracked += 1
    assert hash_model(model) != before


def test_a_database_of_other_code_is_refused_and_roundings_are_not(tmp_path: Path) -> None:
    Database(tmp_path, "abc", "obs 1").begin(2.0)
    again = Database(tmp_path, "abc")
    again.begin(2.0 * (1 + 1e-5))  # another number of threads
    assert again.provenance == "obs 1"
    with pytest.raises(BadData, match=r"loss of the dense model was 2, and it is 2\.5 now: the code of loss\(\)"):
        again.begin(2.5)


def test_who_begins_later_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    first, second = Database(tmp_path, "abc", "obs 1"), Database(tmp_path, "abc", "magnitude 1")
    first.begin(2.0)
    with pytest.raises(BadData, match="another method"):
        second.begin(2.0)
