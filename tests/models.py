"""Small models that put a norm of every form before MX linears of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear, mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.prototype.mx_formats.inference_workflow import MXDynamicActivationMXWeightConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from mxnorm_pass.compat import TORCH_VERSION

EMULATED = KernelPreference.EMULATED
HAS_WEIGHT_WRAPPER = TORCH_VERSION >= (2, 12)


class Norm(nn.Module):
    """An RMSNorm whose form is a function of (x, weight, eps)."""

    def __init__(self, form: Callable[..., Tensor], k: int, eps: float = 1e-6, gain: bool = True):
        super().__init__()
        self.form, self.eps = form, eps
        self.weight = nn.Parameter(torch.ones(k)) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, self.weight, self.eps)


def torch_form(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, eps)


def llama_form(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return w * h.to(x.dtype)


def olmo2_form(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (w * h).to(x.dtype)


def gemma_form(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * (1.0 + w.float())).type_as(x)


def gemma4_form(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.pow(h.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    return (h * w.float()).type_as(x)


def t5_form(x: Tensor, w: Tensor, eps: float) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    h = x * torch.rsqrt(variance + eps)
    if w.dtype in (torch.float16, torch.bfloat16):
        h = h.to(w.dtype)
    return w * h


def bare_form(x: Tensor, w: None, eps: float) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def reciprocal_sqrt_form(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return ((1 / torch.sqrt(h.square().mean(-1, keepdim=True) + eps)) * h * w.float()).to(x.dtype)


def sqrt_division_form(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h / torch.sqrt((h * h).mean(-1, keepdim=True) + eps)
    return (h * w.float()).to(x.dtype)


def sum_over_k_form(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt((h * h).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return w * h.to(x.dtype)


def no_keepdim_form(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1) + eps).unsqueeze(-1)
    return w * h.to(x.dtype)


FORMS: dict[str, Callable[..., Tensor]] = {
    "torch": torch_form,
    "llama": llama_form,
    "olmo2": olmo2_form,
    "gemma": gemma_form,
    "gemma4": gemma4_form,
    "t5": t5_form,
    "bare": bare_form,
    "reciprocal_sqrt": reciprocal_sqrt_form,
    "sqrt_division": sqrt_division_form,
    "sum_over_k": sum_over_k_form,
    "no_keepdim": no_keepdim_form,
}
# What x * rstd is rounded to before the gain, with a bfloat16 row and gain.
NORM_DTYPES = {
    name: torch.bfloat16 if name in ("llama", "t5", "sum_over_k", "no_keepdim") else torch.float32
    for name in FORMS
}


class AutogradMXLinear(nn.Linear):
    """torchao's training matmul with any element dtype and scale mode."""

    def __init__(self, k: int, n: int, element: torch.dtype, mode: ScaleCalculationMode):
        super().__init__(k, n, bias=False)
        self.element, self.mode = element, mode

    def forward(self, x: Tensor) -> Tensor:
        e = self.element
        dim0, dim1 = MXFP8Dim0CastKernelChoice.TRITON, MXFP8Dim1CastKernelChoice.TORCH
        return mx_mm.apply(x, self.weight, e, e, e, 32, EMULATED, dim0, dim1, self.mode, False)


class Block(nn.Module):
    """norm -> n linears; the residual stream and every output are returned."""

    def __init__(self, norm: nn.Module, linears: list[nn.Module]):
        super().__init__()
        self.norm = norm
        self.linears = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.norm(x)
        return tuple(linear(y) for linear in self.linears)


