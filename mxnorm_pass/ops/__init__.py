"""The ops that rewritten sites call: schema, fake tensors, decomposition, Inductor lowering."""

from mxnorm_pass.ops.colwise import COLWISE_OP, rmsnorm_mxquant_colwise
from mxnorm_pass.ops.lowering import register as register_lowering
from mxnorm_pass.ops.rmsnorm_mxquant import ABSMAX_OP, ADD_OP, OP, OPS, rmsnorm_mxquant

__all__ = [
    "ABSMAX_OP",
    "ADD_OP",
    "COLWISE_OP",
    "OP",
    "OPS",
    "rmsnorm_mxquant",
    "rmsnorm_mxquant_colwise",
]

register_lowering()
