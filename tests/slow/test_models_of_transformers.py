"""Default models of transformers, small and with random weights: traced, and converted at 0% and at 75%."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from latbench.workloads.workload import trace_model
from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.nn import SparseLayer
from sparse_kernels.patterns import Dense, VectorWise
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix
from sparse_kernels.same_results import CONVERTED, same_results

pytestmark = pytest.mark.slow
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed: make test-slow does")

WORDS, SIZES = 96, {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
DECODER = {**SIZES, "vocab_size": WORDS, "num_key_value_heads": 2}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
IMAGE = {**SIZES, "image_size": 32, "patch_size": 8}
TEXT = {**SIZES, "vocab_size": WORDS, "max_position_embeddings": 32, **TOKENS}


def make(name: str, config: dict[str, Any]) -> nn.Module:
    """A model of this class with a configuration of its own class."""
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config)).eval()


def words(length: int = 9) -> torch.Tensor:
    return torch.randint(3, WORDS, (2, length))


MODELS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]], int]] = {
    "LlamaForCausalLM": (DECODER, lambda: {"input_ids": words()}, 15),
    "Qwen2ForCausalLM": (DECODER, lambda: {"input_ids": words()}, 15),
    "Qwen3ForCausalLM": ({**DECODER, "head_dim": 8}, lambda: {"input_ids": words()}, 15),
    "OPTForCausalLM": (
        {**SIZES, "vocab_size": WORDS, "ffn_dim": 64, "word_embed_proj_dim": 32}, lambda: {"input_ids": words()}, 12,
    ),
    "GPT2LMHeadModel": (
        {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, **TOKENS}, lambda: {"input_ids": words()}, 8,
    ),
    "BertForSequenceClassification": (
        {**SIZES, "vocab_size": WORDS},
        lambda: {"input_ids": words(), "attention_mask": torch.tensor([[1] * 9, [1] * 5 + [0] * 4])}, 14,
    ),
    "T5ForConditionalGeneration": (
        {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        lambda: {"input_ids": words(), "decoder_input_ids": words(5)}, 32,
    ),
    "ViTForImageClassification": (IMAGE, lambda: {"pixel_values": torch.randn(2, 3, 32, 32)}, 14),
    "CLIPModel": (
        {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16},
        lambda: {"input_ids": words(), "pixel_values": torch.randn(2, 3, 32, 32)}, 27,
    ),
}  # fmt: skip
"""Class -> configuration, keywords of a call, and the number of layers that can be pruned."""


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_is_converted_with_every_layer(name: str) -> None:
    torch.manual_seed(0)
    config, draw, layers = MODELS[name]
    model, example = make(name, config), draw()
    workload, left_out = trace_model(model, (), keywords=example)
    names = [layer.name for layer in workload.layers]
    assert len(names) == layers, left_out
    for pattern, sparsity in ((Dense(), 0.0), (VectorWise(8), 0.75)):
        choices = {}
        for layer_name in names:
            layer = model.get_submodule(layer_name)
            mask = pattern.mask(weight_matrix(layer).abs().double().numpy(), sparsity)
            choices[layer_name] = LayerPattern(pattern, mask)
            set_weight_matrix(layer, weight_matrix(layer) * torch.from_numpy(mask))
        converted = convert(model, choices, (), example_keywords=example)
        assert sum(isinstance(module, SparseLayer) for module in converted.modules()) == layers
        other = draw()
        assert same_results(converted(**other), model(**other), CONVERTED)
