"""Inputs of the models whose forward takes something else than tokens or images.

By model type: a function of the configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Rows, a multiple of the MX block.
ROWS = 32
# Random tokens are drawn from 8 on and below this; special tokens stand above.
FIRST_SPECIAL = 100


def tokens(rows: int = 1, length: int = ROWS, high: int = FIRST_SPECIAL) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(min(8, high // 2), high, (rows, length))


def features(*shape: int) -> Tensor:
    """Gaussian features."""
    return torch.randn(shape).to(torch.bfloat16)


def _embeds(config: Any) -> dict[str, Any]:
    return {"inputs_embeds": features(1, ROWS, config.hidden_size)}


def _flattened(config: Any) -> dict[str, Any]:
    """Patches that begin with their row and column, as Pix2Struct takes them."""
    patches = features(1, ROWS, 2 + config.patch_embed_hidden_size)
    patches[..., 0] = torch.arange(ROWS) // 8 + 1
    patches[..., 1] = torch.arange(ROWS) % 8 + 1
    return {"flattened_patches": patches}


def _positions(config: Any) -> dict[str, Any]:
    # A square whose side the pooling window divides.
    count = 36
    grid = torch.stack([torch.arange(count) % 6, torch.arange(count) // 6], -1)
    patches = features(ROWS, count, 3 * config.patch_size**2)
    return {"pixel_values": patches, "pixel_position_ids": grid.expand(ROWS, -1, -1).clone()}


def _cross(config: Any) -> dict[str, Any]:
    return {
        "input_ids": tokens(),
        "encoder_hidden_states": features(1, ROWS, config.hidden_size),
        "use_cache": False,
    }


def _series(config: Any) -> dict[str, Any]:
    length = config.patch_length * ROWS
    return {
        "past_values": torch.randn(1, length).to(torch.bfloat16),
        "past_values_padding": torch.zeros(1, length, dtype=torch.long),
    }


INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "csm_depth_decoder_model": lambda c: {"input_ids": tokens(ROWS, 4, 32), "use_cache": False},
    "deepseek_ocr2_encoder": lambda c: {**_embeds(c), "num_patches": 16},
    "dia_decoder": lambda c: {
        "input_ids": torch.stack([tokens() for _ in range(c.num_channels)], -1),
        "encoder_hidden_states": features(1, ROWS, c.cross_hidden_size),
        "use_cache": False,
    },
    "gemma3n_audio": lambda c: {
        "audio_mel": features(1, 128, c.input_feat_size),
        "audio_mel_mask": torch.zeros(1, 128, dtype=torch.bool),
    },
    "gemma4_audio": lambda c: {
        "input_features": features(1, 128, 128),
        "attention_mask": torch.ones(1, 128, dtype=torch.bool),
    },
    "gemma4_vision": _positions,
    "idefics2_perceiver": lambda c: {
        "context": features(1, ROWS, c.hidden_size),
        "attention_mask": torch.ones(1, ROWS, dtype=torch.bool),
    },
    "inkling_audio": lambda c: {
        "audio_input_ids": torch.randint(0, 8, (1, ROWS, c.n_mel_bins)),
    },
    "inkling_vision": lambda c: {
        "pixel_values": features(ROWS, c.temporal_patch_size, c.patch_size, c.patch_size, 3)
    },
    "dots3_note_audio_encoder": lambda c: {
        "input_features": features(1, c.feature_size, 256),
        "chunk_sample_lengths": torch.tensor([256 * c.hop_length]),
    },
    "kosmos_2_5_vision_model": _flattened,
    "moshi_depth": lambda c: {
        "input_ids": tokens(ROWS, 4, 32),
        "last_hidden_state": features(ROWS, 1, c.input_size),
        "use_cache": False,
    },
    "muse_glimmer_assistant": lambda c: {
        "noise_embeds": features(1, ROWS, c.hidden_size),
        "context_hidden_states": features(1, ROWS, c.hidden_size * len(c.target_layer_ids)),
        "position_ids": torch.arange(2 * ROWS)[None],
        "attention_mask": torch.ones(1, 2 * ROWS, dtype=torch.long),
        "use_cache": False,
    },
    "muse_spark_audio": lambda c: {"input_values": features(1, c.samples_per_token * ROWS)},
    "paddleocr_vl_vision": lambda c: {
        "pixel_values": features(1, 64, 3, c.patch_size, c.patch_size),
        "image_grid_thw": torch.tensor([[1, 8, 8]]),
    },
    "pix2struct_vision_model": _flattened,
    "qwen3_omni_moe_talker_code_predictor": _embeds,
    "qwen3_omni_moe_talker_text": _embeds,
    "t5gemma2_decoder": _cross,
    "timesfm": lambda c: {**_series(c), "freq": torch.zeros(1, 1, dtype=torch.long)},
    "timesfm2_5": _series,
    "udop": lambda c: {
        "input_ids": tokens(),
        "bbox": torch.rand(1, ROWS, 4).sort(-1).values,
        "decoder_input_ids": tokens(),
        "use_cache": False,
    },
    "vibevoice_acoustic_tokenizer_encoder": lambda c: {"hidden_states": features(1, 1, 3200 * 2)},
    "vibevoice_acoustic_tokenizer_decoder": lambda c: {
        "hidden_states": features(1, c.hidden_size, ROWS),
    },
    "voxtral_realtime_text": lambda c: {
        "input_ids": tokens(),
        "t_cond": features(1, 1, c.hidden_size),
        "use_cache": False,
    },
}
