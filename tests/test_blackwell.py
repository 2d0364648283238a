"""The graphs that torchao emits on sm_100: rewritten node for node, and the same numbers.

They cannot run where they were traced. Run on the CPU, with opaque casts by the oracle, every
operand of every scaled matrix product must keep its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blackwell
import pytest
import torch
from compiling import Capture, calls
from numerics import assert_same_bytes
from torch import Tensor
from torch.fx import GraphModule
from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode
from tracing import assert_fake_values, example_inputs, run

from mxnorm_pass import MXNormConfig
from mxnorm_pass.formats import round_up_e8m0
from mxnorm_pass.ops import ABSMAX_OP, COLWISE_OP, OP
from mxnorm_pass.recognise import emulate

NEEDS_TRITON = pytest.mark.skipif(
    not blackwell.HAS_TRITON, reason="the Triton kernel's node needs triton; the opaque op does not"
)


def captured(make: Callable[..., GraphModule], *args: Any, **kwargs: Any) -> Capture:
    capture = Capture(MXNormConfig(rms="exact", strict=True))
    make(*args, hook=capture, **kwargs)
    return capture


def check(capture: Capture, cast: str, consumers: int = 1) -> None:
    """One op of the given cast; no op of the norm or the cast is left; all operands as before."""
    (site,) = capture.report.sites
    assert site.status == "rewritten" and len(site.consumers) == consumers, capture.report
    before, after = capture.before[-1], capture.after[-1]
    (node,) = calls(after, OP)
    assert node.args[8] == cast
    assert_fake_values(after)
    left = [
        n.target
        for n in after.nodes
        if n.meta.get("partitioner_tag") != "is_backward"
        and n.target in (torch.ops.aten.mean.dim, torch.ops.aten.rsqrt.default)
    ]
    assert not left
    inputs = example_inputs(before)
    a, b = (run(g, capture.owner, *inputs) for g in (before, after))
    assert len(a.operands) == len(b.operands) > 0
    for old, new in zip(a.operands, b.operands, strict=True):
        for x, y in zip(old, new, strict=True):
            assert_same_bytes(
                y.view(torch.uint8) if fp4(y) else y, x.view(torch.uint8) if fp4(x) else x
            )
    for x, y in zip(a.outputs, b.outputs, strict=True):
        assert_same_bytes(y, x)


def fp4(t: Tensor) -> bool:
    return t.dtype is torch.float4_e2m1fn_x2


RCEIL_HW = "e4m3/b32/rceil_exact/reciprocal/clamp/plain"
RCEIL_ATEN = "e4m3/b32/rceil_log2/reciprocal/clamp/plain"


@pytest.mark.parametrize("form", ["llama", "nn.RMSNorm"])
@pytest.mark.parametrize("mode", [Mode.RCEIL, Mode.FLOOR], ids=["RCEIL", "FLOOR"])
def test_mxfp8_inference(form: str, mode: Mode) -> None:
    """RCEIL is the instruction cvt.rp.satfinite.ue8m0x2.f32 (torch >= 2.12), emulated."""
    model = blackwell.norm_block(form, widths=(128, 64))
    capture = captured(blackwell.inference_graph, model, blackwell.mx_config(mode=mode))
    has_asm = any(str(n.target) == "inline_asm_elementwise" for n in capture.before[-1].nodes)
    cast = RCEIL_HW if has_asm else RCEIL_ATEN
    if mode is Mode.FLOOR:
        # torchao leaves the clamp to the conversion where torch >= 2.12 traces: it saturates.
        cast = "e4m3/b32/floor/divide/clamp/plain"
    check(capture, cast, 2)
    assert not any(str(n.target) == "inline_asm_elementwise" for n in capture.after[-1].nodes)


@pytest.mark.parametrize("mode", [Mode.RCEIL, Mode.FLOOR], ids=["RCEIL", "FLOOR"])
def test_mxfp4_inference(mode: Mode) -> None:
    model = blackwell.norm_block("llama", k=128)
    config = blackwell.mx_config(torch.float4_e2m1fn_x2, mode)
    capture = captured(blackwell.inference_graph, model, config, (2, 64, 128))
    has_asm = any(str(n.target) == "inline_asm_elementwise" for n in capture.before[-1].nodes)
    rule = "floor" if mode is Mode.FLOOR else "rceil_exact" if has_asm else "rceil_log2"
    apply = "divide" if mode is Mode.FLOOR else "reciprocal"
    check(capture, f"e2m1/b32/{rule}/{apply}/clamp/plain")
    assert calls(capture.after[-1], torch.ops.aten._scaled_mm_v2.default)


@pytest.mark.parametrize("outer", [True, False], ids=["per-tensor scale", "block scales alone"])
@pytest.mark.parametrize("kernel", [True, False], ids=["mslk", "aten"])
def test_nvfp4_inference(kernel: bool, outer: bool) -> None:
    """Dynamic per-tensor scale: the absmax of the whole tensor first, by an op of its own."""
    model = blackwell.norm_block("llama", widths=(128, 64))
    config = blackwell.nvfp4_config(kernel, outer)
    capture = captured(blackwell.inference_graph, model, config)
    layout = "swizzled" if kernel else "plain"
    check(capture, f"e2m1/b16/e4m3/reciprocal/clamp/{layout}", 2)
    after = capture.after[-1]
    assert len(calls(after, ABSMAX_OP)) == (1 if outer else 0)
    assert not calls(after, torch.ops.aten.max.default), "no second pass over a normalised tensor"
    assert capture.report.sites[0].spec["format"] == "NVFP4"


@pytest.mark.parametrize("mode", [Mode.RCEIL, Mode.FLOOR], ids=["RCEIL", "FLOOR"])
@pytest.mark.parametrize("form", ["llama", "nn.RMSNorm"])
def test_mxfp8_training_with_the_opaque_op(form: str, mode: Mode) -> None:
    """torchao's casts are opaque, its backward's along tokens too: column-major codes and scales,
    which the graph's own views count on.
    """
    model = blackwell.mxfp8_training_block(form, mode=mode, widths=(128, 256))
    capture = captured(blackwell.training_graph, model, cast="op")
    rule = "floor" if mode is Mode.FLOOR else "rceil_exact"
    check(capture, f"e4m3/b32/{rule}/reciprocal/clamp/plain", 2)
    assert capture.report.sites[0].spec["gain_at"] == "kernel"
    (columns,) = capture.report.sites[0].spec["colwise"]
    assert columns["casts"] == 2 and columns["scale_rule"] == rule
    before, after = capture.before[-1], capture.after[-1]
    assert len(calls(after, COLWISE_OP)) == 1
    left = [
        [n for n in g.nodes if str(n.target) == "torchao.mxfp8_quantize.default"]
        for g in (before, after)
    ]
    # Each linear casts y, its weight and the gradient along tokens.
    assert [len(nodes) for nodes in left] == [6, 4]


@NEEDS_TRITON
@pytest.mark.parametrize("mode", [Mode.RCEIL, Mode.FLOOR], ids=["RCEIL", "FLOOR"])
def test_mxfp8_training_with_the_kernel_s_node(mode: Mode) -> None:
    capture = captured(
        blackwell.training_graph, blackwell.mxfp8_training_block("llama", mode=mode), cast="hop"
    )
    (site,) = capture.report.sites
    assert site.status == "rewritten" and site.spec["scale_rule"] in ("rceil_exact", "floor")
    assert site.spec["colwise"][0]["casts"] == 1 and calls(capture.after[-1], COLWISE_OP)
    kernels = [
        [n for n in g.nodes if str(n.target) == "triton_kernel_wrapper_functional"]
        for g in (capture.before[-1], capture.after[-1])
    ]
    assert len(kernels[0]) - len(kernels[1]) == 1, "the activation's cast, not the weight's"
    assert_fake_values_without_kernels(capture)


def assert_fake_values_without_kernels(capture: Capture) -> None:
    (node,) = calls(capture.after[-1], OP)
    for user in node.users:
        assert user.meta["val"].shape == node.meta["val"][user.args[1]].shape


def test_dynamic_rows() -> None:
    model = blackwell.norm_block("llama")
    capture = captured(blackwell.inference_graph, model, blackwell.mx_config(), dynamic=True)
    (site,) = capture.report.sites
    assert site.status == "rewritten"


# --- the instruction ------------------------------------------------------------------------------


def test_emulated_instruction() -> None:
    """``cvt.rp.satfinite.ue8m0x2.f32``: operand order, rounding up, NaN, Inf, zero, subnormals."""
    high = torch.tensor([0.0, 1.0, float("nan"), float("inf"), 2.0**-127])
    low = torch.tensor([1.0, 1.5, 2.0, 2.0**127, 2.0**-149])
    got = emulate._cvt_rp_ue8m0x2(high, low).to(torch.int32)
    assert (got >> 8).tolist() == [0, 127, 255, 254, 0]
    assert (got & 0xFF).tolist() == [127, 128, 128, 254, 0]
    assert round_up_e8m0(torch.tensor([3.4e38])).tolist() == [254], "finite values saturate"


def test_unknown_ptx_is_not_guessed() -> None:
    if emulate._ASM is None:
        assert emulate.FUNCTIONS == {}
        return
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    text = {"asm_str": "cvt.rz.satfinite.ue8m0x2.f32 $0, 0.0, $1;", "constraints": "=h,r"}
    node = graph.call_function(emulate._ASM, (x,), text)
    assert not emulate.knows(node)
    node.kwargs = {**text, "asm_str": "cvt.rp.satfinite.ue8m0x2.f32  $0, 0.0,   $1;"}
    assert emulate.knows(node), "white space does not matter"


@pytest.mark.parametrize("form", ["llama", "nn.RMSNorm"])
@pytest.mark.parametrize("gradient", ["projected", "own"])
def test_gradient_of_the_fused_norm(form: str, gradient: str) -> None:
    """On CUDA nn.RMSNorm has a backward by hand, ``rstd * (g - x_hat * mean(x_hat g))``."""
    capture = Capture(MXNormConfig(strict=True, gradient=gradient))
    blackwell.training_graph(blackwell.mxfp8_training_block(form), cast="op", hook=capture)
    (site,) = capture.report.sites
    assert (site.status, site.spec["gradient"]) == ("rewritten", gradient)
    factors = [
        n for n in capture.after[-1].nodes
        if n.meta.get("partitioner_tag") == "must_be_in_backward"
        and n.target in (torch.ops.aten.amax.default, torch.ops.aten.mean.dim)
    ]  # fmt: skip
    assert len(factors) == 1
