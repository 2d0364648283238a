"""Through Inductor's code generation: the op is inlined, and the numbers stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compiling import run
from models import hand_model, inference_block, rows, training_block
from numerics import assert_same_bytes, sqnr
from torch._inductor.utils import run_and_get_code

from mxnorm_pass import MXNormConfig, backend, inductor_options
from mxnorm_pass.compat import TORCH_VERSION
from mxnorm_pass.inner import needs_aten

pytestmark = pytest.mark.inductor


@pytest.mark.slow
@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="C++ has no E8M0 type before torch 2.12")
def test_training_in_cpp() -> None:
    """Generated C++ holds the op's decomposition and no call of it; values as on the eager route.

    The backward's products differ in a few elements whose bfloat16 rounding the compiler elided.
    """
    block, x = training_block("torch", k=256, widths=(64,)), rows(2, 32, 256)
    expected = run(block, x)
    ours = backend(strict=True)
    given = x.clone().requires_grad_()
    block.zero_grad()
    (out,), code = run_and_get_code(torch.compile(block, backend=ours), given)
    generator = torch.Generator().manual_seed(0)
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    assert ours.report.rewritten == 1
    assert "cpp_fused" in code[0] and "mxnorm.rmsnorm_mxquant" not in code[0]
    assert sqnr(expected.outputs[0], out) > 60
    for name, got in (
        ("input0", given.grad),
        ("norm.weight", block.norm.weight.grad),
        ("linears.0.weight", block.linears[0].weight.grad),
    ):
        assert sqnr(expected.gradients[name], got) > 30, name


def test_inference_on_aten_calls(caplog: pytest.LogCaptureFixture) -> None:
    """A graph that C++ cannot type is not refused: same pipeline, ATen calls, bitwise the same."""
    block, x = inference_block("llama", widths=(64,)), rows(64, 128)
    expected = run(block, x, training=False)
    with torch.no_grad(), caplog.at_level("INFO", logger="mxnorm_pass"):
        out, code = run_and_get_code(torch.compile(block, backend=backend()), x)
    assert "mxnorm.rmsnorm_mxquant" in code[0] and "cpp_fused" not in code[0]
    assert any("calls ATen instead" in r.getMessage() for r in caplog.records)
    assert_same_bytes(out[0], expected.outputs[0])


@pytest.mark.slow
def test_ahead_of_time(tmp_path: Path) -> None:
    """AOTInductor, with a symbolic number of rows; it copies its options, the report stays ours."""
    model, x = hand_model(128), torch.randn(96, 128)
    options = inductor_options(MXNormConfig(rms="exact", require_rewrites=4))
    with torch.no_grad():
        rows = ({0: torch.export.Dim("rows", min=2, max=4096)},)
        program = torch.export.export(model, (x,), dynamic_shapes=rows, strict=False)
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2"), inductor_configs=options
        )
        loaded = torch._inductor.aoti_load_package(package)
        for given in (x, torch.randn(257, 128)):
            assert sqnr(model(given), loaded(given)) > 30
    report = options["joint_custom_pre_pass"].report
    assert [s.spec["residual"] for s in report.sites] == [False, True, True, True]


def test_needs_aten_looks_at_cpu_only() -> None:
    graph = torch.fx.Graph()
    scale = graph.placeholder("scale")
    graph.output(scale)
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    scale.meta["val"] = torch.empty(4, dtype=torch.float8_e8m0fnu)
    assert needs_aten(gm) is scale
    scale.meta["val"] = torch.empty(4, dtype=torch.float8_e8m0fnu, device="meta")
    assert needs_aten(gm) is None
