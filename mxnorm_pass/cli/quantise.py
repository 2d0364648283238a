"""Which linears of a model get MX casts, and torchao's casts on them, in emulation."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mxnorm_pass.cli.errors import ModelError, UsageError, brief
from mxnorm_pass.compat import TORCH_VERSION


@dataclass(frozen=True)
class Format:
    """A format by its name on the command line.

    Attributes:
        element: torchao's name of the element dtype; None for NVFP4.
        bits: bits per element.
        block: elements per scale.
    """

    name: str
    element: Any
    bits: int
    block: int = 32


FORMATS = {
    f.name: f
    for f in (
        Format("mxfp8", torch.float8_e4m3fn, 8),
        Format("mxfp8_e5m2", torch.float8_e5m2, 8),
        Format("mxfp6_e2m3", "fp6_e2m3", 6),
        Format("mxfp6_e3m2", "fp6_e3m2", 6),
        Format("mxfp4", torch.float4_e2m1fn_x2, 4),
        Format("nvfp4", None, 4, 16),
    )
}
_NUMBERED = re.compile(r"(^|\.)\d+\.")
_ROUTER = re.compile(r"(^|\.)(gate|router)$|router", re.IGNORECASE)
_EXPERTS = re.compile(r"^(n_routed|num|num_local|moe_num)_experts$")


def check(fmt: Format, training: bool, dtype: torch.dtype, rows: int) -> None:
    """UsageError for what torchao has no emulation of, naming what is allowed."""
    if training and fmt.name == "nvfp4":
        allowed = ", ".join(n for n in FORMATS if n != "nvfp4")
        raise UsageError(
            "--format nvfp4 --train: torchao's NVFP4 training linear has no emulation, and rotates "
            "the rows in front of the cast, which the pass declines (rotated); allowed with "
            f"--train: {allowed}. For a cast of your own use mxnorm explain script.py:function"
        )
    if not training and dtype is not torch.bfloat16:
        raise UsageError(
            "--dtype fp32 --infer: torchao's MX inference takes bfloat16 weights; allowed with "
            "--infer: bf16"
        )
    if training and rows % fmt.block:
        raise UsageError(
            f"--train with {rows} tokens: the weight's gradient is a product of casts along the "
            f"tokens, so their number has to be a multiple of {fmt.block}"
        )


@dataclass(frozen=True)
class Verdict:
    """Whether a linear is quantised; ``why`` not."""

    chosen: bool
    why: str = ""


class Chooser:
    """The rule: every ``nn.Linear`` of the layers but routers; what lies outside stays.

    Args:
        config: the model's configuration, for its number of experts.
        fmt: the format, for its block size.
        skip: module-path globs of linears that stay.
        also: module-path globs of linears that are quantised though they lie outside the layers
            or look like a router.
    """

    def __init__(
        self, config: Any, fmt: Format, skip: Sequence[str] = (), also: Sequence[str] = ()
    ) -> None:
        self.block = fmt.block
        self.skip, self.also = tuple(skip), tuple(also)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.experts = {
            value
            for name, value in vars(text).items()
            if _EXPERTS.match(name) and isinstance(value, int)
        }
        self.used: set[str] = set()
        """Globs that matched something."""

    def __call__(self, path: str, linear: nn.Linear) -> Verdict:
        """What becomes of the linear at ``path``."""
        odd = linear.in_features % self.block or linear.out_features % self.block
        size = f"{linear.in_features} -> {linear.out_features}"
        if self._hit(path, self.skip):
            return Verdict(False, "--skip")
        if odd and self._hit(path, self.also):
            return Verdict(False, f"{size} is not in whole blocks of {self.block}")
        if self._hit(path, self.also):
            return Verdict(True)
        if not _NUMBERED.search(path):
            return Verdict(False, "outside the layers (a head, or a projection between parts)")
        if _ROUTER.search(path) and linear.out_features in self.experts:
            return Verdict(False, "a router")
        if odd:
            return Verdict(False, f"{size} is not in whole blocks of {self.block}")
        return Verdict(True)

    def _hit(self, path: str, globs: tuple[str, ...]) -> bool:
        found = [g for g in globs if fnmatch.fnmatchcase(path, g)]
        self.used.update(found)
        return bool(found)

    @property
    def unused(self) -> list[str]:
        """Globs that matched no linear: a typing error, most likely."""
        return [g for g in (*self.skip, *self.also) if g not in self.used]


def quantise_(model: nn.Module, paths: Sequence[str], fmt: Format, training: bool) -> str:
    """Put torchao's casts (RCEIL, emulated) on the linears named, in place; says which.

    Raises:
        ModelError: where torchao refuses.
    """
    try:
        if training:
            return _training_(model, set(paths), fmt)
        return _inference_(model, set(paths), fmt)
    except Exception as error:
        raise ModelError(f"torchao cannot quantise this model: {brief(error)}") from error


def _replace_(model: nn.Module, paths: set[str], make: Callable[[nn.Linear], nn.Module]) -> None:
    for path in paths:
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, name, make(getattr(owner, name)))


def _training_(model: nn.Module, paths: set[str], fmt: Format) -> str:
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.quantization import quantize_

    if fmt.name == "mxfp8" and TORCH_VERSION >= (2, 12):
        recipe = MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL
        quantize_(
            model,
            MXFP8TrainingOpConfig.from_recipe(recipe),
            filter_fn=lambda module, name: name in paths,
        )
        return "torchao MXFP8TrainingOpConfig, emulated, RCEIL"
    _replace_(model, paths, lambda linear: MXTrainingLinear(linear, fmt.element))
    return f"torchao mx_mm on {fmt.name}, emulated, RCEIL (no quantize_ recipe has this format)"


class MXTrainingLinear(nn.Module):
    """torchao's training matmul ``mx_mm``, all three products of casts, for any element dtype.

    Shares the parameters of the linear it takes the place of; ``[..., K] -> [..., N]``.
    """

    def __init__(self, linear: nn.Linear, element: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.element = element

    def forward(self, x: Tensor) -> Tensor:
        """``cast(x) @ cast(W)^T + bias``."""
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
        from torchao.prototype.mx_formats.config import (
            MXFP8Dim0CastKernelChoice,
            MXFP8Dim1CastKernelChoice,
            ScaleCalculationMode,
        )
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        e = self.element
        y: Tensor = mx_mm.apply(
            x,
            self.weight,
            e,
            e,
            e,
            32,
            KernelPreference.EMULATED,
            MXFP8Dim0CastKernelChoice.TRITON,
            MXFP8Dim1CastKernelChoice.TORCH,
            ScaleCalculationMode.RCEIL,
            False,
        )
        return y if self.bias is None else y + self.bias


def _inference_(model: nn.Module, paths: set[str], fmt: Format) -> str:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.inference_workflow import MXDynamicActivationMXWeightConfig
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    if fmt.name == "nvfp4":
        for path in paths:
            _nvfp4_(model.get_submodule(path))
        said = "torchao NVFP4Tensor, dynamic per-tensor scale, as its NVFP4 config makes them"
    else:
        config = MXDynamicActivationMXWeightConfig(
            activation_dtype=fmt.element,
            weight_dtype=fmt.element,
            kernel_preference=KernelPreference.EMULATED,
            scaling_mode=ScaleCalculationMode.RCEIL,
        )
        quantize_(model, config, filter_fn=lambda module, name: name in paths)
        said = "torchao MXDynamicActivationMXWeightConfig, emulated, RCEIL"
    model.requires_grad_(False)
    return said


def _nvfp4_(linear: Any) -> None:
    """What NVFP4DynamicActivationNVFP4WeightConfig does, without its demand for sm_100."""
    from torchao.prototype.mx_formats.nvfp4_tensor import (
        NVFP4Tensor,
        QuantizeTensorToNVFP4Kwargs,
        per_tensor_amax_to_scale,
    )

    weight = linear.weight.detach()
    quantised = NVFP4Tensor.to_nvfp4(
        weight,
        per_tensor_scale=per_tensor_amax_to_scale(weight.abs().max()),
        is_swizzled_scales=True,
        use_triton_kernel=False,
        act_quant_kwargs=QuantizeTensorToNVFP4Kwargs(
            use_dynamic_per_tensor_scale=True,
            use_triton_kernel=False,
            is_swizzled_scales=True,
        ),
    )
    linear.weight = nn.Parameter(quantised, requires_grad=False)
