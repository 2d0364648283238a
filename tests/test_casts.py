"""The matrix of norm form x cast x dtype x graph kind, and casts that no library ships."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from models import FORMS, rows
from numerics import assert_same_bytes, sqnr
from test_op import root64
from torch import Tensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.kernels import (
    f4_unpacked_to_f32,
    f6_e2m3_unpacked_to_f32,
    f6_e3m2_unpacked_to_f32,
    unpack_uint4,
)
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
from tracing import Rewritten, assert_fake_values, rewrite, trace

from mxnorm_pass import MXNormConfig, formats, reference, theory
from mxnorm_pass.formats import Cast
from mxnorm_pass.ops import OP
from mxnorm_pass.ops.rmsnorm_mxquant import parse_rounding

K, M, N = 128, 64, 32
EPS = 1e-6
RULES = {"FLOOR": "floor", "CEIL": "ceil", "EVEN": "even", "RCEIL": "rceil_log2"}
ELEMENTS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "e4m3": (torch.float8_e4m3fn, lambda q: q.float()),
    "e5m2": (torch.float8_e5m2, lambda q: q.float()),
    "e2m3": ("fp6_e2m3", f6_e2m3_unpacked_to_f32),
    "e3m2": ("fp6_e3m2", f6_e3m2_unpacked_to_f32),
    "e2m1": (torch.float4_e2m1fn_x2, lambda q: f4_unpacked_to_f32(unpack_uint4(q))),
}
CASTS = [(e, m) for e in ELEMENTS for m in RULES] + [("nvfp4", "static"), ("nvfp4", "dynamic")]
BITWISE = ("torch", "llama", "olmo2", "gemma", "t5", "bare", "no_keepdim")
"""Forms that the op repeats operation by operation; the others have another root, to an ulp."""


def torchao_dequantised(
    y: Tensor, element: str, mode: str, static_scale: Tensor | None = None
) -> Tensor:
    """Cast and back with torchao's functions, values ``[..., K]`` in ``y``'s dtype."""
    rows = y.reshape(-1, y.shape[-1]).contiguous()
    if element == "nvfp4":
        peak = rows.abs().max().float() / (448.0 * 6.0)
        outer = static_scale if mode == "static" else peak
        scale, packed = nvfp4_quantize(rows, 16, outer)
        values = f4_unpacked_to_f32(unpack_uint4(packed)).view(len(rows), -1, 16)
        out = values * (scale.float() * outer).unsqueeze(-1)
        return out.view(y.shape).to(y.dtype)
    dtype, decode = ELEMENTS[element]
    scale, qdata = to_mx(rows, dtype, 32, ScaleCalculationMode[mode])
    power = torch.exp2(scale.view(torch.uint8).float() - 127).unsqueeze(-1)
    return (decode(qdata).view(len(rows), -1, 32) * power).view(y.shape).to(y.dtype)


class Straight(torch.autograd.Function):
    """``dequantise(y) @ dequantise(w)^T`` forward; plain products backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, w: Tensor, outer: Tensor, cast: Any) -> Tensor:
        ctx.save_for_backward(y, w)
        return cast(y, outer) @ cast(w, outer).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y, w = ctx.saved_tensors
        return grads[0] @ w, grads[0].t() @ y, None, None


CastFunction = Callable[[Tensor, Tensor], Tensor]
OUTER = 0.0037
"""NVFP4's static per-tensor scale, an input of the graph."""


def operands(x_dtype: torch.dtype, gain_dtype: torch.dtype, form: str) -> list[Tensor]:
    """Rows over five orders of magnitude, a gain, a weight, and a per-tensor scale."""
    spread = torch.exp(torch.linspace(-6, 6, M)).unsqueeze(-1)
    x = (rows(M, K).float() * spread).to(x_dtype)
    g = (0.3 * rows(K, seed=1).float() + (0 if form == "gemma" else 1)).to(gain_dtype)
    return [x, g, 0.1 * rows(N, K, seed=2).to(x_dtype), torch.tensor(OUTER)]


def traced(
    form: str,
    cast: CastFunction,
    x_dtype: torch.dtype = torch.bfloat16,
    gain_dtype: torch.dtype = torch.bfloat16,
    *,
    training: bool = False,
    config: MXNormConfig | None = None,
    norm: Callable[..., Tensor] | None = None,
) -> tuple[Rewritten, list[Tensor]]:
    """norm -> cast -> matmul as a graph, rewritten, and the inputs that it was traced with."""
    make = norm or FORMS[form]

    def fn(x: Tensor, g: Tensor, w: Tensor, outer: Tensor) -> Tensor:
        y = make(x, None if form == "bare" else g, EPS)
        return Straight.apply(y, w.to(y.dtype), outer, cast)

    inputs = operands(x_dtype, gain_dtype, form)
    leaves = [t.clone().requires_grad_(training and t.dim() > 0) for t in inputs]
    return rewrite(trace(fn, *leaves), config), inputs


def check_exact(got: Rewritten, inputs: list[Tensor], *, bitwise: bool) -> None:
    """With the true RMS the rewritten graph computes what it computed before."""
    tangents = [n for n in got.placeholders if n.name.startswith("tangents")]
    values = [*inputs, *(rows(M, N, seed=3).to(n.meta["val"].dtype) for n in tangents)]
    before, after = got.runs(*values)
    assert before.outputs
    for a, b in zip(after.outputs, before.outputs, strict=True):
        if bitwise:
            assert_same_bytes(a, b)
        else:
            # The root may differ by an ulp: rare codes move to the neighbour (1/16 of a value).
            assert torch.equal(a, b) or sqnr(b, a) > 40


