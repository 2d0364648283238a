"""The op that a rewritten site calls: schema, fake tensors, decomposition, Inductor lowering."""

from mxnorm_pass.ops.lowering import register as register_lowering
from mxnorm_pass.ops.rmsnorm_mxquant import ABSMAX_OP, OP, rmsnorm_mxquant

__all__ = ["ABSMAX_OP", "OP", "rmsnorm_mxquant"]

register_lowering()
