"""Counts of `mxnorm explain --config` against a full trace, and what its lists say."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mxnorm_pass import MXNormConfig, explain
from mxnorm_pass.cli.from_config import META, Built, build, make_inputs
from mxnorm_pass.cli.layers import Kind, Layers
from mxnorm_pass.cli.places import collapse, followed, named, untraced_next
from mxnorm_pass.cli.quantise import FORMATS, Chooser, quantise_
from mxnorm_pass.cli.show import show_whole
from mxnorm_pass.cli.whole import Whole, explain_config
from mxnorm_pass.report import Report

FMT = FORMATS["mxfp8"]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


def whole_of(built: Built, also: tuple[str, ...] = ()) -> Whole:
    torch._dynamo.reset()
    kwargs: Any = {"training": False, "batch": 1, "seq": 32, "dtype": torch.bfloat16, "also": also}
    return explain_config(built, "small", FMT, MXNormConfig(), **kwargs)


def full_trace(built: Built, also: tuple[str, ...] = ()) -> Report:
    torch._dynamo.reset()
    choose = Chooser(built.config, FMT, (), also)
    linears = [(p, m) for p, m in built.model.named_modules() if isinstance(m, nn.Linear)]
    quantise_(built.model, [p for p, m in linears if choose(p, m).chosen], FMT, training=False)
    inputs = make_inputs(built, 1, 32, torch.bfloat16)[0]
    return explain(built.model.eval(), training=False, **inputs)


def by_reason(report: Report) -> Counter[str | None]:
    return Counter(site.reason for site in report.sites)


def counted(whole: Whole) -> Counter[str | None]:
    counts: Counter[str | None] = Counter()
    for group in whole.sites:
        counts[group.reason] += group.count
    return counts


def configuration(model_type: str, layers: int, **more: Any) -> Built:
    content = {"model_type": model_type, "num_hidden_layers": layers, **SIZES, **more}
    return build(content, torch.bfloat16)


@pytest.mark.parametrize(
    ("model_type", "layers", "expected"),
    [
        pytest.param("olmo2", 3, {"extra_operand": 3}, marks=pytest.mark.long),
        pytest.param("llama", 3, {None: 6}, marks=pytest.mark.slow),
        pytest.param("gemma3_text", 4, {None: 8}, marks=pytest.mark.long),
    ],
)
def test_counts_are_those_of_a_full_trace(
    model_type: str, layers: int, expected: dict[str | None, int]
) -> None:
    more: dict[str, Any] = {}
    if model_type == "gemma3_text":
        # Two kinds of layers; the last one is of the kind of the first.
        kinds = ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]
        more = {"layer_types": kinds, "sliding_window": 16}
    whole = whole_of(configuration(model_type, layers, **more))
    traced = sum(len(kind.traced) for kind in whole.layers.kinds)
    assert traced < layers
    full = full_trace(configuration(model_type, layers, **more))
    assert by_reason(full) == Counter(expected)
    assert counted(whole) == by_reason(full)
    # How many sites have readers in the layer behind theirs.
    beyond = sum(site.consumers[-1].split(".")[2] != site.norm.split(".")[2] for site in full.sites)
    assert sum(group.following_count for group in whole.sites) == beyond
    if model_type == "olmo2":
        (group,) = whole.sites
        assert group.norms == ["post_attention_layernorm", "post_feedforward_layernorm"]
        assert group.consumers == ["mlp.gate_proj", "mlp.up_proj"]
        assert group.following == [f"self_attn.{n}_proj" for n in "qkv"]
        assert group.following_count == beyond == 2
        # The last layer's feeds no linear; no other is in both lists.
        without = {u.norm: u.count for u in whole.without}
        assert without["post_feedforward_layernorm"] == 1
        assert "post_attention_layernorm" not in without
        text = "\n".join(show_whole(whole, 200))
        assert "mlp.{gate,up}_proj; next layer's self_attn.{q,k,v}_proj in 2" in text
        assert "?" not in text


class Block(nn.Module):
    """``norm(x + linear(x))``: the next layer's linear reads the norm."""

    def __init__(self, number: int, wide: bool) -> None:
        super().__init__()
        self.layer_idx = number
        self.up = nn.Linear(64, 128 if wide else 64, bias=False)
        self.norm = nn.RMSNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.up(x)[..., :64])


class PostNorm(nn.Module):
    def __init__(self, wide: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.layers = nn.ModuleList(Block(i, w == "w") for i, w in enumerate(wide))
        self.head = nn.Linear(64, 256, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def post_norm(wide: str) -> Built:
    with META:
        model = PostNorm(wide).bfloat16()
    return Built(model, SimpleNamespace())


@pytest.mark.parametrize(
    ("wide", "also", "sites", "heads", "without"),
    [
        ("-----", (), 4, 0, 1),
        # The head reads what the last layer puts out: once.
        ("-----", ("head",), 5, 1, 0),
        ("-w--", (), 3, 0, 1),
    ],
)
def test_sites_between_layers(
    wide: str, also: tuple[str, ...], sites: int, heads: int, without: int
) -> None:
    full = full_trace(post_norm(wide), also)
    whole = whole_of(post_norm(wide), also)
    assert sum(len(kind.traced) for kind in whole.layers.kinds) < len(wide)
    assert whole.declined == 0
    assert sum(group.outside_count for group in whole.sites) == heads
    assert sum(unread.count for unread in whole.without) == without
    assert whole.rewritten == full.rewritten == sites
    assert sum(group.following_count for group in whole.sites) == sites - heads
    assert {c for group in whole.sites for c in group.following} == {"up"}


def test_where_nothing_behind_a_kind_is_traced_the_number_is_a_lower_bound() -> None:
    # The second kind is traced last, and what is behind its layers is skipped.
    whole = whole_of(post_norm("---w--w--"))
    assert whole.rewritten < 8
    assert any("lower bound" in note for note in whole.notes)


def test_a_norm_without_a_cast_says_who_reads_it() -> None:
    whole = whole_of(post_norm("---"))
    (last,) = whole.without
    assert (last.norm, last.count) == ("norm", 1)
    assert last.why == "is read by head, which has no cast"
    assert "norm is also read by an addition in the next layer" in "\n".join(show_whole(whole, 100))
    assert "\n1 layer of layers:" in "\n".join(show_whole(whole_of(post_norm("w--")), 100))


def test_readers_in_equal_layers_are_said_once() -> None:
    first = Kind("decoder.block", "with a bias", [0], [0])
    rest = Kind("decoder.block", "without", list(range(1, 24)), [1])
    layers = Layers([first, rest])
    paths = [f"decoder.block.{i}.attention.{n}" for i in (0, 1) for n in "kv"]
    names, spread = collapse(layers, [*paths, "lm_head"])
    assert names == ["decoder.block.*.attention.k", "decoder.block.*.attention.v", "lm_head"]
    assert spread == {"decoder.block": 24}
    # The first layer alone is itself.
    assert collapse(layers, paths[:1]) == (paths[:1], {})
    home = layers.find("decoder.block.0.norm")
    assert named(layers, home, paths[1:3]) == ["attention.v", "the next layer's attention.k"]
    assert home is not None and followed(layers, home) == 1
    assert untraced_next(layers, "decoder.block")