def check_op(got: Rewritten, inputs: list[Tensor], rms: str, form: str) -> None:
    """The op's outputs against float64 RMSNorm and the oracle."""
    (node,) = got.after.find_nodes(op="call_function", target=OP)
    _, gain, _, tensor_scale, eps, kind, correction, rounding, text = node.args
    assert kind == rms and abs(eps - EPS) < 1e-12
    spec = Cast.parse(text)
    x, g = inputs[:2]
    g = None if gain is None else g.float() + 1 if form == "gemma" else g
    outer = None if tensor_scale is None else torch.tensor(OUTER)
    qdata, scale, rstd = OP(x, g, None, outer, eps, rms, correction, rounding, text)
    true = root64(x, EPS, rms, spec.block_size, correction)
    torch.testing.assert_close(rstd.double(), true, rtol=1e-6, atol=0)
    y = reference.normalise(x, rstd, g, *parse_rounding(rounding))
    expected, expected_scale = reference.quantize(y, spec, 1.0 if outer is None else OUTER)
    assert_same_bytes(scale, expected_scale)
    assert_same_bytes(qdata, expected)
    if rms == "p2":
        assert correction == pytest.approx(theory.correction(2, spec.block_size))


@settings(max_examples=16, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    form=st.sampled_from(sorted(FORMS)),
    cast=st.sampled_from(CASTS),
    x_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    gain_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    training=st.booleans(),
    rms=st.sampled_from(["exact", "p2"]),
)
def test_matrix(
    form: str,
    cast: tuple[str, str],
    x_dtype: torch.dtype,
    gain_dtype: torch.dtype,
    training: bool,
    rms: str,
) -> None:
    config = MXNormConfig(rms="exact" if rms == "exact" else "mx", gain="kernel", strict=True)
    got, inputs = traced(
        form,
        lambda y, outer: torchao_dequantised(y, *cast, outer),
        x_dtype,
        gain_dtype,
        training=training,
        config=config,
    )
    what = f"{form} {cast} {x_dtype} {gain_dtype} {got.report}"
    assert [s.status for s in got.sites] == ["rewritten"], what
    spec = got.sites[0].spec
    if cast[0] == "nvfp4":
        assert (spec["format"], spec["scale_rule"], spec["block_size"]) == ("NVFP4", "e4m3", 16)
    else:
        assert (spec["element"], spec["scale_rule"]) == (cast[0], RULES[cast[1]]), what
    assert_fake_values(got.after)
    check_op(got, inputs, rms, form)
    if rms == "exact":
        check_exact(got, inputs, bitwise=form in BITWISE)


def block_graph(x: Tensor, k: int, layers: int) -> Any:
    """Layers of norm -> MXFP8 -> matmul with a residual stream, as one inference graph."""

    def fn(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        for _ in range(layers):
            y = FORMS["llama"](x, g, EPS)
            x = x + torchao_dequantised(y, "e4m3", "RCEIL") @ w
        return x

    return trace(fn, x, 1 + 0.3 * rows(k, seed=1), 0.1 * rows(k, k, seed=2))


# --- FP4 in two codes to a byte -------------------------------------------------------------------


def fp4_codes(y: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4 with FLOOR in this package's own arithmetic: codes ``[M, K]`` and bytes, unpacked."""
    blocks = y.float().view(len(y), -1, 32)
    absmax = blocks.abs().amax(-1, keepdim=True)
    element = formats.ELEMENTS["e2m1"]
    byte = formats.scale_byte(absmax, element, "floor")
    scaled = formats.apply_scale(blocks, absmax, byte, "divide")
    return formats.encode(scaled, element, "clamp").view(y.shape), byte


def low_first(q: Tensor) -> Tensor:
    return q[:, ::2] | (q[:, 1::2] << 4)


PACKINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "slices of rows": low_first,
    "slices of all": lambda q: (q.view(-1)[::2] | (q.view(-1)[1::2] << 4)).view(len(q), -1),
    "pairs": lambda q: q.view(len(q), -1, 2)[..., 0] | (q.view(len(q), -1, 2)[..., 1] << 4),
    "sum of products": lambda q: q[:, ::2] + q[:, 1::2] * 16,
}
OTHER_PACKINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "high half first": lambda q: (q[:, ::2] << 4) | q[:, 1::2],
    "halves of a row": lambda q: q[:, : K // 2] | (q[:, K // 2 :] << 4),
    "every other pair": lambda q: q[:, 1::2] | (q[:, ::2] << 3),
}


def packed_graph(pack: Callable[[Tensor], Tensor]) -> tuple[Rewritten, list[Tensor]]:
    """norm -> MXFP4 -> packed -> unpacked as torchao does, dequantised -> matmul."""

    def cast(y: Tensor, outer: Tensor) -> Tensor:
        codes, byte = fp4_codes(y)
        values = f4_unpacked_to_f32(unpack_uint4(pack(codes))).view(len(y), -1, 32)
        power = (byte.to(torch.int32) << 23).view(torch.float32)
        return (values * power).view(y.shape).to(y.dtype)

    return traced("llama", cast)


@pytest.mark.parametrize("name", PACKINGS)
def test_fp4_packings(name: str) -> None:
    got, inputs = packed_graph(PACKINGS[name])
    assert [s.status for s in got.sites] == ["rewritten"], got.report
    assert got.sites[0].spec["format"] == "MXFP4"
    check_exact(got, inputs, bitwise=True)


@pytest.mark.parametrize("name", OTHER_PACKINGS)
def test_other_packings_stay(name: str) -> None:
    """Another order of codes is another function, however much it looks alike."""
    got, inputs = packed_graph(OTHER_PACKINGS[name])
    assert [(s.status, s.reason) for s in got.sites] == [("declined", "element_dtype")], got.report
    check_exact(got, inputs, bitwise=True)
