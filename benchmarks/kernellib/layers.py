"""A layer's GPU time and bytes by class of kernel, and the document about them."""

from __future__ import annotations

import re
from typing import Any

from .code import MARK, kernel_bytes
from .tables import number, table

# In this order: the first that matches a kernel's name is its class.
CLASSES: tuple[tuple[str, str], ...] = (
    ("ours", r"rmsnorm_mxquant|rmsnorm_absmax"),
    ("attention", r"flash|fmha|attention|sdpa|cudnn"),
    ("matmul", r"gemm|nvjet|cutlass|matmul|xmma|wgmma|splitK|triton_tem|_mm_"),
    ("norm with cast", r"triton_(?=.*(rsqrt|rms_norm|mean))(?=.*amax)"),
    ("norm", r"triton_.*(rsqrt|rms_norm|mean)"),
    ("norm, backward", r"triton_.*div_expand_mul_pow_sum"),
    ("cast", r"triton_.*(amax|exp2|log2)"),
    ("dequantise", r"triton_poi_.*full_like_mul_ne"),
    ("copies", r"^Mem(cpy|set)"),
)
OTHER = "other"


def class_of(kernel: str) -> str:
    """By name: Inductor names a kernel after the ops in it."""
    for name, pattern in CLASSES:
        if re.search(pattern, kernel):
            return name
    return OTHER


def by_class(work: list[tuple[str, float]]) -> dict[str, Any]:
    """Milliseconds and launches by class, and every kernel."""
    classes: dict[str, dict[str, float]] = {}
    kernels: dict[str, dict[str, float]] = {}
    for name, microseconds in work:
        for key, table_ in ((class_of(name), classes), (name[:160], kernels)):
            entry = table_.setdefault(key, {"ms": 0.0, "launches": 0})
            entry["ms"] += microseconds / 1e3
            entry["launches"] += 1
    return {
        "classes": {a: {**b, "ms": round(b["ms"], 4)} for a, b in sorted(classes.items())},
        "kernels": dict(sorted(kernels.items(), key=lambda item: -item[1]["ms"])),
        "launches": len(work),
    }


def numbered(codes: list[str]) -> list[str]:
    """Generated graphs with the marks between them that :func:`.code.kernel_bytes` looks for."""
    return [line for i, code in enumerate(codes) for line in (MARK.format(i), code)]


def bytes_by_class(text: str) -> dict[str, int]:
    """Estimated bytes of Triton kernels by class, forward and backward together."""
    totals: dict[str, int] = {}
    for kernel, moved in kernel_bytes(text):
        name = class_of(kernel)
        totals[name] = totals.get(name, 0) + moved
    return totals


def document(result: dict[str, Any]) -> str:
    """``docs/layer.md``."""
    sizes = result["sizes"]
    text = [
        "# One decoder layer",
        "",
        f"{result['machine']}, torch {result['torch']}. Output of `benchmarks/layer.py`: a decoder",
        f"layer of Llama 3 8B (hidden {sizes['hidden_size']}, feed-forward",
        f"{sizes['intermediate_size']}, {sizes['num_attention_heads']} heads over",
        f"{sizes['num_key_value_heads']}), bfloat16, random weights, one sequence of",
        f"{result['tokens']} tokens. Linears are torchao's, emulated: MXFP8 casts, then a matmul",
        "in bfloat16, because this chip has none for MXFP8. Matmuls therefore take a larger share",
        "of the time than on a chip that has one, and the layer gains less. Median of 30",
        "iterations by CUDA events, the backends in turn.",
        "",
        "Classes are by the profiler, from kernels' names: Inductor names a kernel after its ops.",
        "In training a cast that multiplies by a norm's root counts as a cast. Emulation treats",
        "the backends differently: Inductor casts and dequantises in one kernel and never writes",
        "codes; our op writes codes as for a chip that multiplies them, and a kernel of class",
        "`dequantise` reads them again. On such a chip neither has that step.",
    ]
    for kind in ("training", "inference"):
        entries = [e for e in result["entries"] if e["kind"] == kind and e.get("steps")]
        if not entries:
            continue
        text += ["", f"## {kind.capitalize()}", ""]
        base = next((e for e in entries if e["backend"] == "inductor"), None)
        rows = []
        for entry in entries:
            for name, step in entry["steps"].items():
                speedup = None if base is None else base["steps"][name]["ms"] / step["ms"]
                rows.append(
                    [
                        name,
                        entry["backend"],
                        number(step["ms"]),
                        f"{number(step['p10'])}–{number(step['p90'])}",
                        number(speedup),
                        str(step.get("launches", "–")),
                        number(step["peak"] / 1e9, ".2f"),
                        str(entry.get("rewritten", "–")),
                        number(entry.get("sqnr"), ".1f"),
                    ]
                )
        rows.sort(key=lambda row: row[0])
        head = [
            "step",
            "backend",
            "ms",
            "p10–p90",
            "speedup",
            "kernels",
            "peak GB beyond weights",
            "sites",
        ]
        text += table([*head, "SQNR dB of the output against `inductor`'s"], rows)
        names = [c for c, _ in CLASSES] + [OTHER]
        text += ["", "Milliseconds by class of kernel:", ""]
        found = [
            (name, entry["backend"], step["classes"])
            for entry in entries
            for name, step in entry["steps"].items()
            if "classes" in step
        ]
        found.sort(key=lambda item: item[0])
        text += table(
            ["step", "backend", *names],
            [
                [
                    name,
                    backend,
                    *(number(classes[c]["ms"]) if c in classes else "–" for c in names),
                ]
                for name, backend, classes in found
            ],
        )
        text += ["", "MB of the Triton kernels' tensors, each counted once per launch (forward"]
        text += ["and, in training, backward together), estimated from the generated code:", ""]
        text += table(
            ["backend", *names, "all"],
            [
                [
                    entry["backend"],
                    *(number(entry["estimated"].get(c, 0) / 1e6, ".0f") for c in names),
                    number(sum(entry["estimated"].values()) / 1e6, ".0f"),
                ]
                for entry in entries
            ],
        )
    for what in result["skipped"]:
        text += ["", f"Left out for lack of time: {what}."]
    for failure in result["failed"]:
        text += ["", f"Failed: {failure['what']}."]
    return "\n".join([*text, ""])
