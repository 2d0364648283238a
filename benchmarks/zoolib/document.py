"""docs/zoo.md from the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from zoolib.run import verdict

Result = dict[str, Any]

_HEAD = """# The zoo

`benchmarks/zoo.py` builds a tiny model of every architecture of transformers {transformers} (one
per model type) whose source speaks of an RMSNorm, quantises it, and compares what the pass does
with what an oracle sees that reads no graph. This file is its output ({where},
torchao {torchao}); `make zoo`, or `python benchmarks/zoo.py --jobs 2 --write docs/zoo.md`, makes it
again, on a GPU with `MXNORM_ZOO_DEVICE=cuda`.

## How

- **Model.** The default configuration with small numbers: hidden size 64, one layer of each kind
  that the configuration tells apart (attention that differs in its mask alone is one kind),
  bfloat16, parameters as the model initialises them, from a seed; every norm's gain perturbed by
  30%, norms with a bias too. The causal LM where there is one, else the base model. One sequence
  of 32 random tokens, or images and features that give rows in multiples of 32. No dropout, no
  cache.
- **What is quantised.** Every `nn.Linear` inside a list of layers whose `in_features` and
  `out_features` are multiples of 32, but routers and heads (`router`, `lm_head`, `score`,
  `classifier`; a `gate` has one output per expert, which is no multiple here). In training also
  only linears whose rows are a multiple of 32, since the weight's gradient is a product of casts
  along the rows. Experts held as 3-D parameters are no `nn.Linear` and stay as they are.
  Inference: `MXDynamicActivationMXWeightConfig`; training: `MXFP8TrainingOpConfig`, before
  torch 2.12 `MXFP8Linear`; all e4m3, RCEIL, emulated.
- **Oracle.** Hooks on an eager forward. A module is an RMSNorm when, in float64, its output is
  `x*rsqrt(mean(x^2)+eps)` times one gain per column, on its own input and on probes with rows of
  many sizes and means. A module of several inputs (a gate is applied first) is one when, on
  noise, its output over its gain has rows of mean square 1, not centred, and not in parts. A site
  is a pair (norm, linear): the linear's input rows are, bit for bit, among the rows that this
  norm put out last.
- **Pass.** One `torch.compile` with `rms="exact"` and the gain in the op. Each graph (in training
  the joint graph of forward and backward, decomposed as for Inductor) is run as it is and
  rewritten, on the same real inputs and seeded tangents, and every output and gradient compared
  bit for bit; where they differ, the worst signal to noise ratio is given.
- **missed**: the oracle has the pair, the pass neither rewrote nor declined it. **false**: the
  pass rewrote a pair that the oracle lacks. Both are failures, and the command's exit status.
