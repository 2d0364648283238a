"""The column kernel's constants, its table of tiles, and its launch on tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxnorm_pass.formats import ELEMENTS, SWIZZLE_COLUMNS, SWIZZLE_ROWS, Cast, output_shapes
from mxnorm_pass.ops.kernels import launch
from mxnorm_pass.ops.kernels.cols import rmsnorm_mxquant_colwise_kernel
from mxnorm_pass.ops.kernels.constants import cast_constants


@dataclass(frozen=True)
class Tile:
    """How rows are cut: ``columns`` times ``blocks`` of tokens, on ``warps`` warps.

    ``lanes`` lanes of a warp share the tokens of a block; the others lie along columns, 16 bytes
    each. ``group`` tiles lie one below the other before the next columns are taken.
    """

    columns: int
    blocks: int
    lanes: int
    warps: int
    group: int


def tile_of(block: int, x: torch.dtype, out: torch.dtype) -> Tile:
    """The tile for blocks of ``block`` tokens of rows ``x``, cast from ``out``.

    Warps hold whole blocks. A thread has 16 loads of 16 bytes in flight where what it makes of them
    stays in words of bfloat16, else 8 as far as whole blocks allow. Blocks come in fours, as in the
    swizzled layout. Measured on an H200, see ``docs/colwise.md``.
    """
    wide = x is torch.float32
    columns, lanes = (32 if wide else 64), min(4, block // 4)
    if block == 128:
        columns, lanes = columns // 2, 8
    loads = 8 if wide or out is torch.float32 else 16
    blocks = max(1, loads // (block // lanes))
    return Tile(columns, 4 * blocks, lanes, 4, 4)


def tiles(blocks: Any, k: int, cast: Cast, tile: Tile) -> Any:
    """Programs: also what pads the swizzled layout is written, by zero."""
    if cast.layout == "swizzled":
        k = -(-k // SWIZZLE_ROWS) * SWIZZLE_ROWS
        blocks = (blocks + SWIZZLE_COLUMNS - 1) // SWIZZLE_COLUMNS * SWIZZLE_COLUMNS
    return (blocks + tile.blocks - 1) // tile.blocks * -(-k // tile.columns)


def constants(
    cast: Cast,
    k: int,
    rounding: tuple[torch.dtype, torch.dtype],
    hw: int,
    tile: Tile,
    *,
    split: bool = False,
) -> dict[str, Any]:
    """The column kernel's compile-time constants; see :func:`.constants.constants`."""
    return {
        "K": k,
        "BLOCK": cast.block_size,
        "COLUMNS": tile.columns,
        "BLOCKS": tile.blocks,
        "LANES": tile.lanes,
        "GROUP": tile.group,
        "X_SPLIT": split,
        "NORM_BF16": rounding[0] is torch.bfloat16,
        "OUT_BF16": rounding[1] is torch.bfloat16,
        **cast_constants(cast),
        "HW": hw,
    }


def rmsnorm_mxquant_colwise(
    x: Tensor,
    rstd: Tensor,
    gain: Tensor | None,
    tensor_scale: Tensor | None,
    rounding: tuple[torch.dtype, torch.dtype],
    cast: Cast,
    hw: int,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the column kernel on tensors; ``tile`` is the table's unless given."""
    k, blocks = x.shape[-1], math.prod(x.shape[:-1]) // cast.block_size
    tile = tile or tile_of(cast.block_size, x.dtype, rounding[1])
    x, (inner, outer_stride, stride) = launch.loadable(x)
    shapes = output_shapes([k], blocks * cast.block_size, cast)
    qdata = x.new_empty(shapes[0], dtype=ELEMENTS[cast.element].dtype)
    scale = x.new_empty(shapes[1], dtype=cast.scale_dtype)
    if blocks:
        rmsnorm_mxquant_colwise_kernel[(tiles(blocks, k, cast, tile),)](
            x, rstd.contiguous(),
            launch.loadable_gain(gain), launch.loadable_scalar(tensor_scale, x),
            qdata.view(torch.uint8), scale.view(torch.uint8),
            blocks, inner, outer_stride, stride,
            **constants(cast, k, rounding, hw, tile, split=inner != 1),
            num_warps=tile.warps,
        )  # fmt: skip
    return qdata, scale
