"""docs/memory.md from measured numbers."""

from __future__ import annotations

from typing import Any

VARIANTS = {None: "unrewritten", "exact": "true RMS", "estimate": "estimate"}
"""Names of :data:`memory.CONFIGS` in the tables."""

_HEAD = """# Memory and activation checkpointing

Output of `benchmarks/memory.py`: one decoder layer of Llama 3's form, bfloat16, torchao's
`MXFP8Linear` (emulated), two sites, with the pass and without.
"""

_RUN = """
## {machine}

torch {torch}; hidden {hidden_size}, feed-forward {intermediate_size}, {num_attention_heads} heads
over {num_key_value_heads}; one sequence of {tokens} tokens.
"""

_EAGER = """
The layer is traced once through Dynamo and AOTAutograd, each
policy answers what torch's selective checkpointing asked, the pass is applied and the graph is
cut by the partitioner that Inductor uses. Bytes saved are those of the forward graph's outputs
for the backward, without the layer's own input (the residual stream keeps that) and parameters.
Both halves then run op by op, and the peak is the running sum of the profiler's memory events,
beyond parameters and input. **Saved bytes are what any device saves. The peak is not that of a
GPU**: casts run op by op in float32 here, where Inductor's kernels keep such values in registers.
What it shows is the difference that the pass makes on this route.
"""

_COMPILED = """
Each policy is compiled by itself with `torch.compile`. Bytes saved are what the allocator holds
after the forward beyond parameters, input and output; the peak is the most that it held in a
step, beyond parameters and input. Each line is one step of one process. What lines differ by is
multiples of 2^19 bytes; an activation's scales are 2^20, as are attention's saved logarithms: which
of them it is was not established.
"""

_TAIL = """
## How to read it

- **none**: the partitioner weighs for itself. A site hands on its row (the residual stream:
  `sum`, in the place of the matmul's output or the addition that was saved before) and one
  float32 per row, `rstd`, in the place of `rsqrt`. Codes, scales and bfloat16 `y` are not saved:
  the cast along tokens is made in the backward from the row and `rstd`.
- **full** (`torch.utils.checkpoint` around each layer, transformers'
  `gradient_checkpointing_enable`): the op carries the tags of what it replaces and is run again
  in the backward, with bitwise the same codes and scales (`tests/test_checkpoint.py`).
- **save every matmul**, **save every other matmul**: torch's selective checkpointing, the second
  as torchtitan has it.
- **budget**: `torch._functorch.config.activation_memory_budget`, without regions. Torch measures
  a budget between its own extremes of the graph at hand.

## What was found and mended on the way

- What one region hands to the next is saved there. Where the norm's sum left its region (layers
  that return both streams), it had become an output of our op, and of an op that is computed
  again the partitioner saves no output: the backward began with the whole forward again. Such a
  sum stays a node of its own.
- Behind a norm at the end of a layer's half (Gemma's post-norms) the backward can form the sum
  from what it has; as an output of our op it was saved besides, a quarter more for such a layer.
  The backward now adds again.
- A policy that saves sums (`aten.add.Tensor`) meant the addition of eps too, and with it the op's
  codes. The op goes by what happens to the cast: it is saved where a policy saves the cast's
  codes, and computed again where the cast or the norm is.
- With checkpointing under Dynamo, the backward of an `autograd.Function` (torchao's linears)
  loses its tags, and casts along tokens were taken for the forward's and declined. They are
  rewritten.

## Where a policy costs something

- torch's partitioner saves a node where a chain of fusible ones has become longer than 100
  (`torch._functorch.config.ban_recompute_long_fusible_chains`), wherever that falls. Behind a fully
  checkpointed layer of transformers' Llama with a dynamic batch it falls on the final norm's
  normalised row with the pass, and on nothing without: one bfloat16 row per token more, once per
  model. With the rule off both save the same.
- A policy that saves the float8 codes of casts keeps scales and root with them (1/32 of the
  codes, and 4 bytes per row): the op's outputs are saved or computed again as one.
- A policy that saves block maxima (`aten.amax.default`) keeps those of `W * g` in float32 where
  the gain is folded, those of `W` in bfloat16 else.
- Of an op that is run again for its root alone (all matmuls saved), codes and scales are written
  as well, and dropped.
- `use_reentrant=True` around a *compiled* layer runs the first pass without gradients, where the
  gain stays in the kernel by default, and the second as training, where it is folded: set
  `gain="fold"` or `gain="kernel"`, so that both do the same.
"""


def _mb(value: float) -> str:
    return f"{value / 1e6:.3f}"


def document(results: list[dict[str, Any]]) -> str:
    """The page.

    Args:
        results: what runs of ``benchmarks/memory.py`` wrote, in the order of the page.
    """
    return "".join([_HEAD, *map(_run, results), _TAIL])


def _run(result: dict[str, Any]) -> str:
    compiled = result["route"] == "compile"
    text = [_RUN.format(**result, **result["sizes"]), _COMPILED if compiled else _EAGER]
    text.append(
        "\n| policy | model | MB saved | MB peak | ops in the backward | sites |"
        "\n|---|---|---|---|---|---|"
    )
    for entry in result["entries"]:
        again = entry.get("again")
        cells = [
            entry["policy"],
            VARIANTS[entry["config"]],
            _mb(entry["saved"]),
            _mb(entry["peak"]),
            "–" if again is None or entry["config"] is None else str(again),
            "–" if entry["config"] is None else str(entry["rewritten"]),
        ]
        text.append("\n| " + " | ".join(cells) + " |")
    text.append("\n\n")
    peaks = [entry["peak"] for entry in result["entries"]]
    if compiled:
        text.append(f"All peaks lie within {max(peaks) / min(peaks) - 1:.2%} of each other.\n\n")
    if result["worse"]:
        text.append("More than unrewritten under the same policy:\n\n")
        text += [f"- {line}\n" for line in result["worse"]]
    else:
        text.append("Under no policy is more saved, or the peak higher, than unrewritten.\n")
    return "".join(text)
