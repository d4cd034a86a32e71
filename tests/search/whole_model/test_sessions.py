"""What was timed comes back from its file as it was, or not at all."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latbench.errors import BadData
from search.problem.layers import Option
from search.whole_model import sessions
from search.whole_model.sessions import Session, name_profile
from search.whole_model.timings import Timings

CHOSEN = {"fc1": Option("vector:8", 0.75), "fc2": Option("dense", 0.0)}


def example(rng: np.random.Generator) -> Session:
    name = name_profile(CHOSEN)
    blocks = {engine: rng.random((3, 4)).tolist() for engine in ("torch", name)}
    return Session({name: CHOSEN}, Timings(blocks, {"openvino": "absent"}, (1, 1, 2)))


def test_sessions_come_back_to_the_last_bit(rng: np.random.Generator, tmp_path: Path) -> None:
    path, both = tmp_path / "sessions.json", [example(rng), example(rng)]
    assert sessions.read_sessions(path, {"threads": 2}) == []
    sessions.write_sessions(both, {"threads": 2, "inputs": [(1, 2)]}, path)
    assert sessions.read_sessions(path, {"threads": 2, "inputs": [(1, 2)]}) == both
    assert sessions.read_session_file(path) == ({"threads": 2, "inputs": [[1, 2]]}, both)
    again = sessions.read_sessions(path, {"threads": 2, "inputs": [(1, 2)]})
    assert [sessions.hash_session(it) for it in again] == [sessions.hash_session(it) for it in both]
    assert sessions.hash_session(both[0]) != sessions.hash_session(both[1])


def test_of_another_key_there_are_none(rng: np.random.Generator, tmp_path: Path) -> None:
    sessions.write_sessions([example(rng)], {"threads": 2}, tmp_path / "sessions.json")
    assert sessions.read_sessions(tmp_path / "sessions.json", {"threads": 1}) == []


def test_who_adds_at_the_same_time_loses_nothing(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = sessions.write_sessions

    def slow(*arguments: Any) -> None:
        time.sleep(0.05)
        write(*arguments)

    monkeypatch.setattr(sessions, "write_sessions", slow)
    path, both = tmp_path / "new" / "sessions.json", [example(rng), example(rng)]
    writers = [
        threading.Thread(target=sessions.add_session, args=(one, {"threads": 2}, path)) for one in (*both, both[0])
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    kept = sessions.read_sessions(path, {"threads": 2})
    assert sorted(map(sessions.hash_session, kept)) == sorted(map(sessions.hash_session, both))


def test_a_file_of_another_version_is_as_none(tmp_path: Path) -> None:
    path = tmp_path / "sessions.json"
    for content in ("{}", '{"version": 0, "key": {}}', '{"key": {}, "dense": {"torch": 1.0}}'):
        path.write_text(content)
        assert sessions.read_session_file(path) is None and sessions.read_sessions(path, {}) == []


def test_a_damaged_file_is_said(rng: np.random.Generator, tmp_path: Path) -> None:
    path = tmp_path / "sessions.json"
    sessions.write_sessions([example(rng)], {}, path)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(BadData, match="the file is damaged; delete it, and latbench measures again"):
        sessions.read_sessions(path, {})


def test_a_profile_is_called_by_its_options_alone() -> None:
    name = name_profile(CHOSEN)
    assert name == name_profile(dict(reversed(CHOSEN.items())))
    assert (
        len({name, name_profile({**CHOSEN, "fc2": Option("dense", 0.1)}), name_profile({"fc1": CHOSEN["fc1"]})}) == 3
    )
