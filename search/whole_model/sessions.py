"""Whole models that were timed together, kept in a file: what a search measured is not measured again.

    {"version": 1, "key": {...}, "sessions": [{"profiles": {engine: {layer: [pattern, sparsity]}},
        "blocks": {engine: [[seconds, ...] a round]}, "built": [...], "left_out": {engine: why}}, ...]}

`key` says what the times depend on: a file with another key is another machine's, model's or search's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from latbench.base.files import write_text_atomically
from latbench.errors import BadData, EnvironmentUnusable
from search.whole_model.end_to_end import Timings

VERSION = 1

Chosen = Mapping[str, tuple[str, float]]
"""Layer name -> (pattern, sparsity)."""


@dataclass(frozen=True)
class Session:
    """Engines timed in turns; `profiles` says by an engine's name which options its layers had, if it was pruned."""

    profiles: Mapping[str, Chosen]
    timings: Timings


def profile_name(chosen: Chosen) -> str:
    """What an engine with these options is called: the same for the same options, in whatever order."""
    text = json.dumps(sorted((layer, pattern, sparsity) for layer, (pattern, sparsity) in chosen.items()))
    return f"profile {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def digest(session: Session) -> str:
    """Of what it timed, and how long that took."""
    return hashlib.sha256(json.dumps(_record(session), sort_keys=True).encode()).hexdigest()[:16]


def write(sessions: Iterable[Session], key: Mapping[str, Any], path: Path) -> None:
    """Write the sessions of `key` to `path`, whole or not at all."""
    records = [_record(session) for session in sessions]
    write_text_atomically(path, json.dumps({"version": VERSION, "key": dict(key), "sessions": records}) + "\n")


def add(session: Session, key: Mapping[str, Any], path: Path) -> None:
    """Add a session to those of `key` in `path`, unless it is there: of several processes that add, each is kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_suffix(".lock")):
            known = read(path, key)
            if digest(session) not in map(digest, known):
                write([*known, session], key, path)
    except OSError as error:
        raise EnvironmentUnusable(f"cannot write {path}: {error.strerror or error}") from error


def load(path: Path) -> tuple[dict[str, Any], list[Session]] | None:
    """The key and the sessions in a file; None where there is none, or of another version.

    Raises BadData for a damaged file.
    """
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("version") != VERSION:
            return None
        return dict(content["key"]), [_session(record) for record in content["sessions"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadData(f"{path}: damaged; delete it, and it is measured again") from error


def read(path: Path, key: Mapping[str, Any]) -> list[Session]:
    """The sessions of the same `key`, none if there are none. Raises BadData for a damaged file."""
    found = load(path)
    return found[1] if found is not None and found[0] == _as_read(key) else []


def _record(session: Session) -> dict[str, Any]:
    timings = session.timings
    return {
        "profiles": {name: dict(chosen) for name, chosen in session.profiles.items()},
        "blocks": {name: [list(block) for block in blocks] for name, blocks in timings.blocks.items()},
        "built": list(timings.built),
        "left_out": dict(timings.left_out),
    }


def _session(record: Mapping[str, Any]) -> Session:
    profiles = {
        name: {layer: (str(pattern), float(sparsity)) for layer, (pattern, sparsity) in chosen.items()}
        for name, chosen in record["profiles"].items()
    }
    blocks: dict[str, Sequence[Sequence[float]]] = {
        name: [[float(sample) for sample in block] for block in rounds] for name, rounds in record["blocks"].items()
    }
    return Session(profiles, Timings(blocks, dict(record["left_out"]), tuple(int(it) for it in record["built"])))


def _as_read(key: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(dict(key)))
