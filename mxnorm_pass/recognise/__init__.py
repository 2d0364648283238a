"""Recognition: graph -> sites with specs. Nothing here changes a graph."""

from mxnorm_pass.recognise.sites import Found, Site, find_sites

__all__ = ["Found", "Site", "find_sites"]
