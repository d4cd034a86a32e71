"""The inputs of a report: a table, and the files of the steps after it. Only this module reads them.

Readers of other files load torch or scikit-learn, which takes seconds, and which a report of a table does not need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from latbench.base.files import hash_file
from latbench.errors import BadData, UsageError
from latbench.report.sections import accuracy, trade_off
from latbench.tables.latest_rows import accept_every_row, read_latest
from latbench.tables.schema import KEY_COLUMNS
from latbench.tables.storage import Place
from latbench.tables.table import hash_table, read_environments
from latbench.workloads.workload import find_workload_file
from search.artifacts.profile import Profile, read_profile

if TYPE_CHECKING:
    from cost_models.model_file import ModelFile
    from search.pipeline.milder_targets import MilderTargets
    from search.pipeline.speedup_verdict import SpeedupVerdict

# The columns that a report shows.
COLUMNS = [
    *(field.name for field in KEY_COLUMNS), "point_id", "started_at", "backend_version", "format", "kernel_used",
    "sparsity_actual", "sample_count", "median_seconds", "low_seconds", "high_seconds", "drift_ratio",
    "reference_ratio", "flop_nnz",
    "bytes_min", "roofline_seconds", "status", "flags", "error",
]  # fmt: skip


@dataclass(frozen=True)
class SourceFile:
    """A file that the report was made from: its role, its path as given, its hash."""

    role: str
    path: Place
    digest: str


@dataclass(frozen=True)
class ReportFiles:
    """The files beside a table that a report may show; None for a file that is not given.

    Attributes
    ----------
    cost_model : Path or None
        Cost model from `latbench fit`.
    profile : Path or None
        Profile from `latbench search`.
    pruned : Path or None
        Folder from `latbench prune`.
    verify : Path or None
        Folder from `latbench verify`.
    workload : str or None
        Workload from `latbench trace`: a file or a bundled name.
    database : Path or None
        Layer database of the search.
    accuracy : Path or None
        Results of experiments, as `sections.accuracy` reads them.
    milder : Path or None
        What milder targets would keep, from `latbench run`.
    """

    cost_model: Path | None = None
    profile: Path | None = None
    pruned: Path | None = None
    verify: Path | None = None
    workload: str | None = None
    database: Path | None = None
    accuracy: Path | None = None
    milder: Path | None = None

    def by_role(self) -> dict[str, Path]:
        """Return the path of each given file by its role in the report."""
        paths = {
            "cost model": self.cost_model,
            "profile": self.profile,
            "pruned model": self.pruned and self.pruned / "manifest.json",
            "verification": self.verify and self.verify / "verify.json",
            "layer database": self.database and self.database / "database.json",
            "workload": find_workload_file(self.workload) if self.workload else None,
            "accuracies": self.accuracy,
            "milder targets": self.milder,
        }
        return {role: path for role, path in paths.items() if path}


@dataclass(frozen=True)
class ReportInputs:
    """Everything a report shows. Only the table is always present.

    Attributes
    ----------
    table : DataFrame
        The latest row of each point with each status that it ever had. Its texts are categories.
    table_hash : str
        Hash of the table.
    environments : list of dict
        Machines and software that its rows name.
    manifest_hash : str or None
        Hash of the pruned model's manifest, as a verification records it.
    trade_offs : DataFrame or None
        The frame of `sections.trade_off`.
    results : DataFrame or None
        The rows of `sections.accuracy.read_results`.
    milder : MilderTargets or None
        What milder targets would keep.
    sources : tuple of SourceFile
        The files, the table first.
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
    milder: MilderTargets | None = None
    sources: tuple[SourceFile, ...] = field(default=())


