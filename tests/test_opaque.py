"""Ops that the pass cannot see into: registered casts, unknown casts, opaque norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import llama_form, rows
from numerics import assert_same_bytes
from test_casts import torchao_dequantised
from torch import Tensor
from torch.fx import GraphModule
from tracing import rewrite, trace

from mxnorm_pass import CastOp, MXNormConfig, MXNormPass, reference, register_cast_op
from mxnorm_pass.formats import Cast
from mxnorm_pass.recognise import opaque

CAST = Cast("e4m3", 32, "floor", "divide", "clamp")

_LIB = torch.library.Library("opaque_test", "DEF")
_LIB.define("to_mx(Tensor x, int block) -> (Tensor, Tensor)")
_LIB.define("to_mx_transposed(Tensor x) -> (Tensor, Tensor)")
_LIB.define("rht_quantize(Tensor x) -> (Tensor, Tensor)")
_LIB.define("rms_norm(Tensor x, Tensor gain) -> Tensor")
_LIB.define("attention(Tensor x) -> Tensor")
OPS = torch.ops.opaque_test


def _to_mx(x: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    return reference.quantize(x, CAST)


def _to_mx_fake(x: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    scale = x.new_empty((*x.shape[:-1], x.shape[-1] // 32), dtype=torch.uint8)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), scale


def _transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    qdata, scale = reference.quantize(x, CAST)
    return qdata, scale.t().contiguous()


def _transposed_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.new_empty((x.shape[-1] // 32, x.shape[0]), dtype=torch.uint8)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), scale


for _name, _real, _fake in (
    ("to_mx_transposed", _transposed, _transposed_fake),
    ("to_mx", _to_mx, _to_mx_fake),
    ("rht_quantize", _to_mx, _to_mx_fake),
    ("rms_norm", lambda x, gain: llama_form(x, gain, 1e-6), lambda x, gain: torch.empty_like(x)),
    ("attention", lambda x: x * 2, torch.empty_like),
):
    _LIB.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"opaque_test::{_name}", _fake, lib=_LIB)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers, it registers for itself."""
    monkeypatch.setattr(opaque, "_REGISTERED", dict(opaque._REGISTERED))


INPUTS = (rows(64, 128), 1 + 0.3 * rows(128, seed=1), rows(32, 128, seed=2))


def graph(cast: Callable[[Tensor], tuple[Tensor, Tensor]]) -> GraphModule:
    def fn(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        q, s = cast(llama_form(x, g, 1e-6))
        s = s if s.shape[0] == len(x) else s.t()
        power = torch.exp2(s.float() - 127).repeat_interleave(32, -1)
        return (q.float() * power).bfloat16() @ w.t()

    return trace(fn, *INPUTS)


def describe(node: Any) -> CastOp | None:
    """Blocks of 32 alone."""
    return CastOp(CAST, node.args[0]) if node.args[1] == 32 else None


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("how", [str(CAST), CAST, describe], ids=["text", "cast", "function"])
def test_registered_op(how: Any) -> None:
    gm = graph(lambda y: OPS.to_mx(y, 32))
    unknown = rewrite(gm)
    assert [s.reason for s in unknown.sites] == ["opaque_cast"]
    assert "register_cast_op" in str(unknown.report)
    before = MXNormPass(MXNormConfig()).uuid()
    register_cast_op(OPS.to_mx.default, how)
    assert MXNormPass(MXNormConfig()).uuid() != before, "a compile cache must notice"

    got = rewrite(gm)
    assert [s.status for s in got.sites] == ["rewritten"], got.report
    assert not got.after.find_nodes(op="call_function", target=OPS.to_mx.default)
    a, b = got.runs(*INPUTS)
    assert_same_bytes(b.outputs[0], a.outputs[0])


@pytest.mark.usefixtures("registry")
def test_other_arguments_stay_unknown() -> None:
    register_cast_op(OPS.to_mx.default, describe)
    got = rewrite(graph(lambda y: OPS.to_mx(y, 16)))
    assert [(s.status, s.reason) for s in got.sites] == [("declined", "opaque_cast")]


def test_rotated() -> None:
    got = rewrite(graph(lambda y: OPS.rht_quantize(y)))
    assert [(s.status, s.reason) for s in got.sites] == [("declined", "rotated")]


@pytest.mark.parametrize(
    ("producer", "reasons"),
    [
        (lambda x, g: OPS.rms_norm(x, g), ["opaque_norm"]),
        (lambda x, g: OPS.rms_norm(x, g).view(2, 32, 128).float(), ["opaque_norm"]),
        # No norm at all: an activation like any other.
        (lambda x, g: OPS.attention(x), []),
    ],
    ids=["norm", "norm, reshaped", "attention"],
)
def test_opaque_norm(producer: Any, reasons: list[str]) -> None:
    def fn(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        y = producer(x, g)
        return torchao_dequantised(y, "e4m3", "RCEIL") @ w.to(y.dtype).t()

    got = rewrite(trace(fn, *INPUTS))
    assert [s.reason for s in got.sites] == reasons


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("wrong", ["e4m3/b16/floor/divide/clamp/plain", "transposed"])
def test_outputs_of_another_size(wrong: str) -> None:
    """What an op is registered as has to fit what it returns."""
    if wrong == "transposed":
        register_cast_op(OPS.to_mx_transposed.default, CAST)
        got = rewrite(graph(lambda y: OPS.to_mx_transposed(y)))
    else:
        register_cast_op(OPS.to_mx.default, wrong)
        got = rewrite(graph(lambda y: OPS.to_mx(y, 32)))
    assert [(s.status, s.reason) for s in got.sites] == [("declined", "opaque_cast")]
    assert "is registered as" in got.sites[0].detail and got.sites[0].expected


def broken(node: Any) -> CastOp | None:
    raise RuntimeError("on purpose")


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("how", [broken, lambda node: "e4m3"])
def test_broken_describer(how: Any) -> None:
    """The op counts as unknown; nothing else suffers."""
    register_cast_op(OPS.to_mx.default, how)
    got = rewrite(graph(lambda y: OPS.to_mx(y, 32)))
    assert [(s.status, s.reason) for s in got.sites] == [("declined", "opaque_cast")]


@pytest.mark.usefixtures("registry")
def test_registration_errors() -> None:
    for nonsense in (None, 3):
        with pytest.raises(TypeError, match="no Cast, no text of one, and no function"):
            register_cast_op(OPS.to_mx.default, nonsense)
    with pytest.raises(TypeError, match=r"no operator overload such as torch\.ops"):
        register_cast_op(OPS.to_mx, CAST)
    with pytest.raises(ValueError, match="element 'e9m9' is not one of e4m3, e5m2"):
        register_cast_op(OPS.to_mx.default, str(CAST).replace("e4m3/", "e9m9/", 1))
