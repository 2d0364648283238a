"""Functions that look like RMSNorm and are none: declined with the reason, the graph untouched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compiling import graphs
from models import EMULATED, Block, Norm, rows
from torch import Tensor
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear


def form_centred(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.var(-1, keepdim=True) + eps) * w.float()).to(x.dtype)


def form_cohere(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (w.float() * h).to(x.dtype)


def form_layer_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, None, eps)


def form_sum(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + eps) * w.float()).to(x.dtype)


def form_eps_outside(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return (h / (h.pow(2).mean(-1, keepdim=True).sqrt() + eps) * w.float()).to(x.dtype)


def form_cube(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.abs().pow(3).mean(-1, keepdim=True) + eps) * w.float()).to(x.dtype)


def form_bias(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, eps) + w


def form_two_axes(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-2:], None, eps) * w


def form_modulated(x: Tensor, w: Tensor, eps: float) -> Tensor:
    scale = x.mean(1, keepdim=True)
    return F.rms_norm(x, (x.shape[-1],), w, eps) * (1 + scale)


def form_gated(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, eps) * F.silu(x)


def form_rsqrt_twice(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    r = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * r * r * w.float()).to(x.dtype)


def norm32(x: Tensor, eps: float) -> Tensor:
    h = x.float()
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)


def form_clamped(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return (norm32(x, eps) * w.float()).clamp(-1e6, 1e6).to(x.dtype)


def form_nan_to_num(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return (norm32(x, eps) * w.float()).nan_to_num().to(x.dtype)


def form_clamped_square(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    mean = h.clamp(-1e5, 1e5).pow(2).mean(-1, keepdim=True)
    return (h * torch.rsqrt(mean + eps) * w.float()).to(x.dtype)


def form_clamped_mean(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    mean = h.pow(2).mean(-1, keepdim=True).clamp(max=1e6)
    return (h * torch.rsqrt(mean + eps) * w.float()).to(x.dtype)


def form_max_eps(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    mean = h.pow(2).mean(-1, keepdim=True).clamp(min=eps)
    return (h * torch.rsqrt(mean) * w.float()).to(x.dtype)


MUST_NOT = {
    form_clamped: "norm_form",
    form_nan_to_num: "norm_form",
    form_clamped_square: "norm_form",
    form_clamped_mean: "norm_form",
    form_max_eps: "norm_form",
    form_centred: "centred",
    form_cohere: "centred",
    form_layer_norm: "centred",
    form_sum: "norm_form",
    form_eps_outside: "norm_form",
    form_cube: "norm_form",
    form_bias: "norm_form",
    form_two_axes: "multi_axis",
    form_modulated: "extra_operand",
    form_gated: "norm_form",
    form_rsqrt_twice: "norm_form",
}


CASES = [*((form, 2) for form in MUST_NOT), (form_modulated, 1)]


@pytest.mark.parametrize(("form", "batch"), CASES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_must_not_match(form: Callable[..., Tensor], batch: int) -> None:
    """Declined with the reason, and the graph is left exactly as it was."""
    norm = Norm(form, 128).to(torch.bfloat16)
    torch.manual_seed(0)
    linear = MXFP8Linear(128, 64, bias=False, kernel_preference=EMULATED).to(torch.bfloat16)
    capture = graphs(Block(norm, [linear]), rows(batch, 32, 128), training=False)
    (site,) = capture.report.sites
    assert (site.status, site.reason) == ("declined", MUST_NOT[form])
    assert site.consumers == ["linears.0"]
    assert site.detail
    assert str(capture.before[0]) == str(capture.after[0])
