"""What `latbench verify` times: a pruned model in its folder, or the same model as it was exported."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from latbench.base.deployed_forms import PYTHON
from latbench.errors import BadData, UsageError
from search.artifacts.profile import Profile, read_profile
from search.deployment import Deployment
from search.export.export_manifest import EXPECTED, PROFILE, check_files, hash_export, is_exported, read_manifest
from search.pruning.storage.model_folder import hash_manifest
from search.task import Task


@dataclass(frozen=True)
class VerifiedModel:
    """A model that is verified.

    Attributes
    ----------
    folder
        Where it lies.
    profile
        The profile with its promise.
    form
        How it is deployed, one of `latbench.base.deployed_forms.FORM_PHRASES`.
    pruned
        Hash of the manifest of the pruned model.
    exported
        Hash of the manifest of the export; empty for a pruned model in its folder.
    """

    folder: Path
    profile: Profile
    form: str
    pruned: str
    exported: str = ""

    def choose_deployment(self, backend: str | None = None) -> Deployment:
        """Return how it runs.

        Raises UsageError for another backend than that of an exported model, or another form than the promised one.
        """
        promised = self.profile.form
        if promised not in (PYTHON, self.form):
            pruned = self.folder if self.form == PYTHON else "PRUNED"
            raise UsageError(
                f"{self.folder} was searched for the form {promised}, and its promise holds for that form alone: "
                f"export it with `latbench export TASK {pruned} --to {promised} -o deploy`, then verify deploy"
            )
        if self.exported and backend not in (None, self.profile.backend):
            raise UsageError(f"{self.folder} is exported, with latbench's kernels: leave out --backend")
        return replace(self.profile.deployment, backend=backend or self.profile.backend, form=self.form)

    def check_task(self, task: Task) -> None:
        """Raise BadData if the model belongs to another task."""
        if self.profile.task != task.name:
            raise BadData(f"{self.folder} is a pruned model of task {self.profile.task}, not of {task.name}")


def read_verified(folder: Path) -> VerifiedModel:
    """Read what is verified. Raises BadData if the folder has neither a pruned model nor an exported one."""
    if not is_exported(folder):
        pruned = hash_manifest(folder)
        return VerifiedModel(folder, read_profile(folder / PROFILE), PYTHON, pruned)
    manifest = read_manifest(folder)
    check_files(folder, manifest, [PROFILE, EXPECTED])
    return VerifiedModel(
        folder, read_profile(folder / PROFILE), manifest["form"], manifest["pruned"], hash_export(folder)
    )
