"""What a report is made from: a table, and the files of the steps done after it. All are read here and only here."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from cost_models import storage
from cost_models.storage import ModelFile
from latbench import files, tables
from latbench.errors import BadData
from search import profile as profiles
from search.profile import Profile

VERIFY_KEYS = (
    "target", "met", "predicted_seconds", "predicted_low", "predicted_high", "measured_seconds", "measured_speedup",
    "score_dense", "score_pruned",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A file that the report was made from: what it is, its path as given, its SHA-256 or the table's own hash."""

    role: str
    path: Path
    digest: str


@dataclass(frozen=True)
class Inputs:
    """Everything a report shows. All but the table may be absent."""

    table: pd.DataFrame
    table_hash: str
    environments: list[dict[str, Any]]
    model: ModelFile | None = None
    profile: Profile | None = None
    manifest: dict[str, Any] | None = None
    verification: dict[str, Any] | None = None
    model_rows: pd.DataFrame | None = None  # the verification's whole-model times, table columns
    sources: tuple[Source, ...] = field(default=())


def read(
    table: Path,
    model: Path | None = None,
    profile: Path | None = None,
    pruned: Path | None = None,
    verify: Path | None = None,
) -> Inputs:
    """Read a table and what else is given; `pruned` and `verify` are folders.

    Raises BadData in a sentence when something is missing, foreign or truncated.
    """
    frame, table_hash = tables.read(table), tables.table_hash(table)
    if frame.empty:
        raise BadData(f"{table} holds no rows: run latbench sweep first")
    sources = [Source("table", table, table_hash)]

    def document(role: str, path: Path | None, made_by: str, keys: tuple[str, ...]) -> dict[str, Any] | None:
        if path is None:
            return None
        content = _json(path, made_by, keys)
        sources.append(Source(role, path, files.sha256(path)))
        return content

    learned = storage.read(model) if model else None
    chosen = profiles.load(profile) if profile else None
    for role, path in (("cost model", model), ("profile", profile)):
        if path:
            sources.append(Source(role, path, files.sha256(path)))
    return Inputs(
        table=frame,
        table_hash=table_hash,
        environments=tables.read_env(table).to_dict("records"),
        model=learned,
        profile=chosen,
        manifest=document("pruned model", pruned and pruned / "manifest.json", "prune", ("files",)),
        verification=document("verification", verify and verify / "verify.json", "verify", VERIFY_KEYS),
        model_rows=_model_rows(verify) if verify else None,
        sources=tuple(sources),
    )


def _json(path: Path, made_by: str, keys: tuple[str, ...]) -> dict[str, Any]:
    advice = f"make it with latbench {made_by}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadData(f"{path} does not exist: {advice}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadData(f"{path} is no JSON file ({error}): {advice}") from None
    missing = [key for key in keys if not isinstance(content, dict) or key not in content]
    if missing or not isinstance(content, dict):
        lacks = f"it lacks {', '.join(missing)}" if missing else "it is no JSON object"
        raise BadData(f"{path} is not what latbench {made_by} writes: {lacks}")
    return content


def _model_rows(verify: Path) -> pd.DataFrame:
    rows = tables.read(verify)
    return rows[(rows["purpose"] == "verify") & (rows["op"] == "model")]
