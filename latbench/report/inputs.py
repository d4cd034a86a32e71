"""What a report is made from: a table, and the files of the steps done after it. All are read here and only here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from cost_models import storage
from cost_models.storage import ModelFile
from latbench import files, latest, tables
from latbench.errors import BadData
from latbench.places import Place
from search import profile as profiles
from search import verify as verification
from search.profile import Profile
from search.pruning.folder import read_manifest
from search.verify import Verdict

# What a report shows of a table.
COLUMNS = [
    *(field.name for field in tables.KEY), "point_id", "started_at", "backend_version", "format", "kernel_used",
    "sparsity_actual", "sample_count", "median_seconds", "low_seconds", "high_seconds", "status", "flags", "error",
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
    """

    table: pd.DataFrame
    table_hash: str
    environments: list[dict[str, Any]]
    model: ModelFile | None = None
    profile: Profile | None = None
    manifest: Mapping[str, Any] | None = None
    manifest_hash: str | None = None
    verdict: Verdict | None = None
    sources: tuple[Source, ...] = field(default=())


def read(
    table: Place,
    model: Path | None = None,
    profile: Path | None = None,
    pruned: Path | None = None,
    verify: Path | None = None,
) -> Inputs:
    """Read a table and what else is given; `pruned` and `verify` are folders.

    Raises BadData in a sentence when something is missing, foreign or truncated.
    """
    table_hash = tables.table_hash(table)  # first, while there is no frame beside it in memory
    frame = latest.frame(table, COLUMNS, per=["point_id", "status"], useful=latest.every)
    if frame.empty:
        raise BadData(f"{table} holds no rows: run latbench sweep first")
    found = Inputs(
        table=frame,
        table_hash=table_hash,
        environments=tables.read_env(table).to_dict("records"),
        model=storage.read(model) if model else None,
        profile=profiles.load(profile) if profile else None,
        manifest=read_manifest(pruned) if pruned else None,
        manifest_hash=verification.manifest_hash(pruned) if pruned else None,
        verdict=_verdict(verify / "verify.json") if verify else None,
        sources=(Source("table", table, table_hash),),
    )
    given = {
        "cost model": model,
        "profile": profile,
        "pruned model": pruned and pruned / "manifest.json",
        "verification": verify and verify / "verify.json",
    }
    sources = [Source(role, path, files.sha256(path)) for role, path in given.items() if path]
    return replace(found, sources=(*found.sources, *sources))


def _verdict(path: Path) -> Verdict:
    if not path.is_file():
        raise BadData(f"{path} does not exist: make it with latbench verify")
    verdict = verification.load(path)
    if verdict is None:
        raise BadData(f"{path} is not what latbench verify writes: verify again")
    return verdict
