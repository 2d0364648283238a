"""The ops that rewritten sites call: schema, fake tensors, decomposition, Inductor lowering."""

from mxnorm_pass.ops.lowering import register as register_lowering
from mxnorm_pass.ops.rmsnorm_mxquant import ABSMAX_OP, ADD_OP, OP, OPS, rmsnorm_mxquant

__all__ = ["ABSMAX_OP", "ADD_OP", "OP", "OPS", "rmsnorm_mxquant"]

register_lowering()
