"""Sessions, whole models that were timed together, kept in a file: what a search measured is not measured again.

    {"version": 2, "key": {...}, "sessions": [{"profiles": {engine: {layer: [pattern, sparsity, precision]}},
        "blocks": {engine: [[seconds, ...] a round]}, "built": [...], "left_out": {engine: why}}, ...]}

`key` lists what the times depend on. A file with another key belongs to another machine, model or search.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import filelock

from latbench.base.files import write_text_atomically
from latbench.errors import BadData, EnvironmentUnusable
from search.problem.layers import Option
from search.whole_model.timings import Timings

VERSION = 2

OptionsByLayer = Mapping[str, Option]
"""Layer name -> its option."""

Key = Mapping[str, Any]
"""What times depend on, by name."""


@dataclass(frozen=True)
class Session:
    """Engines timed in turns. `profiles` maps the name of each pruned engine to the options of its layers."""

    profiles: Mapping[str, OptionsByLayer]
    timings: Timings


def name_profile(options: OptionsByLayer) -> str:
    """Return the name of an engine with these options: the same for the same options, in any order."""
    text = json.dumps(sorted((layer, *astuple(option)) for layer, option in options.items()))
    return f"profile {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def hash_session(session: Session) -> str:
    """Return a hash of what the session timed, and of its samples."""
    return hashlib.sha256(json.dumps(_to_record(session), sort_keys=True).encode()).hexdigest()[:16]


def write_sessions(sessions: Iterable[Session], key: Key, path: Path) -> None:
    """Write the sessions of `key` to `path`, whole or not at all."""
    records = [_to_record(session) for session in sessions]
    write_text_atomically(path, json.dumps({"version": VERSION, "key": dict(key), "sessions": records}) + "\n")


def add_session(session: Session, key: Key, path: Path) -> None:
    """Add a session to those of `key` in `path`, unless it is there. Several processes may add at the same time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_suffix(".lock")):
            known = read_sessions(path, key)
            if hash_session(session) not in map(hash_session, known):
                write_sessions([*known, session], key, path)
    except OSError as error:
        raise EnvironmentUnusable(f"cannot write {path}: {error.strerror or error}") from error


def read_session_file(path: Path) -> tuple[dict[str, Any], list[Session]] | None:
    """Return the key and the sessions in a file; None if there is no file, or one of another version.

    Raises BadData for a damaged file.
    """
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("version") != VERSION:
            return None
        return dict(content["key"]), [_from_record(record) for record in content["sessions"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadData(f"{path}: the file is damaged; delete it, and latbench measures again") from error


def read_sessions(path: Path, key: Key) -> list[Session]:
    """Return the sessions of the same `key`; an empty list if there are none. Raises BadData for a damaged file."""
    found = read_session_file(path)
    return found[1] if found is not None and found[0] == as_in_file(key) else []


def as_in_file(key: Key) -> Any:
    """Return the key as a file returns it: with lists in place of tuples."""
    return json.loads(json.dumps(dict(key)))


def _to_record(session: Session) -> dict[str, Any]:
    timings = session.timings
    return {
        "profiles": {
            name: {layer: astuple(option) for layer, option in options.items()}
            for name, options in session.profiles.items()
        },
        "blocks": {name: [list(block) for block in blocks] for name, blocks in timings.blocks.items()},
        "built": list(timings.builds),
        "left_out": dict(timings.left_out),
    }


def _from_record(record: Mapping[str, Any]) -> Session:
    profiles = {
        name: {
            layer: Option(str(pattern), float(sparsity), str(precision))
            for layer, (pattern, sparsity, precision) in options.items()
        }
        for name, options in record["profiles"].items()
    }
    blocks: dict[str, Sequence[Sequence[float]]] = {
        name: [[float(sample) for sample in block] for block in rounds] for name, rounds in record["blocks"].items()
    }
    return Session(profiles, Timings(blocks, dict(record["left_out"]), tuple(int(it) for it in record["built"])))