def make_norm(form: str, k: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A norm with gains 1 + .3 N(0, 1) (around 0 for Gemma, whose gain is 1 + w)."""
    norm = Norm(FORMS[form], k, gain=form != "bare").to(dtype)
    if norm.weight is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            w = 0.3 * torch.randn(k, generator=generator)
            norm.weight.copy_(w if form == "gemma" else 1 + w)
    return norm


def training_block(
    form: str, k: int = 128, widths: tuple[int, ...] = (64, 96), seed: int = 0, linear: Any = None
) -> Block:
    """A norm of the given form before torchao's MXFP8Linear (or ``linear(k, n)``)."""
    torch.manual_seed(seed)
    make = linear or (lambda k, n: MXFP8Linear(k, n, bias=False, kernel_preference=EMULATED))
    linears = [make(k, n).to(torch.bfloat16) for n in widths]
    return Block(make_norm(form, k, seed), linears)


def wrap_training_(model: nn.Module, *, skip: tuple[str, ...] = ()) -> nn.Module:
    """torchao's quantize_ weight wrapper on every linear but those named."""
    config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)

    def chosen(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not any(s in name for s in skip)

    quantize_(model, config, filter_fn=chosen)
    return model


def quantize_inference_(
    model: nn.Module,
    *,
    skip: tuple[str, ...] = (),
    mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL,
    element: torch.dtype = torch.float8_e4m3fn,
) -> nn.Module:
    """torchao's MX inference weights on every linear but those named."""
    config = MXDynamicActivationMXWeightConfig(
        kernel_preference=EMULATED,
        scaling_mode=mode,
        activation_dtype=element,
        weight_dtype=element,
    )

    def chosen(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not any(s in name for s in skip)

    quantize_(model, config, filter_fn=chosen)
    return model.requires_grad_(False)


def inference_block(
    form: str, k: int = 128, widths: tuple[int, ...] = (64, 96), seed: int = 0, **kwargs: Any
) -> Block:
    """A norm of the given form before linears with MX weights."""
    torch.manual_seed(seed)
    linears = [nn.Linear(k, n, bias=False).to(torch.bfloat16) for n in widths]
    block = Block(make_norm(form, k, seed), linears)
    return quantize_inference_(block, **kwargs)


def llama(
    layers: int = 2, hidden: int = 256, *, tie: bool = False, seed: int = 0, **kwargs: Any
) -> nn.Module:
    """A transformers Llama in bfloat16 with gains 1 + .3 N(0, 1)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=256,
        tie_word_embeddings=tie,
        use_cache=False,
        **kwargs,
    )
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(1 + 0.3 * torch.randn_like(p))
    return model


def tokens(rows: int = 1, length: int = 32, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Gaussian rows."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class ResidualBlock(nn.Module):
    """Pre-norm block: the sum in front of the second norm is the residual stream."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(k, eps=1e-5), nn.RMSNorm(k, eps=1e-5)
        self.mix, self.up, self.down = nn.Linear(k, k), nn.Linear(k, 2 * k), nn.Linear(2 * k, k)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class HandLinear(nn.Linear):
    """A linear that casts its input by hand, with no E8M0 dtype (torch's C++ has none)."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(hand_cast(x), self.weight, self.bias)


def hand_cast(x: Tensor) -> Tensor:
    """Rows through e4m3 and back, in blocks of 32."""
    blocks = x.float().unflatten(-1, (-1, 32))
    absmax = blocks.abs().amax(-1, keepdim=True)
    byte = ((absmax.view(torch.int32) >> 23) - 8).clamp(min=0)
    scale = (byte << 23).view(torch.float32).clamp(min=2.0**-126)
    codes = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2).to(x.dtype)


class _Through(torch.autograd.Function):
    """A product of cast rows whose gradients pass the cast by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return hand_cast(x) @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class TrainedHandLinear(HandLinear):
    """The same, for rows ``[M, K]``, straight through in the backward; takes any M."""

    def forward(self, x: Tensor) -> Tensor:
        return _Through.apply(x, self.weight)


def hand_model(k: int = 512) -> nn.Module:
    """Two residual blocks, four norms in front of hand-written casts; float32."""
    torch.manual_seed(0)
    model = nn.Sequential(ResidualBlock(k), ResidualBlock(k))
    for block in model:
        for name in ("mix", "up"):
            linear = getattr(block, name)
            hand = HandLinear(linear.in_features, linear.out_features)
            hand.load_state_dict(linear.state_dict())
            setattr(block, name, hand)
    return model
