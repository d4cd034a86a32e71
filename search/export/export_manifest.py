"""The manifest of an exported model: what was exported, in which form, and the checksums of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from latbench.base.deployed_forms import OPENVINO, TORCH_PACKAGE, C
from latbench.base.files import hash_file
from latbench.errors import BadData

MANIFEST, LIBRARY, PACKED = "manifest.json", "libmodel.so", "model.latbench"
PROFILE, EXPECTED = "profile.json", "expected.npz"
LEVEL = "LATBENCH_LEVEL"
"""Environment variable with the CPU level that models take, in place of the most able one of the machine."""

GRAPH, GRAPH_WEIGHTS = "model.xml", "model.bin"
"""OpenVINO's two files of a model."""

PACKAGE = "model.pt2"
"""torch's file of a model."""

_KEYS = {
    C: ("input", "output"),
    OPENVINO: (OPENVINO, "inputs", "outputs"),
    TORCH_PACKAGE: (TORCH_PACKAGE, "namespace", "inputs", "outputs"),
}
"""What a manifest of each form tells its loader, beside the files."""


def is_exported(folder: Path) -> bool:
    """Return whether the folder holds an exported model."""
    return (folder / MANIFEST).is_file() and (folder / PACKED).is_file()


def is_export_of(folder: Path, form: str, pruned: str) -> bool:
    """Return whether the folder holds the whole export to this form of the pruned model with this hash."""
    if not is_exported(folder):
        return False
    try:
        manifest = read_manifest(folder)
        check_files(folder, manifest, list(manifest["files"]))
    except BadData:
        return False
    return (manifest["form"], manifest["pruned"]) == (form, pruned)


def write_manifest(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Write a manifest of these facts, and of the bytes and checksums of all files in the folder; return it."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest = {
        **facts,
        "bytes": {path.name: path.stat().st_size for path in files},
        "files": {path.name: hash_file(path) for path in files},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of an exported model. Raises BadData if it is none."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name in ("files", "pruned", *_KEYS[manifest["form"]]):
            manifest[name]
    except (ValueError, KeyError, TypeError) as error:
        raise BadData(f"{folder / MANIFEST} is no manifest of an exported model: export the model again") from error
    except OSError as error:
        raise BadData(f"{folder} is no exported model: {error}") from error
    return manifest


def hash_export(folder: Path) -> str:
    """Return a hash of an exported model, whose manifest lists the hashes of its files. Raises BadData if none is."""
    return hashlib.sha256(json.dumps(read_manifest(folder), sort_keys=True).encode()).hexdigest()[:16]


def check_files(folder: Path, manifest: dict[str, Any], names: Sequence[str]) -> None:
    """Raise BadData unless these files are the ones that the manifest lists."""
    for name in names:
        path = folder / name
        if not path.is_file() or hash_file(path) != manifest["files"].get(name):
            raise BadData(f"{path} is missing or was changed after the export: export the model again")
