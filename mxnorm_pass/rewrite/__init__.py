"""Rewriting: sites -> changed graph. All changes of a site succeed together or not at all."""

from mxnorm_pass.rewrite.columns import rewrite_columns
from mxnorm_pass.rewrite.edit import Edit
from mxnorm_pass.rewrite.residual import absorb, residual_sum
from mxnorm_pass.rewrite.site import Applied, rewrite_site

__all__ = ["Applied", "Edit", "absorb", "residual_sum", "rewrite_columns", "rewrite_site"]
