"""The adapters under the real transformers.Trainer and lightning.Trainer, whose order of calls quick tests imitate.

`make test-slow` installs these libraries; where one is missing its tests are skipped.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from latbench.errors import UsageError
from search.pruning.saliency.fisher import MFAC
from search.pruning.training.callbacks import build_lightning_callback, build_transformers_callback
from search.pruning.training.methods.gmp import GMP
from search.pruning.training.methods.mask_decay import MaskDecay
from search.pruning.training.methods.rigl import RigL
from search.pruning.training.pruner import Pruner
from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.patterns import Dense

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # theirs, of what they are about to change

STEPS, SAVED = 12, 4
METHODS: dict[str, Callable[[], Pruner]] = {
    "mask_decay": MaskDecay,  # dense weights live behind the masks
    "gmp_mfac": partial(GMP, updates=4, score=MFAC(gradients=3)),  # gradients are kept
    "rigl": partial(RigL, every=3),  # hard zeros, and gradients of what is dropped
}


def check(model: nn.Module, pruner: Pruner, targets: dict[str, tuple[str, float]]) -> None:
    """Every optimizer step was seen, and the model is what its masks say."""
    assert pruner.state.step == STEPS
    assert not pruner.at_work
    for name, mask in pruner.masks.items():
        weight = model.get_submodule(name).weight.detach()
        assert mask.double().mean() == pytest.approx(1 - targets[name][1], abs=1e-3)
        assert bool((weight[~mask] == 0).all())
        assert bool((weight[mask] != 0).all())


def check_same(a: Pruner, b: Pruner, first: nn.Module, second: nn.Module) -> None:
    assert all(torch.equal(mask, b.masks[name]) for name, mask in a.masks.items())
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


@pytest.fixture(scope="module")
def transformers() -> Iterator[ModuleType]:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    found = pytest.importorskip("transformers", reason="transformers is not installed")
    # A folder of that name, such as this project's, passes for the library where it is in the path.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.trainer.is_datasets_available", lambda: False)
        yield found


BERT_TARGETS = {
    "bert.encoder.layer.0.intermediate.dense": ("nm:2:4", 0.5),
    "bert.encoder.layer.1.output.dense": ("unstructured", 0.75),
}


def train_bert(
    transformers: ModuleType, pruner: Pruner, folder: Path, resume: str | None = None, judge: Any = None, **more: Any
) -> Any:
    """A tiny random BERT with dropout, trained in bfloat16 on the CPU, two batches an optimizer step."""
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=8, num_labels=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    words = torch.randint(0, 20, (40, 8))
    data = [{"input_ids": line, "labels": int(line.sum()) % 2} for line in words]
    settings = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "weight_decay": 0.1, "save_steps": SAVED,
        "logging_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": True, "disable_tqdm": True,
        "seed": 3,
    } | more  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=transformers.TrainingArguments(**settings), train_dataset=data, eval_dataset=data[:8],
        callbacks=[build_transformers_callback(pruner, BERT_TARGETS)], compute_metrics=judge,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("method", METHODS)
def test_transformers_trains_bert_and_goes_on_bit_equal(
    method: str, transformers: ModuleType, tmp_path: Path
) -> None:
    whole, resumed = METHODS[method](), METHODS[method]()
    first = train_bert(transformers, whole, tmp_path)
    check(first.model, whole, BERT_TARGETS)
    second = train_bert(transformers, resumed, tmp_path, str(tmp_path / f"checkpoint-{SAVED}"))
    check_same(whole, resumed, first.model, second.model)


def test_transformers_goes_on_from_a_checkpoint_in_another_folder(transformers: ModuleType, tmp_path: Path) -> None:
    """Where another run left one after as many steps."""
    whole, resumed = METHODS["mask_decay"](), METHODS["mask_decay"]()
    first = train_bert(transformers, whole, tmp_path / "a")
    train_bert(transformers, METHODS["mask_decay"](), tmp_path / "b", seed=4)
    second = train_bert(transformers, resumed, tmp_path / "b", str(tmp_path / "a" / f"checkpoint-{SAVED}"))
    check_same(whole, resumed, first.model, second.model)


def test_transformers_ends_with_the_best_model_or_refuses_to(transformers: ModuleType, tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": SAVED}
    with pytest.raises(UsageError, match="load_best_model_at_end may end with"):
        train_bert(transformers, GMP(), tmp_path, **best)
    pruner, places = METHODS["rigl"](), itertools.count()
    trainer = train_bert(
        transformers, pruner, tmp_path, metric_for_best_model="place", greater_is_better=False,
        judge=lambda _: {"place": next(places)}, **best,
    )  # fmt: skip
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{SAVED}")
    saved = torch.load(tmp_path / f"checkpoint-{SAVED}" / "pruner.pt", weights_only=True)["layers"]
    for name, mask in pruner.masks.items():
        assert torch.equal(mask, saved[name]["mask"])
        assert torch.equal(trainer.model.get_submodule(name).weight, saved[name]["weight"])


@pytest.fixture(scope="module")
def lightning() -> ModuleType:
    return pytest.importorskip("lightning.pytorch", reason="lightning is not installed")


LIGHTNING_TARGETS = {"net.0": ("nm:2:4", 0.5), "net.3": ("unstructured", 0.5)}


def train_lightning(
    lightning: ModuleType, pruner: Pruner, folder: Path, resume: Path | None = None, **more: Any
) -> nn.Module:
    """A small net, trained in bfloat16 on the CPU, two batches an optimizer step."""

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Tanh(), nn.Linear(32, 32))

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            # Lightning that goes on in the middle of an epoch begins with the epoch's first batch again.
            generator = torch.Generator().manual_seed(2 * self.trainer.global_step + index % 2)
            x, y = torch.randn(4, 16, generator=generator), torch.randint(0, 32, (4,), generator=generator)
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)

    torch.manual_seed(0)
    module = Module()
    saved = lightning.callbacks.ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=SAVED, **more)
    trainer = lightning.Trainer(
        max_steps=STEPS, accumulate_grad_batches=2, precision="bf16-mixed", accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[build_lightning_callback(pruner, LIGHTNING_TARGETS), saved],
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(range(24)), ckpt_path=resume)
    return module


@pytest.mark.parametrize("method", METHODS)
def test_lightning_trains_and_goes_on_bit_equal(method: str, lightning: ModuleType, tmp_path: Path) -> None:
    whole, resumed = METHODS[method](), METHODS[method]()
    first = train_lightning(lightning, whole, tmp_path)
    check(first, whole, LIGHTNING_TARGETS)
    second = train_lightning(lightning, resumed, tmp_path, tmp_path / f"step={SAVED}.ckpt")
    check_same(whole, resumed, first, second)


def test_lightning_is_warned_of_checkpoints_from_before_the_last_masks(lightning: ModuleType, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="best checkpoint by loss may be from before the last masks"):
        train_lightning(lightning, GMP(), tmp_path, monitor="loss")


def test_a_converted_lightning_module_keeps_its_class_and_methods() -> None:
    lightning = pytest.importorskip("lightning")

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

        def predict_step(self, batch: Tensor, index: int) -> Tensor:
            return self(batch)

    model, x = Net().eval(), torch.randn(6, 8)
    choices = {name: LayerPattern(Dense()) for name in ("body.0", "body.2")}
    with torch.no_grad():
        converted = convert(model, choices, (x,))
        expected = model(x)
        assert converted.body.get_submodule("0").activation == "relu"  # the body is a graph, with folded layers
        traced = converted.to_torchscript(method="trace", example_inputs=x)
        torch.testing.assert_close(traced(x), expected, rtol=1e-4, atol=1e-5)
    assert isinstance(converted, Net)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    [found] = trainer.predict(converted, DataLoader(x, batch_size=6))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
