"""``add_rmsnorm_mxquant``: the sum as torch forms it, and everything else as the op of the sum."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_same_bytes
from test_op import (
    BAD,
    CASTS,
    NVFP4,
    RCEIL,
    ROOT_RTOL,
    ROUNDINGS,
    SWIZZLED,
    arguments,
    assert_near,
    randn,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from mxnorm_pass import reference
from mxnorm_pass.formats import Cast
from mxnorm_pass.ops import ABSMAX_OP, ADD_OP, OP, rmsnorm_mxquant, rmsnorm_mxquant_colwise
from mxnorm_pass.ops.rmsnorm_mxquant import RMS_KINDS

DTYPES = st.sampled_from([torch.bfloat16, torch.float32])
LAYOUTS = {
    "rows": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda t: t[:1].expand_as(t),
    "sliced": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
}


def check(x: Tensor, residual: Tensor, *options: Any) -> tuple[Tensor, ...]:
    """All four outputs against an addition in float32 and the op without one."""
    wide = torch.promote_types(x.dtype, residual.dtype)
    total = (x.float() + residual.float()).to(wide)
    got = ADD_OP(x, residual, *options)
    assert len(got) == 4
    for a, b in zip(got, (*OP(total, *options), total), strict=True):
        assert_same_bytes(a, b, str(options[2:]))
    return got


@settings(max_examples=60, deadline=None)
@given(
    dtypes=st.tuples(DTYPES, DTYPES),
    layouts=st.tuples(*(st.sampled_from(sorted(LAYOUTS)) for _ in range(2))),
    cast=st.sampled_from([*CASTS, SWIZZLED, NVFP4.replace("plain", "swizzled")]),
    rms=st.sampled_from(RMS_KINDS),
    rounding=st.sampled_from(ROUNDINGS),
    gain=st.booleans(),
    scale=st.integers(-12, 12),
)
def test_is_the_op_of_the_sum(
    dtypes: tuple[torch.dtype, torch.dtype],
    layouts: tuple[str, str],
    cast: str,
    rms: str,
    rounding: str,
    gain: bool,
    scale: int,
) -> None:
    """Any dtypes, strides, sizes of one operand beside the other, casts and roots."""
    x, residual = (
        LAYOUTS[layout](randn(3, 4, 64, seed=i).to(dtype))
        for i, (layout, dtype) in enumerate(zip(layouts, dtypes, strict=True))
    )
    outer = torch.tensor(0.02) if "/e4m3/" in cast else None
    g = 1 + 0.3 * randn(64, seed=2) if gain else None
    check(x, residual * 2.0**scale, g, None, outer, 1e-6, rms, 0.4, rounding, cast)


def test_against_the_oracle() -> None:
    """Codes and scales of a sum that is rounded once, to bfloat16."""
    x, residual, gain = randn(16, 96).bfloat16(), randn(16, 96, seed=1).bfloat16(), randn(96)
    got = rmsnorm_mxquant(x, gain, residual=residual, rounding="bf16->bf16", correction=0.4)
    qdata, scale, rstd, total = got
    assert_same_bytes(total, x + residual)
    oracle_root = reference.rstd(x + residual, 1e-6, "p2", 32, 0.4)
    torch.testing.assert_close(rstd, oracle_root, rtol=ROOT_RTOL, atol=0)
    y = reference.normalise(x + residual, rstd, gain, torch.bfloat16, torch.bfloat16)
    for a, b in zip((qdata, scale), reference.quantize(y, Cast.parse(RCEIL)), strict=True):
        assert_same_bytes(a, b)


def test_special_values() -> None:
    """Inf less Inf, NaN, and a sum of nothing: in their rows and nowhere else."""
    x, residual = randn(6, 64), randn(6, 64, seed=1)
    x[0, 3], residual[0, 3] = float("inf"), float("-inf")
    x[2] = -residual[2]
    residual[4, 9] = float("nan")
    qdata, _, rstd, total = check(x, residual, *arguments(x)[1:])
    assert rstd.isnan().flatten().tolist() == [True, False, False, False, True, False]
    assert torch.equal(total[2], torch.zeros(64)) and not qdata[2].float().any()


def test_one_tensor_twice() -> None:
    x = randn(4, 64)
    check(x, x, *arguments(x)[1:])


def test_public_function() -> None:
    """Three outputs without a residual, four with one."""
    x, residual, gain = randn(4, 64), randn(4, 64, seed=1), randn(64, seed=2)
    assert len(rmsnorm_mxquant(x, gain)) == len(rmsnorm_mxquant(x, gain, residual=None)) == 3
    got = rmsnorm_mxquant(x, gain, residual=residual, rms="p1", eps=1e-4)
    for a, b in zip(got[:3], rmsnorm_mxquant(x + residual, gain, rms="p1", eps=1e-4), strict=True):
        assert_same_bytes(a, b)


# --- fake tensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: randn(64, seed=seed),
        lambda seed: randn(0, 64),
        lambda seed: randn(2, 70, 96, seed=seed),
        lambda seed: randn(96, 7, seed=seed).t(),
        lambda seed: randn(1, 64, seed=seed).expand(5, -1),
        lambda seed: randn(3, 64, seed=seed) if seed else randn(64, 3).t(),
    ],
)
def test_fake_agrees_with_real(make: Any) -> None:
    casts = [*CASTS[::7], NVFP4, SWIZZLED]
    for i, cast in enumerate(casts):
        dtypes = (torch.bfloat16, torch.float32, torch.bfloat16)[i % 2 :][:2]
        x, residual = (make(j).to(d) for j, d in enumerate(dtypes))
        args = (x, residual, *arguments(x, cast=cast)[1:])
        real = ADD_OP(*args)
        with FakeTensorMode() as mode:
            fake = ADD_OP(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
        for r, f in zip(real, fake, strict=True):
            assert (r.shape, r.dtype, r.device) == (f.shape, f.dtype, f.device), cast
            assert r.stride() == f.stride() and r.storage_offset() == f.storage_offset() == 0


def test_fake_with_symbolic_rows() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC]
    )
    x = mode.from_tensor(randn(6, 5, 96), symbolic_context=context)
    with mode:
        got = ADD_OP(x, x * 2, *arguments(x)[1:])
    assert isinstance(x.shape[0], torch.SymInt)
    assert [t.shape[0] for t in got] == [x.shape[0]] * 4
    assert not mode.shape_env.guards, "the row count must not be specialised"


@pytest.mark.parametrize("name", ["bf16", "mixed", "nvfp4", "strided"])
def test_opcheck(name: str) -> None:
    x, residual = randn(4, 64), randn(4, 64, seed=1).bfloat16()
    x = x.bfloat16() if name == "bf16" else randn(64, 4).t() if name == "strided" else x
    outer = torch.tensor(0.01) if name == "nvfp4" else None
    cast = NVFP4 if name == "nvfp4" else RCEIL
    args = arguments(x, randn(64), tensor_scale=outer, cast=cast)
    torch.library.opcheck(ADD_OP, (x, residual, *args[1:]))


def test_dynamic_rows_compile_once() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, r: rmsnorm_mxquant(x, residual=r, correction=0.4), backend=counter, fullgraph=True
    )
    for m in (17, 64, 129):
        x, residual = randn(m, 96, seed=m), randn(m, 96, seed=1).bfloat16()
        for t in (x, residual):
            torch._dynamo.mark_dynamic(t, 0)
        expected = rmsnorm_mxquant(x, residual=residual, correction=0.4)
        for a, b in zip(compiled(x, residual), expected, strict=True):
            assert_same_bytes(a, b)
    assert counter.frame_count == 1


# --- errors ---------------------------------------------------------------------------------------

FLOATS = "allowed are torch.float32, torch.bfloat16"
BAD_RESIDUALS = {
    "dtype": (randn(3, 64).half(), f"residual is torch.float16; {FLOATS}"),
    "rows": (randn(1, 64), "residual of shape (1, 64): expected that of x, (3, 64); nothing is"),
    "columns": (randn(3, 1), "residual of shape (3, 1): expected that of x, (3, 64)"),
    "rank": (randn(64), "residual of shape (64,): expected that of x, (3, 64)"),
    "device": (torch.empty(3, 64, device="meta"), "residual is on meta, x on cpu"),
}


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("name", BAD_RESIDUALS)
def test_residuals_that_are_refused(name: str, fake: bool) -> None:
    residual, message = BAD_RESIDUALS[name]
    x, mode = randn(3, 64), FakeTensorMode()
    if fake:
        x, residual = mode.from_tensor(x), mode.from_tensor(residual)
    with pytest.raises(ValueError, match=re.escape(message)):
        rmsnorm_mxquant(x, residual=residual, correction=0.4)


OPERANDS = {
    "gain": (64,),
    "eps_tensor": (),
    "tensor_scale": (),
    "residual": (32, 64),
    "rstd": (32, 1),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_on_another_gpu_are_refused(name: str) -> None:
    """The device is compared, not its kind: a kernel would read addresses of another GPU."""

    def call(gpu: int) -> tuple[Tensor, ...]:
        x = torch.ones(32, 64, device="cuda:0")
        operand = torch.ones(OPERANDS[name], device=f"cuda:{gpu}")
        if name == "rstd":
            return rmsnorm_mxquant_colwise(x, operand)
        if name == "residual":
            return rmsnorm_mxquant(x, residual=operand)
        three = [
            operand if name == given else None for given in ("gain", "eps_tensor", "tensor_scale")
        ]
        cast = NVFP4 if name == "tensor_scale" else str(RCEIL)
        return OP(x, *three, 1e-6, "p2", 0.4, "f32->f32", cast)

    with FakeTensorMode():
        assert call(0)[0].device == torch.device("cuda:0")
        with pytest.raises(ValueError, match=f"{name} is on cuda:1, x on cuda:0: expected one"):
            call(1)


@pytest.mark.parametrize("name", [n for n in BAD if n != "scalar"])
def test_errors_are_those_of_the_op(name: str) -> None:
    changed, message = BAD[name]
    given_args = {"x": randn(3, 64), "gain": None} | changed
    x = given_args.pop("x")
    with pytest.raises(ValueError, match=re.escape(message)):
        rmsnorm_mxquant(x, residual=torch.zeros_like(x), correction=0.4, **given_args)


# --- through Inductor -----------------------------------------------------------------------------


@pytest.mark.inductor
def test_inductor_code_agrees() -> None:
    x, residual = randn(96, 768).bfloat16(), randn(96, 768, seed=1).bfloat16()
    gain = 1 + 0.3 * randn(768, seed=2)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, r: rmsnorm_mxquant(x, gain, residual=r, correction=0.4), fullgraph=True
    )
    *got, total = compiled(x, residual)
    *expected, sum_expected = rmsnorm_mxquant(x, gain, residual=residual, correction=0.4)
    assert_same_bytes(total, sum_expected)
    # Generated code may read the sum before it is rounded to bfloat16: of values that are moved by
    # up to half a unit in the last place (2^-9), one in some 30 crosses a boundary of e4m3.
    assert float((got[2] / expected[2] - 1).abs().max()) < 2.0**-9
    moved = (got[0].view(torch.uint8) != expected[0].view(torch.uint8)).float().mean()
    assert float(moved) < 0.05
    assert_near(
        tuple(compiled(x.float(), residual.float()))[:3],
        rmsnorm_mxquant(x.float() + residual.float(), gain, correction=0.4),
    )


def test_the_sum_is_contiguous_on_every_route() -> None:
    """Kernel, decomposition and fake: views of the sum fit wherever it comes from."""
    x, r = (torch.randn(2, 3, 64).transpose(0, 1) for _ in range(2))
    options = (None, None, None, 1e-6, "p2", 0.4, "f32->f32", str(RCEIL))
    total = ADD_OP(x, r, *options)[3]
    assert total.is_contiguous() and torch.equal(total, x + r)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (x, r)]
        assert ADD_OP(*fakes, *options)[3].stride() == total.stride()


def test_no_gradient_is_lost() -> None:
    """An error where autograd would want one; none in an autograd.Function, or without."""
    x = torch.randn(4, 64, requires_grad=True)
    for call in (
        lambda: rmsnorm_mxquant(x),
        lambda: rmsnorm_mxquant(x.detach(), residual=x),
        lambda: torch.compile(lambda: rmsnorm_mxquant(x), backend="aot_eager")(),
    ):
        with pytest.raises(Exception, match=r"has no gradient: call it under torch\.no_grad"):
            call()

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return rmsnorm_mxquant(x, rms="exact")[2]

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad.expand(4, 64)

    Rounded.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 64))
    with torch.no_grad():
        rmsnorm_mxquant(x)


def exact_root(x: Tensor) -> Tensor:
    return rmsnorm_mxquant(x, rms="exact")[2]


def by_dual_numbers(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with forward_ad.dual_level():
        call(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize(
    "derive",
    [
        by_dual_numbers,
        lambda call, x: torch.func.jvp(call, (x,), (torch.ones_like(x),)),
        lambda call, x: torch.func.jacfwd(call)(x),
        lambda call, x: torch.func.linearize(call, x),
    ],
    ids=["dual", "jvp", "jacfwd", "linearize"],
)
def test_no_tangent_is_lost(derive: Callable[..., Any]) -> None:
    """Forward mode, which ``no_grad`` does not switch off: an error, never a tangent of zero."""
    x, rstd = torch.randn(32, 64), torch.ones(32, 1)
    calls = {
        "rmsnorm_mxquant": exact_root,
        "add_rmsnorm_mxquant": lambda t: rmsnorm_mxquant(x, residual=t)[2],
        "rmsnorm_absmax": lambda t: ABSMAX_OP(t, None, None, 1e-6, "p2", 0.4, "f32->f32", 32),
        "rmsnorm_mxquant_colwise": lambda t: rmsnorm_mxquant_colwise(t, rstd)[1].float(),
    }
    for name, call in calls.items():
        with (
            pytest.raises(RuntimeError, match=f"mxnorm::{name} has no forward-mode"),
            torch.no_grad(),
        ):
            derive(call, x)


def test_a_tangent_of_ones_own() -> None:
    """Inside an autograd.Function forward mode is off; its jvp is what counts."""

    class Rooted(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return exact_root(x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_forward(inputs[0], output)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            x, rstd = ctx.saved_tensors
            return -(rstd**3) * (x * tangent).mean(-1, keepdim=True)

    x, tangent = torch.randn(4, 64), torch.randn(4, 64)
    plain = torch.func.jvp(
        lambda t: torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-6), (x,), (tangent,)
    )[1]
    with forward_ad.dual_level():
        ours = forward_ad.unpack_dual(Rooted.apply(forward_ad.make_dual(x, tangent))).tangent
    torch.testing.assert_close(ours, plain)
    assert float(plain.abs().min()) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gain": torch.ones(64, device="meta")}, "gain is on meta, x on cpu"),
        ({"gain": torch.ones(64, dtype=torch.int32)}, "gain is torch.int32: expected a float"),
        ({"gain": torch.ones(64, dtype=torch.complex64)}, "expected a float dtype"),
        ({"eps": -1.0}, "eps -1.0: expected a number not below zero"),
        ({"eps": float("nan")}, "eps nan"),
        ({"correction": 0.0}, "correction 0.0: expected a number above zero"),
        ({"cast": None}, "cast None: expected a Cast as text"),
    ],
)
def test_errors_of_the_public_function(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rmsnorm_mxquant(torch.randn(4, 64), **arguments)
