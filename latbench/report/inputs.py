"""What a report is made from: a table, and the files of the steps done after it. All are read here and only here.

What reads them loads torch or scikit-learn, seconds that a report of a table alone does not take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from latbench.base.files import hash_file
from latbench.errors import BadData, UsageError
from latbench.report import accuracy as results
from latbench.report import trade_off
from latbench.tables.latest_rows import accept_every_row, read_latest
from latbench.tables.schema import KEY_COLUMNS
from latbench.tables.storage import Place
from latbench.tables.table import hash_table, read_environments
from latbench.workloads.workload import find_workload_file
from search.artifacts.profile import Profile, read_profile

if TYPE_CHECKING:
    from cost_models.storage import ModelFile
    from search.pipeline.verify import SpeedupVerdict

# What a report shows of a table.
COLUMNS = [
    *(field.name for field in KEY_COLUMNS), "point_id", "started_at", "backend_version", "format", "kernel_used",
    "sparsity_actual", "sample_count", "median_seconds", "low_seconds", "high_seconds", "drift_ratio",
    "reference_ratio", "flop_nnz",
    "bytes_min", "roofline_seconds", "status", "flags", "error",
]  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A file that the report was made from: what it is, its path as given, its hash."""

    role: str
    path: Place
    digest: str


@dataclass(frozen=True)
class Inputs:
    """Everything a report shows. All but the table may be absent.

    table: the latest row of each point with each status that it ever had, so a time and how it failed before;
    its texts are categories. manifest_hash: of the pruned model's manifest, as a verification of it records it.
    trade_offs: `trade_off.tidy`; results: `accuracy.read`.
    """

    table: pd.DataFrame
    table_hash: str
    environments: list[dict[str, Any]]
    model: ModelFile | None = None
    profile: Profile | None = None
    manifest: Mapping[str, Any] | None = None
    manifest_hash: str | None = None
    verdict: SpeedupVerdict | None = None
    trade_offs: pd.DataFrame | None = None
    results: pd.DataFrame | None = None
    sources: tuple[Source, ...] = field(default=())


def read(
    table: Place,
    model: Path | None = None,
    profile: Path | None = None,
    pruned: Path | None = None,
    verify: Path | None = None,
    *,
    workload: str | None = None,
    database: Path | None = None,
    accuracy: Path | None = None,
) -> Inputs:
    """Read a table and what else is given; `pruned`, `verify` and `database` are folders, `workload` may be a name.

    Raises BadData in a sentence when something is missing, foreign or truncated, and UsageError where a workload or a
    database is given without what it goes with.
    """
    if database and not (profile and workload):
        raise UsageError(
            "--database shows what each speed costs: it needs the --profile of its search and the --workload of "
            "latbench trace"
        )
    if workload and not database:
        raise UsageError("--workload names the layers of a --database: give both")
    table_hash = hash_table(table)  # first, while there is no frame beside it in memory
    frame = read_latest(table, COLUMNS, per=["point_id", "status"], useful=accept_every_row)
    if frame.empty:
        raise BadData(f"{table} holds no rows: run latbench sweep first")
    found = Inputs(
        table=frame,
        table_hash=table_hash,
        environments=read_environments(table).to_dict("records"),
        model=_model(model) if model else None,
        profile=read_profile(profile) if profile else None,
        verdict=_verdict(verify / "verify.json") if verify else None,
        results=results.read(accuracy) if accuracy else None,
        sources=(Source("table", table, table_hash),),
    )
    if pruned:
        manifest, manifest_hash = _pruned(pruned)
        found = replace(found, manifest=manifest, manifest_hash=manifest_hash)
    if workload and database and found.profile:
        found = replace(found, trade_offs=trade_off.read(frame, found.profile, workload, database))
    given = {
        "cost model": model,
        "profile": profile,
        "pruned model": pruned and pruned / "manifest.json",
        "verification": verify and verify / "verify.json",
        "layer database": database and database / "database.json",
        "workload": find_workload_file(workload) if workload else None,
        "accuracies": accuracy,
    }
    sources = [Source(role, path, hash_file(path)) for role, path in given.items() if path]
    return replace(found, sources=(*found.sources, *sources))


def _model(path: Path) -> ModelFile:
    from cost_models import storage

    return storage.read(path)


def _pruned(folder: Path) -> tuple[Mapping[str, Any], str]:
    from search.pipeline.verify import hash_manifest
    from search.pruning.storage.model_folder import read_manifest

    manifest = read_manifest(folder)
    try:
        _check_manifest(manifest)
    except (KeyError, TypeError, AttributeError) as error:
        name = folder / "manifest.json"
        raise BadData(f"{name} is not as latbench prune wrote it ({type(error).__name__}: {error})") from error
    return manifest, hash_manifest(folder)


def _check_manifest(manifest: Mapping[str, Any]) -> None:
    """Raise KeyError, AttributeError or TypeError if something is missing that a report shows, or is no number."""
    numbers = [
        layer[name] for layer in manifest["layers"].values() for name in ("weights", "kept_weights", "packed_bytes")
    ]
    for stage in manifest.get("stages", ()):
        numbers += [stage[name] for name in ("loss", "score")]
        numbers += [flop[name] for flop in filter(None, [stage.get("training_flop")]) for name in _FLOP]
    texts = [manifest[name] for name in ("method", "score_name") if "stages" in manifest]
    texts += [stage["name"] for stage in manifest.get("stages", ())]
    for kind, values in ((int | float, numbers), (str, texts)):
        if wrong := [value for value in values if not isinstance(value, kind)]:
            raise TypeError(f"{wrong[0]!r} where a {'text' if kind is str else 'number'} should be")


_FLOP = ("total", "dense_total")


def _verdict(path: Path) -> SpeedupVerdict:
    from search.pipeline import verify as verification

    if not path.is_file():
        raise BadData(f"{path} does not exist: make it with latbench verify")
    verdict = verification.read_verdict(path)
    if verdict is None:
        raise BadData(f"{path} is not what latbench verify writes: verify again")
    return verdict
