"""What Inductor makes of a launch: which operands it takes for written.

An operand that it took for written without need would be copied before every launch, or change a
parameter's buffer in its eyes; one that it missed would be read before it is there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._higher_order_ops.triton_kernel_wrap as wrap

from mxnorm_pass.formats import Cast

triton = pytest.importorskip("triton")
BF16 = (torch.bfloat16, torch.bfloat16)
SWIZZLED_NVFP4 = "e2m1/b16/e4m3/reciprocal/clamp/swizzled"


class Driver:
    """Stands for a GPU's: the analysis asks it for the target alone."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())


def written(kernel: Any, arguments: dict[str, Any]) -> set[str]:
    if hasattr(wrap, "identify_accessed_tensors"):
        found = wrap.identify_accessed_tensors(kernel, arguments, {})
        return {access.name for access in found.read_writes.writes}
    return set(wrap.identify_mutated_tensors(kernel, arguments, {}))


@pytest.mark.parametrize(
    ("cast", "k"),
    [
        ("e4m3/b32/rceil_log2/reciprocal/clamp/plain", 4096),
        ("e4m3/b32/rceil_exact/reciprocal/clamp/swizzled", 2880),
        ("e2m1/b16/e4m3/reciprocal/clamp/swizzled", 5120),
    ],
)
@pytest.mark.parametrize("with_all", [False, True])
def test_only_outputs_are_written(cast: str, k: int, with_all: bool) -> None:
    from mxnorm_pass.ops.kernels.constants import constants
    from mxnorm_pass.ops.kernels.rows import rmsnorm_mxquant_kernel

    spec = Cast.parse(cast)
    x = torch.empty(8, k, dtype=torch.bfloat16)
    scalar = torch.empty(()) if with_all else None
    arguments = {
        "x_ptr": x,
        "residual_ptr": x.clone() if with_all else None,
        "gain_ptr": x[0] if with_all else None,
        "eps_ptr": scalar,
        "tensor_scale_ptr": scalar if spec.rule == "e4m3" else None,
        "qdata_ptr": torch.empty(8, k, dtype=torch.uint8),
        "scale_ptr": torch.empty(1024, dtype=torch.uint8),
        "rstd_ptr": torch.empty(8, 1),
        "sum_ptr": x.clone() if with_all else None,
        "rows": 8,
        **dict.fromkeys(("x_inner", "r_inner"), 1),
        **dict.fromkeys(("x_outer_stride", "r_outer_stride"), 0),
        **dict.fromkeys(("x_stride", "r_stride"), k),
        "eps": 1e-5,
        "correction": 0.2,
        **constants(spec, k, "p2", BF16, 1, gain=with_all),
    }
    outputs = {"qdata_ptr", "scale_ptr", "rstd_ptr"} | ({"sum_ptr"} if with_all else set())
    assert written(rmsnorm_mxquant_kernel, arguments) == outputs


def test_only_the_partial_maxima_are_written() -> None:
    from mxnorm_pass.ops.kernels.constants import absmax_constants
    from mxnorm_pass.ops.kernels.rows import rmsnorm_absmax_kernel

    x = torch.empty(8, 4096, dtype=torch.bfloat16)
    arguments = {
        "x_ptr": x,
        "gain_ptr": x[0],
        "eps_ptr": None,
        "partial_ptr": torch.empty(1024),
        "rows": 8,
        "x_inner": 1,
        "x_outer_stride": 0,
        "x_stride": 4096,
        "eps": 1e-5,
        "correction": 0.2,
        **absmax_constants(16, 4096, "p2", BF16, 1, gain=True),
        "PROGRAMS": 1024,
    }
    assert written(rmsnorm_absmax_kernel, arguments) == {"partial_ptr"}


@pytest.mark.parametrize("cast", ["e4m3/b32/rceil_log2/reciprocal/clamp/plain", SWIZZLED_NVFP4])
def test_only_outputs_of_the_column_kernel_are_written(cast: str) -> None:
    from mxnorm_pass.ops.kernels.cols import rmsnorm_mxquant_colwise_kernel
    from mxnorm_pass.ops.kernels.cols_launch import constants, tile_of

    spec = Cast.parse(cast)
    x = torch.empty(64, 2880, dtype=torch.bfloat16)
    tile = tile_of(spec.block_size, x.dtype, x.dtype)
    arguments = {
        "x_ptr": x,
        "rstd_ptr": torch.empty(64, 1),
        "gain_ptr": x[0],
        "tensor_scale_ptr": torch.empty(()) if spec.rule == "e4m3" else None,
        "qdata_ptr": torch.empty(2880, 64, dtype=torch.uint8),
        "scale_ptr": torch.empty(2944 * 4, dtype=torch.uint8),
        "blocks": 64 // spec.block_size,
        "x_inner": 1,
        "x_outer_stride": 0,
        "x_stride": 2880,
        **constants(spec, 2880, BF16, 1, tile),
    }
    assert written(rmsnorm_mxquant_colwise_kernel, arguments) == {"qdata_ptr", "scale_ptr"}
