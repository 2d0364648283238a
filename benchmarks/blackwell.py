"""A prediction for a B200 from machine code: no GPU is needed, and none was asked.

Compiles our row kernel for sm_100a (with that chip's instructions, and with those of sm_90 alone),
and every Triton kernel in Inductor's output code of a layer (``layer.py --code``), and predicts
each one's time from its bytes and its instructions.

    python benchmarks/blackwell.py layer_code/*.txt --write docs/blackwell.md
    python benchmarks/blackwell.py --widths 4096 --write blackwell.md
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paths  # noqa: F401
from kernellib import code, layers, sass
from kernellib.figures import moved_bytes
from kernellib.tables import number, table

WIDTHS = (2048, 3584, 4096, 5120, 8192, 16384)
ROWS = 16384
CAST = "e4m3/b32/rceil_log2/reciprocal/clamp/plain"
SWIZZLED = "e4m3/b32/rceil_exact/reciprocal/clamp/swizzled"
KERNELS: dict[str, dict[str, Any]] = {
    "exact, gain": {"rms": "exact", "rounding": "bf16->bf16", "gain": True},
    "p2, gain": {"rms": "p2", "rounding": "bf16->bf16", "gain": True},
    "p2, folded": {"rms": "p2", "rounding": "f32->f32", "gain": False},
    "exact, no gain": {"rms": "exact", "rounding": "f32->f32", "gain": False},
}
NORMS = ("ours", "norm", "norm with cast", "norm, backward", "cast", "dequantise")
# On that chip torchao's cast has the exact rule and lays scales out for the matmul.
CASTS = {"as on sm_90": (CAST, 1), "sm_100 instructions": (CAST, 2), "its cast": (SWIZZLED, 2)}


def own_kernels(widths: tuple[int, ...], residuals: tuple[bool, ...]) -> list[dict[str, Any]]:
    """Our row kernel in every form."""
    import torch

    from mxnorm_pass.ops.kernels.inspect import compile_row_kernel

    results = []
    for k in widths:
        for residual in residuals:
            for name, options in KERNELS.items():
                for form, (cast, hw) in CASTS.items():
                    compiled = compile_row_kernel(
                        100,
                        cast,
                        k,
                        rms=options["rms"],
                        rounding=options["rounding"],
                        gain=torch.bfloat16 if options["gain"] else None,
                        residual=torch.bfloat16 if residual else None,
                        hw=hw,
                        rows=ROWS,
                    )
                    per_warp, loops = sass.issued(compiled, 1)
                    moved = moved_bytes(ROWS, k, residual)
                    memory, issue = sass.seconds(moved, per_warp * compiled.warps * ROWS)
                    results.append(
                        {
                            "k": k,
                            "residual": residual,
                            "kernel": name,
                            "form": form,
                            "registers": compiled.registers,
                            "spills": compiled.spills,
                            "occupancy": compiled.occupancy,
                            "mix": sass.mix(compiled),
                            "per_element": compiled.instructions_per_element,
                            "loops": loops,
                            "memory": memory,
                            "issue": issue,
                        }
                    )
        print(f"compiled width {k}", flush=True)
    return results


def own_rows(results: list[dict[str, Any]]) -> Iterator[list[str]]:
    for r in results:
        bound = "memory" if r["memory"] >= r["issue"] else "issue"
        yield [
            str(r["k"]),
            "yes" if r["residual"] else "no",
            r["kernel"],
            r["form"],
            str(r["registers"]),
            str(r["spills"]),
            number(r["occupancy"], ".2f"),
            *(str(n) for n in r["mix"].values()),
            number(r["per_element"], ".2f"),
            number(r["memory"] * 1e3, ".4f"),
            number(r["issue"] * 1e3, ".4f"),
            f"{max(r['memory'], r['issue']) * 1e3:.4f} ({bound})",
        ]


def comparison(results: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Estimate and exact root side by side, the chip's own instructions and cast."""
    found = {(r["k"], r["residual"], r["form"], r["kernel"]): r for r in results}
    for k, residual, form in dict.fromkeys(key[:3] for key in found):
        times = [
            max(found[k, residual, form, name][b] for b in ("memory", "issue")) * 1e3
            for name in KERNELS
        ]
        counts = [found[k, residual, form, name]["per_element"] for name in KERNELS]
        yield [
            str(k),
            "yes" if residual else "no",
            form,
            *(number(c, ".2f") for c in counts),
            *(number(t, ".4f") for t in times),
            number(times[0] / times[1]),
            number(times[0] / times[2]),
            number(times[3] / times[2]),
        ]


def generated_kernels(path: Path, only: str) -> list[list[str]]:
    """Every kernel of one file of output code, ours with both sets of instructions."""
    rows = []
    for text, configs in code.graphs(path.read_text()):
        moved: dict[str, int] = {}
        for name, size in code.kernel_bytes(code.MARK.format(0) + "\n" + text):
            moved.setdefault(name, size)
        for name, (function, source) in code.triton_sources(text).items():
            kind = layers.class_of(name)
            if only == "norms" and kind not in NORMS:
                continue
            ours = "'HW': " in source
            for change in ({"HW": 1}, {"HW": 2}) if ours else (None,):
                label = f"`{name[:48]}`" + (f" HW={change['HW']}" if change else "")
                try:
                    found = sass.compile_generated(
                        name, function, source, configs.get(name), 100, change
                    )
                except Exception as error:
                    first = next(iter(str(error).splitlines()), "")
                    rows.append([label, kind, f"{type(error).__name__}: {first}", *[""] * 14])
                    continue
                if ours:
                    # The grid is the number of rows, and not in the kernel's text.
                    found.warp_instructions = (
                        launched_rows(text, name, source)
                        * found.compiled.instructions
                        * found.compiled.warps
                    )
                rows.append([label, kind, *generated_cells(found, moved.get(name))])
            print(f"{path.name}: {name[:70]}", flush=True)
    return rows


