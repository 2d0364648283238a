"""Which linears are quantised, and how, for inference and for training."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.inference_workflow import MXDynamicActivationMXWeightConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

BLOCK = 32
HAS_WRAPPER = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
"""torchao's weight wrapper for training needs torch 2.12; before, linears are replaced."""
_LAYER = re.compile(r"(^|\.)\d+\.")
_NEVER = re.compile(r"(^|\.)(router|lm_head|score|classifier)(\.|$)")


def eligible(path: str, linear: nn.Linear) -> bool:
    """Inside a list of layers, no router and no head, and whole blocks both ways.

    Routers called ``gate`` have one output per expert; there are four, which is no whole block.
    """
    inside = _LAYER.search(path) is not None and not _NEVER.search(path)
    return inside and linear.in_features % BLOCK == 0 and linear.out_features % BLOCK == 0


class _Rows(TorchFunctionMode):
    """Rows that each weight is multiplied with, in a forward."""

    def __init__(self) -> None:
        self.rows: dict[int, set[int]] = defaultdict(set)
        self.strided: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear:
            x = args[0] if args else kwargs["input"]
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            self.rows[id(weight)].add(x.numel() // x.shape[-1])
            if not x.is_contiguous():
                self.strided.add(id(weight))
        return func(*args, **kwargs)


def select(
    model: nn.Module, inputs: dict[str, Any], training: bool, contiguous: bool = False
) -> list[str]:
    """Paths of the linears to quantise: eligible ones that this forward uses.

    In training their rows have to come in whole blocks too, since the weight's gradient is a
    product of casts along the rows. ``contiguous`` leaves out those whose input is not.
    """
    with torch.no_grad(), _Rows() as seen:
        model(**inputs)
    chosen = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not eligible(path, module):
            continue
        weight = id(module.weight)
        rows = seen.rows.get(weight, set())
        if not rows or (contiguous and weight in seen.strided):
            continue
        if not (training and any(r % BLOCK for r in rows)):
            chosen.append(path)
    return chosen


def _mxfp8(linear: nn.Linear) -> MXFP8Linear:
    """The same linear, same parameters, as torchao's training module."""
    new = MXFP8Linear(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        kernel_preference=KernelPreference.EMULATED,
        device="meta",
    )
    new.weight, new.bias = linear.weight, linear.bias
    return new


def quantise_(model: nn.Module, paths: list[str], training: bool) -> None:
    """MXFP8 (e4m3, RCEIL, emulated) of torchao on the linears named, in place."""
    wanted = set(paths)
    config: Any
    if training and not HAS_WRAPPER:
        for path in wanted:
            parent, _, name = path.rpartition(".")
            owner = model.get_submodule(parent)
            setattr(owner, name, _mxfp8(getattr(owner, name)))
        return
    if training:
        config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    else:
        config = MXDynamicActivationMXWeightConfig(
            kernel_preference=KernelPreference.EMULATED,
            scaling_mode=ScaleCalculationMode.RCEIL,
            activation_dtype=torch.float8_e4m3fn,
            weight_dtype=torch.float8_e4m3fn,
        )
    quantize_(model, config, filter_fn=lambda module, name: name in wanted)
    if not training:
        model.requires_grad_(False)