def read_inputs(table: Place, files: ReportFiles | None = None) -> ReportInputs:
    """Read a table and the files beside it.

    Parameters
    ----------
    table : Place
        The path or URI of the table.
    files : ReportFiles, optional
        The other files; none by default.

    Returns
    -------
    ReportInputs
        What a report shows.

    Raises
    ------
    BadData
        If a file is missing, damaged or of another kind.
    UsageError
        If a workload or a database is given without the files it goes with.
    """
    given = files or ReportFiles()
    if given.database and not (given.profile and given.workload):
        raise UsageError(
            "--database shows the error at each speedup: it needs the --profile of its search and the --workload of "
            "latbench trace"
        )
    if given.workload and not given.database:
        raise UsageError("--workload names the layers of a --database: give both")
    table_hash = hash_table(table)  # first, while no frame is in memory beside it
    frame = read_latest(table, COLUMNS, group_columns=["point_id", "status"], accept=accept_every_row)
    if frame.empty:
        raise BadData(f"{table} holds no rows: run latbench sweep first")
    found = ReportInputs(
        table=frame,
        table_hash=table_hash,
        environments=read_environments(table).to_dict("records"),
        model=_read_model(given.cost_model) if given.cost_model else None,
        profile=read_profile(given.profile) if given.profile else None,
        verdict=_read_verdict(given.verify / "verify.json") if given.verify else None,
        results=accuracy.read_results(given.accuracy) if given.accuracy else None,
        milder=_read_milder_targets(given.milder) if given.milder else None,
        sources=(SourceFile("table", table, table_hash),),
    )
    if given.pruned:
        manifest, manifest_hash = _read_manifest(given.pruned)
        found = replace(found, manifest=manifest, manifest_hash=manifest_hash)
    if given.workload and given.database and found.profile:
        trade_offs = trade_off.read_trade_offs(frame, found.profile, given.workload, given.database)
        found = replace(found, trade_offs=trade_offs)
    sources = [SourceFile(role, path, hash_file(path)) for role, path in given.by_role().items()]
    return replace(found, sources=(*found.sources, *sources))


def _read_model(path: Path) -> ModelFile:
    from cost_models.model_file import read

    return read(path)


def _read_milder_targets(path: Path) -> MilderTargets:
    from search.pipeline.milder_targets import read_milder_targets

    return read_milder_targets(path)


def _read_manifest(folder: Path) -> tuple[Mapping[str, Any], str]:
    from search.pruning.storage.model_folder import hash_manifest, read_manifest

    manifest = read_manifest(folder)
    try:
        _check_manifest(manifest)
    except (KeyError, TypeError, AttributeError) as error:
        name = folder / "manifest.json"
        raise BadData(
            f"{name} is not a manifest that latbench prune wrote ({type(error).__name__}: {error})"
        ) from error
    return manifest, hash_manifest(folder)


def _check_manifest(manifest: Mapping[str, Any]) -> None:
    """Raise KeyError, AttributeError or TypeError for a missing value that a report shows, or one of a wrong type."""
    numbers = [
        layer[name] for layer in manifest["layers"].values() for name in ("weights", "kept_weights", "packed_bytes")
    ]
    for stage in manifest.get("stages", ()):
        numbers += [stage["loss"], *([] if stage["score"] is None else [stage["score"]])]
        numbers += [flop[name] for flop in filter(None, [stage.get("training_flop")]) for name in _FLOP]
    texts = [manifest[name] for name in ("method", "score_name") if "stages" in manifest]
    texts += [stage["name"] for stage in manifest.get("stages", ())]
    for kind, values in ((int | float, numbers), (str, texts)):
        if wrong := [value for value in values if not isinstance(value, kind)]:
            raise TypeError(f"{wrong[0]!r} where a {'text' if kind is str else 'number'} should be")


_FLOP = ("total", "dense_total")


def _read_verdict(path: Path) -> SpeedupVerdict:
    from search.pipeline.speedup_verdict import read_verdict

    if not path.is_file():
        raise BadData(f"{path} does not exist: run latbench verify first")
    verdict = read_verdict(path)
    if verdict is None:
        raise BadData(f"{path} is not what latbench verify writes: verify again")
    return verdict