def generated_cells(found: sass.Generated, size: int | None) -> list[str]:
    total = found.warp_instructions
    memory, issue = sass.seconds(size or 0, total or 0)
    bound = "memory" if memory >= issue else "issue"
    known = size and total
    return [
        found.config,
        str(found.compiled.registers),
        str(found.compiled.spills),
        *(str(n) for n in sass.mix(found.compiled).values()),
        str(found.loops),
        number(None if size is None else size / 1e6, ".1f"),
        number(memory * 1e3 if size else None, ".4f"),
        number(issue * 1e3 if total else None, ".4f"),
        f"{max(memory, issue) * 1e3:.4f} ({bound})" if known else "–",
    ]


def launched_rows(text: str, name: str, source: str) -> int:
    """``rows`` in the launch of one of our kernels."""
    types = code.signature(source)
    if "rows" not in types:
        # The absmax kernel's grid is fixed, but its loop is not: no prediction.
        return 0
    place = list(types).index("rows")
    for line in text.splitlines():
        start = line.find(f"{name}.run(")
        if start >= 0:
            return int(code.arguments(line[start:])[place])
    return 0


def document(own: list[dict[str, Any]], files: dict[str, list[list[str]]]) -> str:
    """``docs/blackwell.md``."""
    kinds = [name for name, _ in sass.MIX]
    head = ["K", "residual", "kernel", "form", "registers", "spills", "occupancy"]
    tail = ["instr. / element", "memory", "issue", "prediction"]
    counts = [f"instr., {name}" for name in KERNELS]
    times = [f"ms, {name}" for name in KERNELS]
    ratios = ["exact / p2, gain", "exact, gain / p2, folded", "exact / p2, no gain"]
    text = [
        "# A prediction for a B200",
        "",
        "**Nothing here was measured on a Blackwell GPU.** `benchmarks/blackwell.py` compiles",
        "kernels for sm_100a with the Triton and the assembler that torch brings, counts the",
        "instructions in the machine code, and predicts times from them.",
        "",
        "## Assumptions",
        "",
        f"- Memory moves {sass.BANDWIDTH / 1e12:.0f} TB/s, the maker's figure. Copies reach some",
        "  90% of such a figure: true times are longer, of all kernels alike.",
        f"- {sass.MULTIPROCESSORS} multiprocessors with {sass.SCHEDULERS} schedulers each issue",
        f"  one warp instruction a cycle at {sass.CLOCK / 1e9:.2f} GHz. Instructions that issue at",
        "  half that rate or less (conversions, MUFU, shuffles) count as one: optimistic.",
        "- A kernel takes the longer of the two; launch, latency and the tail are left out.",
        "- Code is straight-line, each instruction issued once per warp, both sides of a branch",
        "  included; loops of Inductor's reductions are taken as often as their block says.",
        "- Bytes of Inductor's kernels: their tensors, each once.",
        "",
        f"## The row kernel, {ROWS} rows",
        "",
        f"MXFP8. `as on sm_90`: `{CAST}` without the chip's new instructions (HW=1);",
        "`sm_100 instructions`: the same with them (HW=2); `its cast`: the rule and the layout of",
        f"scales of torchao's kernels there, `{SWIZZLED}`. Milliseconds.",
        "",
        *table([*head, *kinds, *tail], own_rows(own)),
        "",
        "## Estimate against exact",
        "",
        "Instructions per element, predicted milliseconds, and ratios of times: what the estimate",
        "gains with the gain in the kernel, with it folded, and without any gain.",
        "",
        *table(["K", "residual", "form", *counts, *times, *ratios], comparison(own)),
    ]
    for name, rows in files.items():
        head = ["kernel", "class", "configuration", "registers", "spills", *kinds, "loops", "MB"]
        text += [
            "",
            f"## Inductor's kernels: {name}",
            "",
            "From output code that was generated on a GPU of sm_90: heuristics and configurations",
            "are those for that chip. Milliseconds.",
            "",
            *table([*head, "memory", "issue", "prediction"], rows),
        ]
    return "\n".join([*text, ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("code", type=Path, nargs="*", help="output code that layer.py wrote")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--only", choices=("all", "norms"), default="all")
    parser.add_argument("--no-residual", action="store_true", help="our kernel without it only")
    parser.add_argument("--write", type=Path, help="write the results as a document")
    args = parser.parse_args()
    start = time.perf_counter()
    own = own_kernels(tuple(args.widths), (False,) if args.no_residual else (False, True))
    files = {path.stem: generated_kernels(path, args.only) for path in args.code}
    text = document(own, files)
    if args.write:
        args.write.write_text(text)
    else:
        print(text)
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
