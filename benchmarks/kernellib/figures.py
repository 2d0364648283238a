"""From the sweep's file to figures: shares of the limit, speedups, targets."""

from __future__ import annotations

from typing import Any

SHARES = ((80e6, 0.97), (16e6, 0.92))
"""Least share of the copy limit, by elements."""
ALLOWED_FROM, ALLOWED_SHARE = 16e6, 0.95
"""From how many elements, and how much of the speedup that the limit allows, is wanted."""
FEW_ROWS, FEW_SPEEDUP = 256, 1.4
OURS = ("ours_exact", "ours_p2", "ours_p2_folded")


def moved_bytes(m: int, k: int, residual: bool) -> int:
    """Bytes that a fused kernel has to move; the gain (2 K, from cache) is left out.

    x, codes, scales, rstd; with a residual that is read and the sum written.
    """
    elements = m * k
    return (6 if residual else 2) * elements + elements + elements // 32 + 4 * m


def merge(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Several parts of one sweep as one; what is said once is the first part's."""
    first = dict(results[0])
    for other in results[1:]:
        for name in ("rows", "copies", "notes", "failed", "skipped"):
            first[name] = first.get(name, []) + other.get(name, [])
        first["unavailable"] = {**other.get("unavailable", {}), **first.get("unavailable", {})}
        for name in ("nvfp4", "instructions", "ncu"):
            first[name] = first.get(name) or other.get(name)
        first["seconds"] = first.get("seconds", 0.0) + other.get("seconds", 0.0)
    return first


def shape_of(row: dict[str, Any]) -> tuple[int, int, bool]:
    return row["m"], row["k"], row["residual"]


class Figures:
    """Looks rows up and puts them in relation."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = result
        self.bandwidth = result["copy"]["copy"]
        self.rows = {(*shape_of(r), r["variant"]): r for r in result["rows"]}
        self.copies = {shape_of(r): r for r in result["copies"]}

    @property
    def shapes(self) -> list[tuple[int, int, bool]]:
        """Those that were measured."""
        return sorted(self.copies, key=lambda s: (s[2], s[1], s[0]))

    def ms(self, shape: tuple[int, int, bool], variant: str) -> float | None:
        row = self.rows.get((*shape, variant))
        return None if row is None else row["ms"]

    def limit_ms(self, shape: tuple[int, int, bool]) -> float:
        """Bytes over the bandwidth of the large copy."""
        return moved_bytes(*shape) / self.bandwidth * 1e3

    def copy_share(self, shape: tuple[int, int, bool]) -> float:
        """Share of the limit that a copy of as many bytes reaches."""
        return self.limit_ms(shape) / float(self.copies[shape]["ms"])

    def derive(self, row: dict[str, Any]) -> dict[str, float | None]:
        """Everything that is printed of a row."""
        shape = shape_of(row)
        limit, copy = self.limit_ms(shape), self.copies[shape]["ms"]
        baseline = self.ms(shape, "compile")
        return {
            "ms": row["ms"],
            "spread": (row["p90"] - row["p10"]) / row["ms"],
            "gb_s": row["bytes"] / row["ms"] * 1e-6,
            "share": limit / row["ms"],
            "share_copy": copy / row["ms"],
            "speedup": None if baseline is None else baseline / row["ms"],
            "allowed": None if baseline is None else baseline / limit,
            # The limit says nothing about launch and tail, which the copy has too.
            "speedup_copy": None if baseline is None else baseline / copy,
        }

    def targets(self) -> list[tuple[bool, str]]:
        """Each target at each shape that it is for, and whether it is met."""
        lines = []
        for shape in self.shapes:
            m, k, residual = shape
            for variant in OURS:
                row = self.rows.get((*shape, variant))
                if row is None:
                    continue
                figures = self.derive(row)
                where = f"{variant} {m} x {k}{' +residual' if residual else ''}"
                for least, wanted in SHARES:
                    if m * k >= least:
                        share = figures["share"] or 0.0
                        text = f"{where}: share {share:.3f} >= {wanted}"
                        text += f"; a copy of as many bytes has {self.copy_share(shape):.3f}"
                        lines.append((share >= wanted, text))
                        break
                speedup, allowed = figures["speedup"], figures["allowed"]
                if speedup is None or allowed is None:
                    lines.append((False, f"{where}: no torch.compile figure to compare with"))
                    continue
                if m * k >= ALLOWED_FROM:
                    wanted = ALLOWED_SHARE * allowed
                    text = f"{where}: speedup {speedup:.2f} >= {wanted:.2f} (.95 of {allowed:.2f})"
                    text += f"; such a copy would be {figures['speedup_copy']:.2f}"
                    lines.append((speedup >= wanted, text))
                if m <= FEW_ROWS:
                    text = f"{where}: speedup {speedup:.2f} >= {FEW_SPEEDUP}"
                    lines.append((speedup >= FEW_SPEEDUP, text))
        return lines


def short(figures: Figures) -> list[str]:
    """What the page says, before its tables: ranges over the shapes, misses among them."""
    large, least = SHARES[0]

    def span(variant: str, figure: str, shapes: list[tuple[int, int, bool]]) -> str:
        rows = [figures.rows[(*s, variant)] for s in shapes if (*s, variant) in figures.rows]
        found = [v for r in rows if (v := figures.derive(r)[figure]) is not None]
        return f"{min(found):.2f} to {max(found):.2f}" if found else "–"

    def speedups(shapes: list[tuple[int, int, bool]]) -> str:
        return (
            f"{span('ours_p2_folded', 'speedup', shapes)}x torch.compile's speed "
            f"({span('ours_exact', 'speedup', shapes)}x with the true RMS)"
        )

    whole, residual = (
        [s for s in figures.shapes if s[0] * s[1] >= large and s[2] is added]
        for added in (False, True)
    )
    few = [s for s in figures.shapes if s[0] <= FEW_ROWS]
    met = [ok for ok, _ in figures.targets()]
    return [
        f"- From {large / 1e6:.0f}M elements on, `ours p2 folded` takes {speedups(whole)}, and",
        f"  {span('ours_p2_folded', 'share', whole)} of the copy limit (wanted: {least}).",
        f"- The same with a residual add: {speedups(residual)}, and",
        f"  {span('ours_p2_folded', 'share', residual)} of the limit.",
        f"- Up to {FEW_ROWS} rows: {speedups(few)}.",
        f"- {met.count(True)} of {len(met)} targets are met; each miss stands under "
        "[Targets](#targets).",
    ]
