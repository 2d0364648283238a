"""The column kernel's launch inside a graph that Inductor compiles; see :mod:`.inductor`."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import empty_strided
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv

from mxnorm_pass.formats import ELEMENTS, Cast, output_shapes
from mxnorm_pass.ops.colwise import ColumnOptions
from mxnorm_pass.ops.kernels import cols_launch, hardware, inductor
from mxnorm_pass.ops.kernels.cols import rmsnorm_mxquant_colwise_kernel
from mxnorm_pass.ops.rmsnorm_mxquant import parse_rounding


def rmsnorm_mxquant_colwise(
    x: ir.TensorBox, rstd: ir.TensorBox, options: ColumnOptions
) -> tuple[Any, Any]:
    """The column kernel on Inductor's buffers: ``qdata, scale``."""
    cast = Cast.parse(options.cast)
    *lead, k = x.get_size()
    k = V.graph.sizevars.guard_int(k)
    blocks = FloorDiv(sympy.prod(lead), cast.block_size)
    rounding = parse_rounding(options.rounding)
    tile = cols_launch.tile_of(cast.block_size, x.get_dtype(), rounding[1])
    x, x_rows = inductor.loadable(x)
    device: Any = x.get_device()
    codes, scales = output_shapes([k], blocks * cast.block_size, cast)

    def empty(size: Any, dtype: torch.dtype) -> Any:
        return empty_strided(list(size), None, dtype=dtype, device=device)

    qdata = empty(codes, ELEMENTS[cast.element].dtype)
    scale = empty(scales, cast.scale_dtype)
    inductor.kernel_node(
        rmsnorm_mxquant_colwise_kernel,
        tile.warps,
        cols_launch.tiles(blocks, k, cast, tile),
        x_ptr=x,
        rstd_ptr=_contiguous(rstd),
        gain_ptr=inductor.loadable_gain(options.gain),
        tensor_scale_ptr=inductor.loadable_scalar(options.tensor_scale, device),
        qdata_ptr=qdata,
        scale_ptr=scale,
        blocks=blocks,
        **inductor.stride_arguments("x", x_rows),
        **cols_launch.constants(
            cast,
            k,
            rounding,
            hardware(device),
            tile,
            split=x_rows[0] != 1,
        ),
    )
    return qdata, scale


def _contiguous(rstd: ir.TensorBox) -> ir.TensorBox:
    """One number after another, copied where they are not."""
    box = inductor.buffer_of(rstd)
    if box.get_layout().is_contiguous():
        return box
    return inductor.buffer_of(ir.ExternKernel.copy_input(rstd))
