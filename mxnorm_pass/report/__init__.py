"""What the pass did: data, text, JSON, and the store that keeps it beside torch's caches."""

from mxnorm_pass.report.report import GraphReport, Report, RewriteError, SiteReport

__all__ = ["GraphReport", "Report", "RewriteError", "SiteReport"]
