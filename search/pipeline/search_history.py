"""Timings of whole models that are kept beside the layer database, and the keys under which they are found again.

    whole_model-<key>.json    the probe profiles with which a search begins
    sessions-<digest>.json    the rounds of one search, for the same search again
    verified-<key>.json       verifications that were fed back, for all searches under the same conditions

A search that is repeated, or was interrupted, takes its timings from these files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from latbench.base.files import hash_file
from latbench.errors import BadData
from search.inputs.layer_errors import KINDS
from search.loss.cache import hash_loss_inputs
from search.pipeline.search_request import SearchInputs, SearchRequest
from search.pipeline.speedup_verdict import SpeedupVerdict, read_verdict
from search.pipeline.verify import SESSION
from search.whole_model import overhead
from search.whole_model.sessions import (
    Session,
    add_session,
    as_in_file,
    hash_session,
    read_session_file,
    read_sessions,
    write_sessions,
)


class SearchHistory:
    """The timings that a search finds, and those that it leaves.

    Parameters
    ----------
    inputs
        The inputs of the search.
    request
        What the user asks for.
    """

    def __init__(self, inputs: SearchInputs, request: SearchRequest) -> None:
        self._inputs, self._request = inputs, request

    # Keys -----------------------------------------------------------------------------------------------------------

    def conditions(self) -> dict[str, Any]:
        """Return what the times of whole models depend on, whatever the layers become."""
        inputs = self._inputs
        return overhead.describe_conditions(inputs.task, inputs.model, inputs.model_hash, self._request.deployment)

    def key(self) -> dict[str, Any]:
        """Return the conditions, and what the choice of the probe profiles depends on."""
        inputs, candidates = self._inputs, self._request.candidates
        return {
            **self.conditions(), "table_hash": inputs.table_hash,
            "cost_model": hash_file(inputs.cost_model)[:16] if inputs.cost_model else None,
            "patterns": list(candidates.patterns) if candidates.patterns else None,
            "excluded": list(inputs.task.limits.excluded),
            "sparsities": list(candidates.sparsities) if candidates.sparsities else None,
        }  # fmt: skip

    def loss_key(self) -> str:
        """Return what losses depend on beside the profile: a hash, the pool that computes them, and conditions."""
        inputs = self._inputs
        own = hash_loss_inputs(inputs.task, inputs.model, inputs.model_hash, inputs.provenance)
        return f"{own} {self._request.workers.pool} {inputs.conditions.describe()}".rstrip()

    def digest(self) -> str:
        """Return a hash of everything that the profile depends on, also of what was timed before the search."""
        errors = self._request.candidates.errors
        timed = [*read_sessions(self._probes_path(), self.key()), *self.read_verifications()]
        return _hash([
            self.key(), self._request.to_record(), self.loss_key(), asdict(self._inputs.task.limits),
            None if errors in KINDS else hash_file(Path(errors)), [hash_session(session) for session in timed],
        ])  # fmt: skip

    # Probe profiles -------------------------------------------------------------------------------------------------

    def read_probes(self) -> Session | None:
        """Return the session of the probe profiles; None if they were not timed yet."""
        known = read_sessions(self._probes_path(), self.key())
        return known[0] if known else None

    def write_probes(self, session: Session) -> None:
        """Keep the session of the probe profiles."""
        write_sessions([session], self.key(), self._probes_path())

    def _probes_path(self) -> Path:
        return self._inputs.database / f"whole_model-{_hash(self.key())}.json"

    # Rounds ---------------------------------------------------------------------------------------------------------

    def read_rounds(self, digest: str) -> list[Session]:
        """Return the rounds of the search with this digest that were timed before."""
        return read_sessions(self._rounds_path(digest), self.key())

    def write_rounds(self, digest: str, sessions: Sequence[Session]) -> None:
        """Keep the rounds of the search with this digest."""
        write_sessions(sessions, self.key(), self._rounds_path(digest))

    def remove_rounds(self, digest: str) -> None:
        """Remove the rounds of the search with this digest, so that they are timed again."""
        self._rounds_path(digest).unlink(missing_ok=True)

    def _rounds_path(self, digest: str) -> Path:
        return self._inputs.database / f"sessions-{digest}.json"

    # Verifications --------------------------------------------------------------------------------------------------

    def read_verifications(self) -> list[Session]:
        """Return the verifications under the same conditions that were fed back."""
        return read_sessions(self._verifications_path(), self.conditions())

    def add_verification(self, folder: Path) -> None:
        """Feed back the verification in `folder`, for all searches under the same conditions.

        Raises BadData as `read_met_verdict` does.
        """
        add_session(self._read_verification(folder), self.conditions(), self._verifications_path())

    def read_met_verdict(self, folder: Path) -> SpeedupVerdict | None:
        """Return the verdict of the verification in `folder` if it met this request's target.

        Raises BadData if the folder has no verification, or one under other conditions.
        """
        self._read_verification(folder)
        verdict = read_verdict(folder / "verify.json")
        return verdict if verdict and verdict.met and verdict.target == self._request.promise.target else None

    def _read_verification(self, folder: Path) -> Session:
        found = read_session_file(folder / SESSION)
        if found is None:
            raise BadData(f"{folder} has no {SESSION}; `latbench verify` writes it")
        key, [session] = found
        wanted = as_in_file(self.conditions())
        if differing := [name for name in wanted if key.get(name) != wanted[name]]:
            raise BadData(
                f"the verification in {folder} does not belong to this search: its {differing[0]} is "
                f"{key.get(differing[0])}, not {wanted[differing[0]]}; verify again under the same conditions"
            )
        return session

    def _verifications_path(self) -> Path:
        return self._inputs.database / f"verified-{_hash(self.conditions())}.json"


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
