"""Launches inside a graph that Inductor compiles.

A launch becomes ``ir.UserDefinedTritonKernel``, the node of a kernel that a user's code calls:
Inductor copies its source into the generated code, so that kernel caches, AOTInductor, the C++
wrapper and CUDA graphs treat it as their own. Nothing is timed: each kernel has one configuration.
"""

from __future__ import annotations

import functools
from typing import Any

import sympy
import torch
import triton
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor import ir
from torch._inductor.lowering import empty_strided, lowerings, to_device, to_dtype
from torch._inductor.virtualized import V

from mxnorm_pass.formats import ELEMENTS, Cast, output_shapes
from mxnorm_pass.ops.kernels import hardware, launch
from mxnorm_pass.ops.kernels.constants import absmax_constants, constants, row_config
from mxnorm_pass.ops.kernels.rows import rmsnorm_absmax_kernel, rmsnorm_mxquant_kernel
from mxnorm_pass.ops.rmsnorm_mxquant import NormOptions, Options, parse_rounding

_aten = torch.ops.aten


def rmsnorm_mxquant(
    x: ir.TensorBox, residual: ir.TensorBox | None, options: Options
) -> tuple[Any, Any, Any, Any]:
    """The row kernel on Inductor's buffers: ``qdata, scale, rstd, sum``; no sum, no residual."""
    cast = Cast.parse(options.cast)
    *lead, k = x.get_size()
    k, rows = V.graph.sizevars.guard_int(k), sympy.prod(lead)
    total: Any = None
    if residual is not None and not (_in_memory(x) and _in_memory(residual)):
        # What is still to be computed is computed and added in one kernel of Inductor's: ours
        # would have to wait until it is written, and read it again.
        x, residual = lowerings[_aten.add.Tensor](x, residual), None
        x.realize()
        total = x
    x, x_rows = loadable(x)
    device: Any = x.get_device()

    def empty(size: Any, dtype: torch.dtype) -> Any:
        return empty_strided(list(size), None, dtype=dtype, device=device)

    r_rows: tuple[Any, Any, Any] = (1, 0, 0)
    if residual is not None:
        residual, r_rows = loadable(residual)
        total = empty((*lead, k), torch.promote_types(x.get_dtype(), residual.get_dtype()))
    shapes = output_shapes(lead, k, cast)
    qdata = empty(shapes[0], ELEMENTS[cast.element].dtype)
    scale = empty(shapes[1], cast.scale_dtype)
    rstd = empty((*lead, 1), torch.float32)
    rounding = parse_rounding(options.rounding)
    split = (x_rows[0] != 1, r_rows[0] != 1)
    kernel_node(
        rmsnorm_mxquant_kernel,
        row_config(k, cast.block_size, options.gain is not None).warps,
        launch.grid_rows(rows, cast),
        x_ptr=x,
        residual_ptr=residual,
        gain_ptr=loadable_gain(options.gain),
        eps_ptr=loadable_scalar(options.eps_tensor, device),
        tensor_scale_ptr=loadable_scalar(options.tensor_scale, device),
        qdata_ptr=qdata,
        scale_ptr=scale,
        rstd_ptr=rstd,
        sum_ptr=None if residual is None else total,
        rows=rows,
        **stride_arguments("x", x_rows),
        **stride_arguments("r", r_rows),
        eps=options.eps,
        correction=launch.factor(options.rms, options.correction),
        **constants(
            cast,
            k,
            options.rms,
            rounding,
            hardware(device),
            gain=options.gain is not None,
            split=split,
        ),
    )
    return qdata, scale, rstd, total


def rmsnorm_absmax(x: ir.TensorBox, options: NormOptions) -> Any:
    """The absmax kernel; what its programs found is reduced together with what reads it."""
    *lead, k = x.get_size()
    k, rows = V.graph.sizevars.guard_int(k), sympy.prod(lead)
    x, x_rows = loadable(x)
    device: Any = x.get_device()
    partial = empty_strided([launch.PROGRAMS], None, dtype=torch.float32, device=device)
    kernel_node(
        rmsnorm_absmax_kernel,
        row_config(k, options.block_size, options.gain is not None).warps,
        launch.PROGRAMS,
        x_ptr=x,
        gain_ptr=loadable_gain(options.gain),
        eps_ptr=loadable_scalar(options.eps_tensor, device),
        partial_ptr=partial,
        rows=rows,
        **stride_arguments("x", x_rows),
        eps=options.eps,
        correction=launch.factor(options.rms, options.correction),
        **absmax_constants(
            options.block_size,
            k,
            options.rms,
            parse_rounding(options.rounding),
            hardware(device),
            gain=options.gain is not None,
            split=x_rows[0] != 1,
        ),
        PROGRAMS=launch.PROGRAMS,
    )
    return lowerings[_aten.amax.default](partial, [0])


def stride_arguments(name: str, rows: tuple[Any, Any, Any]) -> dict[str, Any]:
    """What ``rows_of`` says, as the kernels' arguments."""
    names = (f"{name}_inner", f"{name}_outer_stride", f"{name}_stride")
    return dict(zip(names, rows, strict=True))


def kernel_node(kernel: Any, warps: int, programs: Any, **arguments: Any) -> None:
    """A launch of ``programs`` programs of ``kernel``, as a node of Inductor's graph."""
    ir.UserDefinedTritonKernel(
        kernel_idx=kernel_side_table.add_kernel(_configured(kernel, warps)),
        grid=[(programs, 1, 1)],
        tma_descriptor_metadata={},
        kernel_args=arguments,
    )


@functools.cache
def _configured(kernel: Any, warps: int) -> Any:
    """The kernel with its number of warps: the one way to say it is a table of one entry."""
    return triton.autotune(configs=[triton.Config({}, num_warps=warps, num_stages=1)], key=[])(
        kernel
    )


def _in_memory(x: ir.TensorBox) -> bool:
    """A buffer, or a view of one; not something that is still to be computed."""
    data = x.data
    while isinstance(data, ir.BaseView):
        data = data.data
    return isinstance(data, ir.StorageBox) and isinstance(data.data, ir.Buffer)


def buffer_of(x: ir.TensorBox) -> ir.TensorBox:
    """``x`` written to memory, in a layout that stays."""
    value = ir.ExternKernel.realize_input(x)
    if not isinstance(value, ir.ReinterpretView):
        value.freeze_layout()
    return ir.TensorBox(value)


def loadable(x: ir.TensorBox) -> tuple[ir.TensorBox, tuple[Any, Any, Any]]:
    """``x`` with rows that the kernel can load, copied where they are not (see ``rows_of``)."""
    box = buffer_of(x)
    layout = box.get_layout()
    rows = launch.rows_of(layout.size, layout.stride)
    # Of a graph's input whose storage starts anywhere Inductor says so; its offset is not known.
    unaligned = box.get_name() in V.graph.unaligned_buffers
    if rows is None or unaligned or layout.offset % 2 != 0:
        box = buffer_of(ir.ExternKernel.copy_input(x))
        rows = (1, 0, box.get_size()[-1])
    return box, rows


def loadable_gain(gain: Any) -> Any:
    """The gain in a dtype and at an address that the kernel can load."""
    if gain is None:
        return None
    if gain.get_dtype() not in launch.LOADED:
        gain = to_dtype(gain, torch.float32)
    return loadable(gain)[0]


def loadable_scalar(value: Any, device: Any) -> Any:
    """A 0-d tensor where the kernel can read it: scalars of a graph may live on the CPU."""
    return None if value is None else buffer_of(to_device(value, device))
