"""How a pruned model runs."""

from dataclasses import dataclass

from latbench.base.deployed_forms import PYTHON
from latbench.base.engine_registry import FLOAT32, NUMBA, list_rivals, runs_on_gpu
from latbench.machines.processors import count_cores

GPU_THREADS = 1
"""Threads of a model on a GPU, as tables of GPUs have them: one launches the kernels."""


@dataclass(frozen=True)
class Deployment:
    """How a pruned model runs.

    Attributes
    ----------
    threads
        Threads of each engine.
    backend
        Backend of the pruned model, one of `latbench.base.engine_registry.PRUNED_ENGINES`.
    precisions
        Types in which its layers may be multiplied. Dense engines that round as far are its rivals, too. On a GPU the
        one type of the whole model, of the dense ones too.
    form
        One of `latbench.base.deployed_forms.FORM_PHRASES`. latbench's own CPU kernels run in any of them.
    gpu
        The GPU as `--gpu` takes it; empty for the first one, and on a CPU.
    over
        Dense engines that round further than this type are no rivals, although the pruned model may round further.
        Empty for the least precise of `precisions`.
    """

    threads: int
    backend: str = NUMBA
    precisions: tuple[str, ...] = (FLOAT32,)
    form: str = PYTHON
    gpu: str = ""
    over: str = ""

    @property
    def rivals(self) -> tuple[str, ...]:
        """The dense engines that the promise is over: the fastest of them counts."""
        return list_rivals(self.backend, (self.over,) if self.over else self.precisions)

    @property
    def on_gpu(self) -> bool:
        """Whether the model runs on a GPU."""
        return runs_on_gpu(self.backend)

    @property
    def host_threads(self) -> int:
        """Threads of what runs on the CPU beside the model: compilers of kernels, and checks."""
        return count_cores() if self.on_gpu else self.threads

    @property
    def model_type(self) -> str:
        """The type of the weights and inputs of the whole model."""
        return self.precisions[0] if self.on_gpu else FLOAT32
