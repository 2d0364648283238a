"""What the sites of a whole model save on a chip."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mxnorm_pass.cli.groups import SiteGroup
from mxnorm_pass.cli.savings import LAUNCH_SECONDS, YIELD, Chip, duration, size
from mxnorm_pass.cli.whole import Whole


@dataclass
class Total:
    """Sums over the rewritten sites of one forward of a whole model."""

    whole: Whole
    chip: Chip

    @property
    def groups(self) -> list[SiteGroup]:
        """Rewritten sites whose traffic is known."""
        return [g for g in self.whole.sites if g.status == "rewritten" and g.traffic is not None]

    @property
    def unknown(self) -> int:
        """Rewritten sites whose norm is no module, so that its rows are not known."""
        return sum(g.count for g in self.whole.sites if g.status == "rewritten" and not g.traffic)

    @property
    def bytes(self) -> int:
        """No longer moved in a forward."""
        return sum(g.count * g.traffic.saved for g in self.groups if g.traffic)

    @property
    def launches(self) -> int:
        """Fewer in a forward."""
        return sum(g.count * g.traffic.launches for g in self.groups if g.traffic)

    @property
    def seconds(self) -> float:
        """Predicted: ``YIELD * bytes / bandwidth + launches * LAUNCH_SECONDS``."""
        return YIELD * self.bytes / self.chip.bandwidth + self.launches * LAUNCH_SECONDS

    @property
    def arithmetic(self) -> str:
        """The prediction in figures."""
        return (
            f"{YIELD:g} x {size(self.bytes)} / {self.chip.bandwidth / 1e12:g} TB/s + "
            f"{self.launches} launches x {LAUNCH_SECONDS * 1e6:g} us = {duration(self.seconds)}"
        )

    def describe(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "chip": {**asdict(self.chip), "kernel_hardware_level": self.chip.hardware},
            "predicted": True,
            "per": f"forward of {self.whole.tokens} tokens",
            "bytes": self.bytes,
            "launches": self.launches,
            "seconds": self.seconds,
            "yield": YIELD,
            "launch_seconds": LAUNCH_SECONDS,
            "arithmetic": self.arithmetic,
            "sites_of_unknown_size": self.unknown,
        }
