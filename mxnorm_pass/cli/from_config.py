"""A transformers model on the meta device from its ``config.json``: real sizes, no weights."""

from __future__ import annotations

import copy
import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mxnorm_pass.cli.errors import ModelError, UsageError, brief

META = torch.device("meta")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Built:
    """A model without weights.

    Attributes:
        model: on the meta device.
        config: what it was built from, defaults filled in.
        notes: what the file says and the model here does not follow.
    """

    model: nn.Module
    config: Any
    notes: list[str] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(p.numel() for p in self.model.parameters())


def read_config(path: Path) -> dict[str, Any]:
    """The file's content; UsageError where it is no transformers configuration."""
    if path.is_dir():
        path = path / "config.json"
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {path}: not a text file") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"--config {path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: expected a JSON object, found {type(content).__name__}")
    if not isinstance(content.get("model_type"), str):
        raise UsageError(
            f'--config {path}: no "model_type"; expected the config.json of a transformers model'
        )
    return content


def build(content: dict[str, Any], dtype: torch.dtype) -> Built:
    """Build the model that a configuration describes.

    The class is the first of ``architectures`` that transformers has, else the causal LM of the
    model type, else its base model. Parameters are on the meta device in ``dtype``.

    Raises:
        UsageError: for a model type that transformers does not have (code beside the checkpoint is
            not run).
        ModelError: where transformers cannot build it.
    """
    transformers = _transformers()
    values = dict(content)
    notes = []
    model_type = values.pop("model_type")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if model_type not in known:
        remote = "auto_map" in values
        code = "; it names code of its own (auto_map), which is not run" if remote else ""
        raise UsageError(
            f"model_type {model_type!r} is none of the {len(list(known))} that transformers "
            f"{transformers.__version__} has{_similar(model_type, known)}{code}. For such a model "
            "write a function that returns (model, inputs): mxnorm explain script.py:function"
        )
    stored = values.pop("quantization_config", None)
    if isinstance(stored, dict):
        method = stored.get("quant_method", "?")
        notes.append(
            f"the checkpoint is stored quantised ({method}); here its weights are plain, and the "
            "linears of the layers get the casts asked for"
        )
    values.pop("auto_map", None)
    if values.get("num_nextn_predict_layers"):
        notes.append(
            f"num_nextn_predict_layers {values['num_nextn_predict_layers']}: transformers' class "
            "has no such layers, so they are not counted"
        )
    try:
        config = transformers.AutoConfig.for_model(model_type, **values)
    except Exception as error:
        raise UsageError(f"transformers refuses the configuration: {brief(error)}") from error
    cls = _model_class(transformers, config, values.get("architectures"))
    return Built(_make(cls, config, dtype), config, notes)


def _transformers() -> Any:
    try:
        import transformers
        import transformers.models.auto.configuration_auto
    except ImportError as error:
        raise ModelError(
            "--config needs the package transformers (pip install transformers)"
        ) from (error)
    transformers.logging.set_verbosity_error()
    return transformers


def _similar(name: str, known: Any) -> str:
    import difflib

    close = difflib.get_close_matches(name, list(known), 3, 0.7)
    return f" (near: {', '.join(close)})" if close else ""


def _model_class(transformers: Any, config: Any, architectures: Any) -> Any:
    for name in architectures if isinstance(architectures, list) else []:
        cls = getattr(transformers, str(name), None)
        if inspect.isclass(cls) and issubclass(cls, transformers.PreTrainedModel):
            return cls
    auto = transformers.models.auto.modeling_auto
    for mapping in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        auto.MODEL_MAPPING,
    ):
        if type(config) in mapping:
            cls = mapping[type(config)]
            return cls[0] if isinstance(cls, (list, tuple)) else cls
    raise UsageError(f"transformers has a configuration but no model for {config.model_type!r}")


def _make(cls: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    failed: Exception | None = None
    for attention in ("sdpa", "eager", None):
        kwargs = {"attn_implementation": attention} if attention else {}
        try:
            with META:
                # Construction writes to the configuration.
                model = cls._from_config(copy.deepcopy(config), dtype=dtype, **kwargs)
        except Exception as error:
            # Some models have one implementation of attention only.
            failed = failed or error
        else:
            assert isinstance(model, nn.Module)
            return model
    assert failed is not None
    raise ModelError(f"{cls.__name__} cannot be built: {brief(failed)}") from failed


def longest(config: Any) -> int | None:
    """``max_position_embeddings`` of the (text) model; None where it has no such limit."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def make_inputs(built: Built, batch: int, seq: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Inputs on the meta device by the names of the forward's parameters, the least first.

    Tokens ``[batch, seq]`` int64 for whatever takes tokens, alone and with images; else images
    ``[batch, C, H, W]``, spectra or sound.

    Raises:
        ModelError: for a forward whose inputs are not known here.
    """
    names = inspect.signature(built.model.forward).parameters
    config = built.config
    tokens = torch.zeros(batch, seq, dtype=torch.int64, device=META)
    rest: dict[str, Any] = {}
    if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
        rest["decoder_input_ids"] = tokens
    if "use_cache" in names:
        rest["use_cache"] = False
    choices: list[dict[str, Any]] = []
    if "input_ids" in names:
        choices.append({"input_ids": tokens, **rest})
    if "pixel_values" in names:
        before = choices[-1] if choices else rest
        choices.append({**before, "pixel_values": _pixels(config, batch, dtype)})
    elif "input_features" in names and not choices:
        mels = int(getattr(config, "num_mel_bins", None) or 80)
        length = 2 * int(getattr(config, "max_source_positions", None) or seq)
        choices.append({"input_features": _features(dtype, batch, mels, length), **rest})
    elif "input_values" in names and not choices:
        choices.append({"input_values": _features(dtype, batch, 16000), **rest})
    if not choices:
        raise ModelError(
            f"{type(built.model).__name__} takes ({', '.join(names)}), for which no inputs are "
            "known here; write a function that returns (model, inputs) and use "
            "mxnorm explain script.py:function"
        )
    return choices


def _features(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _pixels(config: Any, batch: int, dtype: torch.dtype) -> Tensor:
    vision = getattr(config, "vision_config", config)
    channels = getattr(vision, "num_channels", None) or 3
    size = getattr(vision, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return _features(dtype, batch, channels, height, width)