"""


def document(results: list[Result], others: list[Result] | None = None) -> str:
    """The whole page; of ``others``, results from somewhere else, the totals."""
    head = _HEAD.format(
        where=places(results), **{n: version(n) for n in ("transformers", "torchao")}
    )
    names = sorted({r["name"] for r in results})
    by = {(r["name"], r["kind"]): r for r in results}
    ran = {n: [r for k in KINDS if (r := by.get((n, k))) and "error" not in r] for n in names}
    normed = [n for n in names if any(r["norms"] for r in ran[n])]
    sites = [n for n in normed if any(r["pairs"] or r["false"] for r in ran[n])]
    parts = [
        head,
        "## Totals\n",
        totals(normed, by),
        *also(others or []),
        "\n## Architectures with sites\n",
        "Sites: true / rewritten / declined / missed / false. Outputs and gradients: of the "
        "rewritten graph against the graph as it was.\n",
        site_table(sites, by),
        "\n## Declined\n",
        declined_table(results),
        "\n## Architectures without a site\n",
        "Their RMSNorms reach no quantised linear.\n",
        bare_table([n for n in normed if n not in sites], ran),
        "\n## No module behaves as an RMSNorm\n",
        ", ".join(n for n in names if ran[n] and n not in normed) + ".\n",
        "\n## Not built, not run or not compiled\n",
        error_table(results),
    ]
    return "\n".join(parts).rstrip() + "\n"


KINDS = ("infer", "train")


def places(results: list[Result]) -> str:
    """What the checks ran on."""
    return " and ".join(sorted({r["where"] for r in results if "where" in r})) or "unknown"


def totals(normed: list[str], by: dict[tuple[str, str], Result]) -> str:
    """Sums per kind."""
    lines = [
        "| | architectures | true | rewritten | declined | missed | false | bitwise | breaks |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        rows = [r for n in normed if (r := by.get((n, kind))) and "error" not in r]
        if not rows:
            continue
        counts = [
            sum(len(r[key]) for r in rows)
            for key in ("pairs", "rewritten", "declined", "missed", "false")
        ]
        tensors = sum(r[p]["total"] for r in rows for p in ("outputs", "gradients"))
        same = tensors - sum(r[p]["different"] for r in rows for p in ("outputs", "gradients"))
        breaks = sum(r["graphs"] > 1 for r in rows)
        word = {"infer": "inference", "train": "training"}[kind]
        lines.append(
            f"| {word} | {len(rows)} | {' | '.join(map(str, counts))} | "
            f"{same} of {tensors} tensors | {breaks} |"
        )
    seconds = [r["seconds"] for r in by.values() if "error" not in r and r["graphs"]]
    if seconds:
        lines.append(f"\n{sum(seconds) / len(seconds):.0f} s per check on average.")
    return "\n".join(lines) + "\n"


def also(others: list[Result]) -> list[str]:
    """Totals of another run, and what it missed or has false, by name."""
    if not others:
        return []
    by = {(r["name"], r["kind"]): r for r in others}
    normed = sorted({r["name"] for r in others if "error" not in r and r["norms"]})
    return [f"\nThe same on {places(others)}:\n", totals(normed, by)]


def site_table(names: list[str], by: dict[tuple[str, str], Result]) -> str:
    """One row per architecture that has a site."""
    lines = [
        "| architecture | class | inference | outputs | training | outputs | gradients | reasons |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        cells = [name]
        found = [by.get((name, kind)) for kind in KINDS]
        ran = [r for r in found if r and "error" not in r]
        cells.append(ran[0]["cls"])
        for kind, result in zip(KINDS, found, strict=True):
            compared = ("outputs",) if kind == "infer" else ("outputs", "gradients")
            if result is None or "error" in result:
                cells += ["not run" if result is None else "failed", *["-"] * len(compared)]
                continue
            cells.append(numbers(result))
            cells += [verdict(result[part]) for part in compared]
        cells.append(reasons(ran))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def numbers(result: Result) -> str:
    """The five counts; the last three stand out where they are not zero."""
    keys = ("pairs", "rewritten", "declined", "missed", "false")
    counts = [len(result[key]) for key in keys]
    bad = any(counts[3:])
    text = " / ".join(map(str, counts))
    return f"**{text}**" if bad else text


def reasons(results: Iterable[Result]) -> str:
    """Reasons of declined pairs."""
    count = Counter(reason for r in results for _, _, reason, _ in r["declined"])
    return ", ".join(f"`{reason}` {n}" for reason, n in sorted(count.items()))


def declined_table(results: list[Result]) -> str:
    """Every declined pair with what the pass said; linears of one norm on one line."""
    grouped: dict[tuple[str, str, str, str], dict[str, set[str]]] = {}
    for result in results:
        for norm, linear, reason, detail in result.get("declined", []):
            # Node names differ between kinds of graph.
            text = detail.splitlines()[0].partition(" (at ")[0] if detail else ""
            kinds = grouped.setdefault((result["name"], norm, reason, text), {})
            kinds.setdefault(result["kind"], set()).add(linear)
    lines = [
        "| architecture | norm | linears | kind | reason | detail |",
        "|---|---|---|---|---|---|",
    ]
    for (name, norm, reason, text), kinds in sorted(grouped.items()):
        linears = sorted({linear for found in kinds.values() for linear in found})
        lines.append(
            f"| {name} | {norm} | {', '.join(linears)} | {', '.join(sorted(kinds))} | `{reason}` | "
            f"{text.replace('|', chr(92) + '|')} |"
        )
    return "\n".join(lines) + "\n"


def bare_table(names: list[str], ran: dict[str, list[Result]]) -> str:
    """Architectures whose norms feed no quantised linear, and why."""
    lines = [
        "| architecture | class | RMSNorms | quantised linears | why |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        result = ran[name][0]
        lines.append(
            f"| {name} | {result['cls']} | {result['norms']} | {result['linears']} | "
            f"{why(result)} |"
        )
    return "\n".join(lines) + "\n"


def why(result: Result) -> str:
    """What the norms of an architecture without a site do, by where they stand."""
    if not result["linears"]:
        return "no linear is quantised"
    paths = [path.lower() for path in result.get("norm_paths", [])]
    inside = [p for p in paths if any(part.isdigit() for part in p.split("."))]
    if not inside:
        return "norms outside the layers only"
    heads = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm", "qk_norm")
    if all(any(h in p.rpartition(".")[2] for h in heads) for p in inside):
        return "query and key norms only"
    if any("post" in p.rpartition(".")[2] for p in inside):
        return "norms stand after the sublayers"
    return "no norm's rows reach a linear as they are"


def error_table(results: list[Result]) -> str:
    """What failed, and with what; one line where both kinds fail alike."""
    lines = ["| architecture | kind | stage | error |", "|---|---|---|---|"]
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        if "error" in result:
            key = (result["name"], result["stage"], result["error"])
            grouped.setdefault(key, []).append(result["kind"])
    for (name, stage, error), kinds in sorted(grouped.items()):
        text = " ".join(error.replace("|", "\\|").split())
        lines.append(f"| {name} | {', '.join(sorted(kinds))} | {stage} | {text} |")
    return "\n".join(lines) + "\n"
