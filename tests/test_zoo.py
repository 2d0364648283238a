"""One architecture of transformers per form of norm, against the oracle that knows no graphs.

The whole zoo is ``python benchmarks/zoo.py``; its results are docs/zoo.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from zoolib.check import check
from zoolib.names import SUBSET

# Post-norm; centred; divided by the L2 norm. Nothing may be rewritten there.
NO_SITES = ("olmo2", "cohere", "dory")
TRAINED = ("llama", "gemma3_text")
# The others, those without a site too, are left to `make long`.
IN_CI = (("deepseek_v3", "infer"), ("llama", "train"))
# Gradients of a pow(-0.5) norm differ in the last bit of float32, and bfloat16 rounds that.
LEAST_DB = 35.0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case in IN_CI else pytest.mark.long)
        for case in [*((n, "infer") for n in SUBSET), *((n, "train") for n in TRAINED)]
    ],
)
def test_architecture(name: str, kind: str) -> None:
    got = check(name, kind)
    assert got.missed == [] and got.false == [], got
    assert got.graphs > 0 and got.linears > 0
    assert bool(got.pairs) or name in NO_SITES, "an architecture without a site proves nothing"
    assert len(got.rewritten) + len(got.declined) == len(got.pairs)
    # One vision tower breaks its graph between a norm and a linear.
    reasons = {reason for _, _, reason, _ in got.declined}
    assert reasons <= ({"graph_input"} if name == "qwen2_5_vl_vision" else set())
    for compared in (got.outputs, *([got.gradients] if kind == "train" else [])):
        assert compared.total > 0
        assert compared.worst is None or compared.worst > LEAST_DB, compared
