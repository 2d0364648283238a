"""Bytes and time that a rewritten site saves on a named chip: a prediction, with its arithmetic.

What is compared is torch.compile's two kernels per site, which is what was measured on an H200
(docs/kernels.md): the norm reads the row and writes ``y``, the cast reads ``y`` and writes codes
and scales. Ours reads the row and writes codes, scales and rstd. The residual add moves the same
bytes in both. So ``y`` written and read back, ``2 M K`` elements, and one launch are saved; where
something else reads ``y`` too, it has to be formed all the same, and nothing is saved.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mxnorm_pass.formats import ELEMENTS
from mxnorm_pass.ops.kernels.constants import MAX_COLUMNS

LAUNCH_SECONDS = 1.5e-6
"""A kernel that moves next to nothing, in a CUDA graph on an H200: .0015 ms in docs/kernels.md."""
YIELD = 0.95
"""Of the bytes saved, what shows as time: median over docs/kernels.json, where part of ``y`` is
still in the L2 cache when the cast reads it. ``tests/test_cli_savings.py`` compares them all.
"""


@dataclass(frozen=True)
class Chip:
    """A GPU by its name on the command line.

    Attributes:
        capability: compute capability.
        bandwidth: bytes per second of its memory.
        source: where that figure is from.
        mx_matmul: it multiplies MX codes; without that a whole model gains nothing.
    """

    name: str
    capability: tuple[int, int]
    bandwidth: float
    source: str
    mx_matmul: bool

    @property
    def hardware(self) -> int:
        """The kernel's HW level there: 1 from sm_90, 2 (FP4 and E8M0 conversions) from sm_100."""
        return 2 if self.capability >= (10, 0) else 1


_MAKER = "the maker's figure"
CHIPS = {
    c.name: c
    for c in (
        Chip("h100", (9, 0), 3.35e12, _MAKER, False),
        Chip("h200", (9, 0), 4.27e12, "a copy, measured; docs/kernels.md", False),
        Chip("b200", (10, 0), 8e12, _MAKER, True),
        Chip("gb200", (10, 0), 8e12, _MAKER, True),
        Chip("b300", (10, 3), 8e12, _MAKER, True),
        Chip("gb300", (10, 3), 8e12, _MAKER, True),
        Chip("rtx5090", (12, 0), 1.792e12, _MAKER, True),
        Chip("rtxpro6000", (12, 0), 1.792e12, _MAKER, True),
    )
}


@dataclass(frozen=True)
class Traffic:
    """Bytes of one site in one forward, before and after, and kernel launches.

    ``before`` and ``after`` leave out what both move: a residual add, the matmul.
    """

    before: int
    after: int
    launches_before: int
    launches_after: int
    why: str = ""
    """Why it is not the usual ``2 M K`` elements."""

    @property
    def saved(self) -> int:
        """Bytes that no longer move; negative where more do."""
        return self.before - self.after

    @property
    def launches(self) -> int:
        """Launches that are gone."""
        return self.launches_before - self.launches_after

    def seconds(self, chip: Chip) -> float:
        """``YIELD * saved / bandwidth + launches * LAUNCH_SECONDS``."""
        return YIELD * self.saved / chip.bandwidth + self.launches * LAUNCH_SECONDS

    def describe(self) -> dict[str, object]:
        """As JSON types."""
        return {**asdict(self), "saved": self.saved, "launches": self.launches}


def traffic(
    rows: int,
    k: int,
    itemsize: int,
    element: str,
    block: int,
    *,
    read_elsewhere: bool = False,
    measured_tensor_scale: bool = False,
) -> Traffic:
    """Bytes of a site of ``rows`` rows of ``k`` elements.

    Args:
        rows: M.
        k: K.
        itemsize: bytes per element of the row and of the norm's output.
        element: name in :data:`mxnorm_pass.formats.ELEMENTS`.
        block: elements per scale of one byte.
        read_elsewhere: something reads the norm's output without the cast.
        measured_tensor_scale: NVFP4's per-tensor scale, measured in a pass ahead of the op.
    """
    y = rows * k * itemsize
    spec = ELEMENTS[element]
    codes = rows * k // spec.per_byte
    stored = codes + rows * (k // block)
    before, after = y + y + y + stored, y + stored + 4 * rows
    launches_before, launches_after = 2, 1
    why = ""
    if k > MAX_COLUMNS:
        return Traffic(0, 0, 0, 0, f"rows of more than {MAX_COLUMNS} elements have no kernel")
    if measured_tensor_scale:
        after += y
        launches_after += 1
        why = "the maximum for NVFP4's per-tensor scale reads the row once more"
    if read_elsewhere:
        after += y + y
        launches_after += 1
        why = "the norm's output is formed all the same, for what else reads it"
    return Traffic(before, after, launches_before, launches_after, why)


def size(count: float) -> str:
    """Bytes in powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.4g} TB"


def duration(seconds: float) -> str:
    """Milliseconds, or microseconds below a tenth of one."""
    if abs(seconds) < 1e-4:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.3g} ms"
