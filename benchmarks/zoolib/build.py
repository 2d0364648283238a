"""A tiny model of an architecture and inputs for it, both from a seed."""

from __future__ import annotations

import copy
import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoolib import names, shrink
from zoolib.inputs import FIRST_SPECIAL, INPUTS, ROWS, features, tokens
from zoolib.overrides import OVERRIDES

_NORM = re.compile(r"norm|(^|[._])ln(_|\d|$)", re.IGNORECASE)


@dataclass
class Built:
    """A model and what it is called with."""

    model: nn.Module
    inputs: dict[str, Any]

    @property
    def cls(self) -> str:
        """Name of the class that was built."""
        return type(self.model).__name__


def build(model_type: str, seed: int = 0) -> Built:
    """The tiny model of an architecture in bfloat16, its norms' gains perturbed, and inputs."""
    torch.manual_seed(seed)
    cls = names.model_class(model_type)
    override = dict(OVERRIDES.get(model_type, {}))
    for part, nested in names.sub_configs(model_type).items():
        known = OVERRIDES.get(getattr(nested, "model_type", ""))
        if known:
            override.setdefault(part, known)
    config = shrink.make_config(names.config_class(model_type), override, names.mrope(model_type))
    model = make_model(cls, config)
    perturb_(model)
    torch.manual_seed(seed + 1)
    make = INPUTS.get(model_type)
    return Built(model, make(config) if make else default_inputs(model, config))


def make_model(cls: Any, config: Any) -> nn.Module:
    """A model from its configuration; attention in plain operations where it has a choice."""
    error: Exception | None = None
    for attention in ("eager", "sdpa", None):
        kwargs = {"attn_implementation": attention} if attention else {}
        try:
            # Construction writes to the configuration.
            model = cls._from_config(copy.deepcopy(config), dtype=torch.bfloat16, **kwargs)
        except Exception as failed:
            error = error or failed
        else:
            assert isinstance(model, nn.Module)
            return model
    assert error is not None
    raise error


def perturb_(model: nn.Module) -> None:
    """No gain of a norm stays 1 (or 0, where it is added to 1), and no bias of one stays 0.

    Centred norms too: without a bias, on rows that are centred already, one would do what an
    RMSNorm does. Linears get outputs of the size of their inputs: a gate of weights as small as
    models begin with is a constant, and a gated norm then a plain one. Tables of one number
    (latents that begin as ones) get rows that differ, or nobody could tell which row is whose.
    """
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1 and p.is_floating_point() and bool((p == p.flatten()[0]).all()):
                p.add_(0.3 * torch.randn(p.shape))
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.weight.is_floating_point():
                size = module.weight.float().std() * module.in_features**0.5
                if 0 < size < 0.5:
                    module.weight.div_(size)
        for path, module in model.named_modules():
            normish = _NORM.search(type(module).__name__) or _NORM.search(path.rpartition(".")[2])
            for name, p in module.named_parameters(recurse=False):
                if not (normish or _NORM.search(name)) or p.dim() > 2 or not p.is_floating_point():
                    continue
                if p.dim() == 2 and isinstance(module, (nn.Linear, nn.Embedding)):
                    continue
                noise = 0.3 * torch.randn(p.shape)
                p.copy_(p.float() * (1 + noise) if p.float().mean().abs() > 0.5 else p + noise)


def default_inputs(model: nn.Module, config: Any) -> dict[str, Any]:
    """Tokens, pixels or features, by the names of the forward's parameters."""
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    if "input_ids" in parameters:
        known = min(FIRST_SPECIAL, getattr(config, "vocab_size", None) or FIRST_SPECIAL)
        inputs: dict[str, Any] = {"input_ids": tokens(high=known)}
        if "decoder_input_ids" in parameters and getattr(config, "is_encoder_decoder", True):
            inputs["decoder_input_ids"] = tokens(high=known)
        if "pixel_values" in parameters and main == "pixel_values":
            inputs["pixel_values"] = pixels(config, batch=1)
    elif "grid_thw" in parameters or "image_grid_thw" in parameters:
        inputs = packed_patches(config, parameters)
    elif "pixel_values" in parameters:
        inputs = {"pixel_values": pixels(config)}
    elif "inputs_embeds" in parameters:
        inputs = {"inputs_embeds": features(1, ROWS, config.hidden_size)}
    elif "hidden_states" in parameters:
        inputs = {"hidden_states": features(1, ROWS, config.hidden_size)}
    elif "input_features" in parameters:
        mels = int(getattr(config, "num_mel_bins", None) or 32)
        inputs = {"input_features": features(1, mels, 2 * ROWS)}
    else:
        raise LookupError(f"no inputs for forward({', '.join(parameters)})")
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    return inputs


def pixels(config: Any, batch: int = ROWS) -> Tensor:
    """A batch of images, so large that rows come in multiples of 32 whatever a class token adds."""
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    size = getattr(config, "image_size", None) or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return features(batch, channels, height, width)


def packed_patches(config: Any, parameters: Any) -> dict[str, Any]:
    """One image as rows of flattened patches and its grid, as Qwen2-VL takes them."""
    name = next(n for n in ("hidden_states", "pixel_values") if n in parameters)
    grid = "grid_thw" if "grid_thw" in parameters else "image_grid_thw"
    channels = getattr(config, "in_channels", None) or getattr(config, "num_channels", None) or 3
    temporal = getattr(config, "temporal_patch_size", getattr(config, "patch_temporal", None)) or 1
    patch = config.patch_size
    return {
        name: features(64, channels * temporal * patch**2),
        grid: torch.tensor([[1, 8, 8]]),
    }
