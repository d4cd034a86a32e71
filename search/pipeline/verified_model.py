"""What `latbench verify` times: a pruned model in its folder, or the same model as it was exported."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from latbench.base.deployed_forms import PYTHON
from latbench.base.engine_registry import CUPY, FLOAT16, FLOAT32
from latbench.errors import BadData, UsageError
from latbench.machines.processors import count_cores
from search.artifacts.profile import Profile, read_profile
from search.deployment import GPU_THREADS, Deployment
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

    def choose_deployment(self, backend: str | None = None, gpu: str = "", model_type: str = "") -> Deployment:
        """Return how it runs: as it was searched, but for another backend or GPU that is asked for.

        A profile of a CPU has no type for a GPU: there it gets `model_type`, or float16. Raises UsageError where
        these do not go with the profile, or with the form in which the model was exported.
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
        searched = self.profile.deployment
        chosen = replace(searched, backend=backend or searched.backend, form=self.form)
        if chosen.on_gpu and not searched.on_gpu:
            self._check_precisions()
            chosen = replace(chosen, threads=GPU_THREADS, precisions=(model_type or FLOAT16,), over="")
        elif searched.on_gpu and not chosen.on_gpu:
            chosen = replace(chosen, threads=count_cores(), precisions=(FLOAT32,), gpu="", over="")
        if gpu and not chosen.on_gpu:
            raise UsageError(
                f"--gpu {gpu} does not go with {chosen.backend}, which runs on a CPU: add --backend {CUPY}"
            )
        return replace(chosen, gpu=gpu or chosen.gpu)

    def _check_precisions(self) -> None:
        """Raise UsageError if a layer rounds further than a GPU's kernels do."""
        for name, choice in self.profile.layers.items():
            if choice.precision != FLOAT32:
                raise UsageError(f"{self.folder}: layer {name} is in {choice.precision}, which runs on a CPU alone")

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
