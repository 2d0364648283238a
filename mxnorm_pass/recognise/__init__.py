"""Recognition: graph -> sites with specs. Nothing here changes a graph."""

from mxnorm_pass.recognise.sites import Declined, Found, Site, find_sites

__all__ = ["Declined", "Found", "Site", "find_sites"]
