"""Small models of timm and transformers with random weights, and what to call them with.

A model keeps its architecture; only its width, its depth and its vocabulary are small. Each has three calls: the
example, one of the same shapes, and one of another batch size. That one has another length and padding too, where the
model takes an attention mask.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

VOCABULARY = 96
CALLS = ("example", "same shapes", "another batch")

_TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 16}
_ENCODER_DECODER = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": VOCABULARY,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
_VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_SPEECH = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "conv_dim": (32, 32, 32), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 3,
}  # fmt: skip


@dataclass(frozen=True)
class ZooModel:
    """A model of a library.

    library: timm or transformers. name: of a timm model, or of a class of transformers. settings: of timm's
    `create_model`, or of the configuration. call: one of `INPUTS`. size: of images, or samples of sound.
    """

    library: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    call: str = "image"
    size: int = 64

    def build(self, seed: int) -> nn.Module:
        """Return the model with random weights, in eval mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _build_timm(self) if self.library == "timm" else _build_transformers(self)
            _randomize(model)
        return model.eval()

    def make_inputs(self, call: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments and keywords of a call, a position in `CALLS`."""
        generator = torch.Generator().manual_seed(100 + call)
        return INPUTS[self.call](generator, self.size, call == 2)


def _build_timm(entry: ZooModel) -> nn.Module:
    timm = importlib.import_module("timm")
    model: nn.Module = timm.create_model(entry.name, pretrained=False, num_classes=16, **entry.settings)
    return model


def _build_transformers(entry: ZooModel) -> nn.Module:
    transformers = importlib.import_module("transformers")
    kind = getattr(transformers, entry.name)
    settings = dict(entry.settings)
    for name, value in settings.items():  # configurations in a configuration, such as CLIP's two
        if isinstance(value, tuple) and value and isinstance(value[0], str):
            settings[name] = getattr(transformers, value[0])(**value[1])
    model: nn.Module = kind(kind.config_class(**settings))
    return model


def _randomize(model: nn.Module) -> None:
    """Move parameters and statistics a little, in place: fresh ones are often 0 or 1, where errors do not show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is not None:
                assert module.running_mean is not None
                module.running_mean.add_(torch.randn_like(module.running_mean) * 0.1)
                module.running_var.mul_(torch.rand_like(module.running_var) + 0.5)


# ------------------------------------------------------------------------------------------------ inputs


def _make_image(generator: torch.Generator, size: int, other: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(3 if other else 2, 3, size, size, generator=generator),), {}


def _make_pixels(generator: torch.Generator, size: int, other: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (image,), _ = _make_image(generator, size, other)
    return (), {"pixel_values": image}


def _make_text(generator: torch.Generator, size: int, other: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch, length = (3, 7) if other else (2, 9)
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if other:
        mask[0, 5:] = 0
    return (), {"input_ids": ids, "attention_mask": mask}


def _make_tokens(generator: torch.Generator, size: int, other: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {"input_ids": _make_text(generator, size, other)[1]["input_ids"]}


def _make_pair(generator: torch.Generator, size: int, other: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    _, text = _make_text(generator, size, other)
    ids = torch.randint(3, VOCABULARY, (len(text["input_ids"]), 5), generator=generator)
    return (), {**text, "decoder_input_ids": ids}


def _make_sound(generator: torch.Generator, size: int, other: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {"input_values": torch.randn(3 if other else 2, size, generator=generator)}


def _make_spectrum(generator: torch.Generator, size: int, other: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch = 3 if other else 2
    ids = torch.randint(3, VOCABULARY, (batch, 4 if other else 5), generator=generator)
    return (), {"input_features": torch.randn(batch, 16, size, generator=generator), "decoder_input_ids": ids}


def _make_image_and_text(
    generator: torch.Generator, size: int, other: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {**_make_text(generator, size, other)[1], **_make_pixels(generator, size, other)[1]}


INPUTS: dict[str, Callable[[torch.Generator, int, bool], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "image": _make_image,
    "pixels": _make_pixels,
    "text": _make_text,
    "tokens": _make_tokens,
    "pair": _make_pair,
    "sound": _make_sound,
    "spectrum": _make_spectrum,
    "image and text": _make_image_and_text,
}

# ------------------------------------------------------------------------------------------------ models


def _of_transformers(name: str, call: str, settings: Mapping[str, Any], size: int = 32, **more: Any) -> ZooModel:
    return ZooModel("transformers", name, {**settings, **more}, call, size)


_CLIP_TEXT = {**_TEXT, "projection_dim": 32, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}

DECODERS = (
    _of_transformers("LlamaForCausalLM", "text", _GROUPED),
    _of_transformers("MistralForCausalLM", "text", _GROUPED, sliding_window=4),
    _of_transformers("Qwen2ForCausalLM", "text", _GROUPED),
    _of_transformers("Qwen3ForCausalLM", "text", _GROUPED),
    _of_transformers("Gemma2ForCausalLM", "text", _GROUPED, sliding_window=4),
    _of_transformers("Phi3ForCausalLM", "text", _GROUPED, pad_token_id=0),
    _of_transformers("OPTForCausalLM", "text", _TEXT, ffn_dim=128, word_embed_proj_dim=64),
    _of_transformers(
        "GPT2LMHeadModel", "text", {}, n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=64
    ),
    _of_transformers("GPTNeoXForCausalLM", "text", _TEXT),
    _of_transformers("BloomForCausalLM", "text", {}, hidden_size=64, n_layer=2, n_head=4, vocab_size=VOCABULARY),
    _of_transformers("FalconForCausalLM", "text", _TEXT),
    _of_transformers("MixtralForCausalLM", "text", _GROUPED, num_local_experts=4),
    _of_transformers("MambaForCausalLM", "tokens", {}, hidden_size=64, num_hidden_layers=2, vocab_size=VOCABULARY),
)
ENCODERS = (
    _of_transformers("BertForSequenceClassification", "text", _TEXT),
    _of_transformers("RobertaForMaskedLM", "text", _TEXT),
    _of_transformers(
        "DistilBertForSequenceClassification", "text", {},
        dim=64, hidden_dim=128, n_layers=2, n_heads=4, vocab_size=VOCABULARY, max_position_embeddings=64,
    ),
    _of_transformers("AlbertForMaskedLM", "text", _TEXT, embedding_size=32),
    _of_transformers("ElectraForPreTraining", "text", _TEXT, embedding_size=32),
    _of_transformers(
        "DebertaV2ForSequenceClassification", "text", _TEXT,
        relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"], share_att_key=True,
    ),
    _of_transformers("MPNetModel", "text", _TEXT),
    _of_transformers(
        "ModernBertForMaskedLM", "text", _TEXT, num_hidden_layers=4, pad_token_id=0, local_attention=6,
    ),
)  # fmt: skip
PAIRS = (
    _of_transformers(
        "T5ForConditionalGeneration", "pair", {}, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        vocab_size=VOCABULARY, decoder_start_token_id=0,
    ),
    _of_transformers("BartForConditionalGeneration", "pair", _ENCODER_DECODER),
    _of_transformers("MarianMTModel", "pair", _ENCODER_DECODER),
    _of_transformers("M2M100ForConditionalGeneration", "pair", _ENCODER_DECODER),
)  # fmt: skip
SPEECH = (
    _of_transformers(
        "WhisperForConditionalGeneration", "spectrum", _ENCODER_DECODER, 40,
        num_mel_bins=16, max_source_positions=20, max_target_positions=32,
    ),
    _of_transformers("Wav2Vec2ForCTC", "sound", _SPEECH, 800),
    _of_transformers("HubertModel", "sound", _SPEECH, 800),
)  # fmt: skip
VISION = (
    _of_transformers("ViTForImageClassification", "pixels", _VISION),
    _of_transformers("DeiTForImageClassificationWithTeacher", "pixels", _VISION),
    _of_transformers("BeitForImageClassification", "pixels", _VISION, use_relative_position_bias=True),
    _of_transformers(
        "SwinForImageClassification", "pixels", {}, image_size=32, patch_size=2, embed_dim=32, depths=[2, 2],
        num_heads=[2, 4], window_size=4,
    ),
    _of_transformers("Dinov2ForImageClassification", "pixels", _VISION),
    _of_transformers(
        "CLIPModel", "image and text", {}, projection_dim=32, text_config=("CLIPTextConfig", _CLIP_TEXT),
        vision_config=("CLIPVisionConfig", {**_VISION, "projection_dim": 32}),
    ),
    _of_transformers(
        "SiglipModel", "image and text", {}, text_config=("SiglipTextConfig", {**_TEXT, "projection_size": 64}),
        vision_config=("SiglipVisionConfig", _VISION),
    ),
    _of_transformers(
        "SegformerForSemanticSegmentation", "pixels", {}, 64, depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 64, 64],
        num_attention_heads=[1, 2, 4, 4], decoder_hidden_size=64,
    ),
    _of_transformers(
        "DetrForObjectDetection", "pixels", {}, 64, use_timm_backbone=False, use_pretrained_backbone=False,
        backbone=None, d_model=64, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=128, decoder_ffn_dim=128,
        encoder_attention_heads=4, decoder_attention_heads=4, num_queries=9,
        backbone_config=(
            "ResNetConfig",
            {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1], "layer_type": "basic",
             "out_features": ["stage4"]},
        ),
    ),
)  # fmt: skip

_NARROW = {"embed_dim": 64, "depth": 2, "num_heads": 4}

TIMM = (
    ZooModel("timm", "resnet18"),
    ZooModel("timm", "resnext26ts"),
    ZooModel("timm", "regnety_002"),
    ZooModel("timm", "efficientnet_b0"),
    ZooModel("timm", "mobilenetv3_small_050"),
    ZooModel("timm", "convnext_atto"),
    ZooModel("timm", "densenet121"),
    ZooModel("timm", "vgg11_bn", {"features_only": True}),
    ZooModel("timm", "inception_v3", size=96),
    ZooModel("timm", "vit_tiny_patch16_224", {**_NARROW, "img_size": 64}),
    ZooModel("timm", "deit_tiny_distilled_patch16_224", {**_NARROW, "img_size": 64}),
    ZooModel(
        "timm", "swin_tiny_patch4_window7_224",
        {"embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4), "img_size": 56},
        size=56,
    ),
    ZooModel("timm", "beit_base_patch16_224", {**_NARROW, "img_size": 64}),
    ZooModel("timm", "eva02_tiny_patch14_224", {**_NARROW, "img_size": 56}, size=56),
    ZooModel("timm", "mixer_s32_224", {"img_size": 64}),
    ZooModel("timm", "maxvit_rmlp_pico_rw_256", {"img_size": 64}),
    ZooModel("timm", "levit_128s", {"img_size": 64}),
    ZooModel("timm", "edgenext_xx_small"),
    ZooModel("timm", "test_nfnet"),
    ZooModel("timm", "ghostnet_050"),
    ZooModel("timm", "repvgg_a0"),
    ZooModel("timm", "mobilevit_xxs"),
    ZooModel("timm", "hrnet_w18_small"),
)  # fmt: skip

MODELS = (*DECODERS, *ENCODERS, *PAIRS, *SPEECH, *VISION, *TIMM)
