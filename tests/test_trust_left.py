"""Gains that stay where they are: none is dropped without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Norm, gemma_form, torch_form
from test_trust_gains import K, gain, inputs
from torch import Tensor, nn

from mxnorm_pass import fold_gains


class OfForm(nn.Module):
    """A norm of any form, and what stands between it and the linear."""

    def __init__(self, form: Callable[..., Tensor], between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.linear = gain(Norm(form, K), 1), nn.Linear(K, 8)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.between(self.norm(x)))


def as_it_is(y: Tensor) -> Tensor:
    return y


def l2_form(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.normalize(x, dim=-1, eps=eps) * K**0.5 * w


def gain_first_form(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * w * torch.rsqrt(x.double().pow(2).mean(-1) + eps).to(x.dtype).unsqueeze(-1)


def grouped_form(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.unflatten(-1, (4, K // 4)), (K // 4,), None, eps).flatten(-2) * w


def planes_form(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + eps) * w


LEFT_FORMS: dict[str, tuple[Callable[..., Tensor], Any, torch.dtype, str]] = {
    "float16": (
        torch_form,
        as_it_is,
        torch.float16,
        "only float32 and bfloat16 are, not torch.flo",
    ),
    "float64": (
        torch_form,
        as_it_is,
        torch.float64,
        "only float32 and bfloat16 are, not torch.flo",
    ),
    "added": (torch_form, lambda y: y + 1, torch.float32, "read by aten.add.Tensor, which is no"),
    "gated": (gemma_form, F.silu, torch.bfloat16, "which is no linear"),
    "l2": (
        l2_form,
        as_it_is,
        torch.float32,
        "linear (aten.addmm.default) reads no RMSNorm that is",
    ),
    "gain first": (gain_first_form, as_it_is, torch.float32, "reads no RMSNorm that is understood"),
    "grouped": (grouped_form, as_it_is, torch.float32, "reads no RMSNorm that is understood"),
    "planes": (planes_form, as_it_is, torch.float32, "understood (multi_axis"),
}


@pytest.mark.parametrize("name", LEFT_FORMS)
def test_no_gain_is_dropped_without_a_word(name: str) -> None:
    """Whatever looks like an RMSNorm with a gain is folded or has a reason, in print as well."""
    form, between, dtype, says = LEFT_FORMS[name]
    model = OfForm(form, between).to(dtype)
    handle = fold_gains(model, inputs(dtype)[0], compare=False)
    assert not handle.folded and not handle.active
    (left,) = handle.left
    assert (left.gain, left.norms) == ("norm.weight", ["norm"])
    assert left.why_left and all(says in why for why in left.why_left), left.why_left
    shown = str(handle)
    assert "1 left" in shown and "norm.weight: left: " in shown and "nothing to fold" not in shown


def test_a_hook_on_the_linear_keeps_the_gain() -> None:
    model = nn.Sequential(gain(nn.RMSNorm(K), 1), nn.Linear(K, 8))
    hook = model[1].register_forward_pre_hook(lambda module, args: args[0] + 1)
    (left,) = fold_gains(model, inputs()[0], compare=False).left
    assert left.why_left == ["read by 1 (aten.add.Tensor), which is no linear"]
    hook.remove()
    assert [g.gain for g in fold_gains(model, inputs()[0], compare=False).folded] == ["0.weight"]


def test_a_norm_whose_linear_is_in_another_graph_has_an_entry() -> None:
    model = OfForm(torch_form, between=lambda y: y * float(y.sum() > -1e9))  # the graph ends here
    (left,) = fold_gains(model, inputs()[0], compare=False).left
    assert left.gain == "norm.weight" and left.why_left
    assert "another graph" in " ".join(left.why_left)


@pytest.mark.parametrize(
    ("model", "bare", "says"),
    [
        (lambda: nn.Linear(K, 8), [], "the batches reach no RMSNorm in this model"),
        (lambda: nn.Sequential(nn.LayerNorm(K), nn.Linear(K, 8)), [], "reach no RMSNorm"),
        (
            lambda: nn.Sequential(nn.RMSNorm(K, elementwise_affine=False), nn.Linear(K, 8)),
            ["0"],
            "no parameter is the gain of an RMSNorm here (0)",
        ),
    ],
    ids=["linear", "layernorm", "gainless"],
)
def test_nothing_to_fold_is_said(
    model: Callable[[], nn.Module], bare: list[str], says: str
) -> None:
    handle = fold_gains(model(), inputs()[0], compare=False)
    assert (handle.gains, handle.bare) == ([], bare)
    assert "nothing to fold: " in str(handle) and says in str(handle)
