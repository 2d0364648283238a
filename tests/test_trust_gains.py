"""Gains folded into weights for serving: where that is right, where it is not, and undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import HandLinear, Norm, gemma_form, quantize_inference_, rows, tokens
from numerics import assert_same_bytes
from torch import Tensor, nn

from mxnorm_pass import FoldedGains, explain, fold_gains

K = 64


def gain(norm: nn.Module, seed: int, around: float = 1.0) -> nn.Module:
    with torch.no_grad():
        norm.weight.copy_(around + 0.3 * rows(K, seed=seed, dtype=torch.float32))
    return norm


class Mixed(nn.Module):
    """Norms whose gains can move, and every reason why one cannot."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = ("plain", "gemma", "table", "twice", "both", "skip", "cast", "batch", "branch")
        norms = {n: nn.RMSNorm(K) for n in names}
        norms["gemma"] = Norm(gemma_form, K)
        self.norms = nn.ModuleDict(
            {n: gain(m, i, 0.0 if n == "gemma" else 1.0) for i, (n, m) in enumerate(norms.items())}
        )
        self.plain, self.plain_bias = nn.Linear(K, 32, bias=False), nn.Linear(K, 16)
        self.conv = nn.Parameter(torch.randn(K, 8))  # [in, out], as GPT-2 keeps it
        self.gemma = nn.Linear(K, 24)
        self.embedding = nn.Embedding(32, K)
        self.head = nn.Linear(K, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.twice = nn.Linear(K, 8)
        self.skip = nn.Linear(K, K)
        self.cast = HandLinear(K, 8)
        self.experts = nn.Parameter(torch.randn(2, K, 8))
        self.branch = nn.Linear(K, 8)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        norms = {name: norm(x) for name, norm in self.norms.items()}
        y = norms["plain"]
        return (
            self.plain(y),
            self.plain_bias(y[:, -1]),  # rows that are picked
            y @ self.conv,
            self.gemma(norms["gemma"]),
            self.head(norms["table"]),
            self.embedding(ids),
            self.twice(norms["twice"]) + self.twice(norms["both"]),  # two gains, one weight
            self.skip(norms["skip"]) + norms["skip"],  # read by an addition as well
            self.cast(norms["cast"]),
            torch.matmul(norms["batch"].unsqueeze(1), self.experts),
            self.branch(F.silu(norms["branch"])),
        )


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return rows(2, 8, K, seed=5, dtype=dtype), torch.tensor([1, 2])


def originals(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_what_can_move_moves_and_the_rest_says_why() -> None:
    model = Mixed().eval()
    before, outputs = originals(model), model(*inputs())
    handle = fold_gains(model, [inputs()])
    assert sorted(g.gain for g in handle.folded) == ["norms.gemma.weight", "norms.plain.weight"]
    assert {line.weight for line in handle.linears} == {
        "plain.weight", "plain_bias.weight", "conv", "gemma.weight"
    }  # fmt: skip
    g = before["norms.plain.weight"].double()
    for name, expected in {
        "plain.weight": before["plain.weight"].double() * g,
        "plain_bias.weight": before["plain_bias.weight"].double() * g,
        "conv": before["conv"].double() * g[:, None],
        "gemma.weight": before["gemma.weight"].double()
        * (1 + before["norms.gemma.weight"].double()),
        "norms.plain.weight": torch.ones(K),
        "norms.gemma.weight": torch.zeros(K),
    }.items():
        assert_same_bytes(model.get_parameter(name).detach(), expected.float(), name)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    folded = {g.gain for g in handle.folded} | {line.weight for line in handle.linears}
    assert changed == folded

    why = {g.norms[0].removeprefix("norms."): "; ".join(g.why_left) for g in handle.left}
    assert set(why) == {"table", "twice", "both", "skip", "cast", "batch", "branch"}
    assert "embedding.weight is tied to head.weight" in why["table"]
    assert "twice.weight is also read by twice" in why["twice"]
    assert "norms.twice.weight" in why["both"]
    assert "also read by" in why["skip"]
    assert "cast: quantised already" in why["cast"]
    assert "not a linear with one weight" in why["batch"]
    assert why["branch"].startswith("read by ") and why["branch"].endswith("which is no linear")
    assert all(reason in " ".join(str(handle).split()) for reason in ("fold before quantize_",))
    assert all(len(line) <= 100 for line in str(handle).splitlines())

    for old, new in zip(outputs, model(*inputs()), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)
    assert handle.output_sqnr > 110
    handle.undo()
    for name, p in model.named_parameters():
        assert_same_bytes(p.detach(), before[name], name)
    assert "(undone)" in str(handle)
    handle.undo()  # nothing happens


class Tied(nn.Module):
    """The head reads the norm itself, and its weight is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, K)
        self.norm = gain(nn.RMSNorm(K), 1)
        self.head = nn.Linear(K, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x if x.is_floating_point() else self.embedding(x)))


@pytest.mark.parametrize("batch", [inputs()[1], inputs()[0]], ids=["ids", "embeddings"])
def test_tied_weights_are_left(batch: Tensor) -> None:
    """Also where the batch does not go through the embedding: the names tell."""
    model = Tied()
    before = originals(model)
    handle = fold_gains(model, batch, compare=False)
    assert not handle.folded and "tied to" in handle.left[0].why_left[0]
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_view_of_a_weight_is_tied_too() -> None:
    model = nn.Sequential(gain(nn.RMSNorm(K), 1), nn.Linear(K, 8, bias=False))
    model.register_buffer("view", model[1].weight.detach()[:4])
    handle = fold_gains(model, inputs()[0], compare=False)
    assert "1.weight is tied to view" in handle.left[0].why_left


def test_bfloat16_and_the_context() -> None:
    model = nn.Sequential(gain(nn.RMSNorm(K), 1), nn.Linear(K, 32), nn.Tanh()).bfloat16()
    before = originals(model)
    x = inputs(torch.bfloat16)[0]
    with fold_gains(model, x) as handle:
        (line,) = handle.linears
        exact = before["1.weight"].double() * before["0.weight"].double()
        stored = model[1].weight.detach()
        assert_same_bytes(stored, exact.to(torch.bfloat16))
        noise = (stored.double() - exact).norm() / exact.norm()
        assert 10 ** (-line.rounding.sqnr / 20) == pytest.approx(float(noise), rel=1e-6)
        # Rounding to 8 bits: half a unit at the most, and some 50 to 60 dB.
        assert 0.4 < line.rounding.max_ulp <= 0.5 and 50 < line.rounding.sqnr < 60
        assert 35 < handle.output_sqnr < 60
        assert "max ulp" in str(handle)
    for name, p in model.named_parameters():
        assert_same_bytes(p.detach(), before[name], name)


def test_include_and_exclude_name_norms() -> None:
    model = nn.Sequential(*(m for i in range(3) for m in (gain(nn.RMSNorm(K), i), nn.Linear(K, K))))
    x = inputs()[0]
    with fold_gains(model, x, include=["0", "2", "nrom"], exclude="[2]", compare=False) as handle:
        assert [g.gain for g in handle.folded] == ["0.weight"]
        assert [g.why_left for g in handle.left] == [["include/exclude leaves it out"]] * 2
        assert handle.idle == ["include='nrom'"]
        assert "warning: include='nrom' matches no norm" in str(handle)


def test_a_product_that_overflows_is_left() -> None:
    model = nn.Sequential(nn.RMSNorm(K), nn.Linear(K, 8, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1e30)
        model[1].weight.fill_(1e30)
    handle = fold_gains(model, inputs()[0], compare=False)
    assert handle.left[0].why_left == ["1.weight * gain overflows torch.float32"]


def test_a_norm_shared_by_two_places_is_left() -> None:
    norm = gain(nn.RMSNorm(K), 1)
    model = nn.Sequential(norm, nn.Linear(K, K), norm, nn.Linear(K, K))
    handle = fold_gains(model, inputs()[0], compare=False)
    assert handle.left[0].why_left == ["0.weight is 2.weight as well"]


def test_a_folded_model_is_quantised_and_rewritten_like_any() -> None:
    """The pass finds what it found before; on quantised weights it is too late to fold."""
    model = nn.Sequential(*(m for i in range(2) for m in (gain(nn.RMSNorm(K), i), nn.Linear(K, K))))
    model = model.bfloat16()
    x = inputs(torch.bfloat16)[0]
    model.dummy_inputs = {"input": x}  # as transformers models bring them along
    assert len(fold_gains(model, compare=False).folded) == 2
    report = explain(quantize_inference_(model), x, training=False)
    assert [(s.norm, s.status, s.spec["gain"]) for s in report.sites] == [
        ("0", "rewritten", "w"),
        ("2", "rewritten", "w"),
    ]
    again = fold_gains(model, x, compare=False)
    assert not again.folded
    # And not a word about the cast's own ops, which read the gain too.
    assert [g.why_left for g in again.left] == [
        ["1: quantised already; fold before quantize_"],
        ["3: quantised already; fold before quantize_"],
    ]


def test_linears_with_casts_of_their_own_share_one_reason() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = gain(nn.RMSNorm(K), 1)
            self.a, self.b, self.plain = HandLinear(K, 8), HandLinear(K, 8), nn.Linear(K, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return self.a(y) + self.b(y) + self.plain(y)

    (left,) = fold_gains(Three(), inputs()[0], compare=False).left
    assert left.why_left == ["a, b: quantised already; fold before quantize_"]


def test_a_gain_of_one_is_nothing_to_fold() -> None:
    """Of a model that is folded already, in both forms of the gain; the weights stay alone."""
    norms = gain(nn.RMSNorm(K), 1), gain(Norm(gemma_form, K), 2, 0.0)
    model = nn.Sequential(norms[0], nn.Linear(K, K), norms[1], nn.Linear(K, 8))
    x = inputs()[0]
    assert len(fold_gains(model, x, compare=False).folded) == 2
    before = originals(model)
    again = fold_gains(model, x)
    assert [g.why_left for g in again.left] == [["nothing to fold: the gain is 1"]] * 2
    assert not again.folded and not again.linears and not again.active
    assert "0 gain(s) folded into 0 weight(s), 2 left" in str(again) and "dB" not in str(again)
    for name, p in model.named_parameters():
        assert_same_bytes(p.detach(), before[name], name)
    with torch.no_grad():
        model[0].weight[3] = 1 + 2**-23  # one bit off one
    assert [g.gain for g in fold_gains(model, x, compare=False).folded] == ["0.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_undone_in_the_wrong_order_is_refused(dtype: torch.dtype) -> None:
    norms = gain(nn.RMSNorm(K), 1), gain(nn.RMSNorm(K), 2)
    model = nn.Sequential(norms[0], nn.Linear(K, K), norms[1], nn.Linear(K, 8)).to(dtype)
    x = inputs(dtype)[0]
    start = originals(model)
    first = fold_gains(model, x, compare=False)
    gain(model[0], 3)
    between = originals(model)
    second = fold_gains(model, x, compare=False)
    now = originals(model)
    with pytest.raises(RuntimeError, match=r"undo: 1\.weight changed since, so nothing"):
        first.undo()
    # Nothing at all: 2.weight and 3.weight are as the first change left them, and stay so.
    assert first.active
    for name, p in model.named_parameters():
        assert_same_bytes(p.detach(), now[name], name)
    second.undo()
    for name, p in model.named_parameters():
        assert_same_bytes(p.detach(), between[name], name)
    with pytest.raises(RuntimeError, match=r"undo: 0\.weight changed"):
        first.undo()
    with torch.no_grad():
        model[0].weight.fill_(1)
    first.undo()
    first.undo()  # nothing happens
    second.undo()
    for name, p in model.named_parameters():
        assert_same_bytes(p.detach(), start[name], name)


def test_one_bit_is_a_change_and_an_original_is_none() -> None:
    model = nn.Sequential(gain(nn.RMSNorm(K), 1), nn.Linear(K, 8, bias=False))
    start = originals(model)
    handle = fold_gains(model, inputs()[0], compare=False)
    with torch.no_grad():
        model[1].weight.view(torch.int32)[2, 5] ^= 1
        with pytest.raises(RuntimeError, match=r"undo: 1\.weight changed"):
            handle.undo()
    model.load_state_dict(start)  # the originals, by another way
    handle.undo()
    assert not handle.active
    for name, p in model.named_parameters():
        assert_same_bytes(p.detach(), start[name], name)


def test_batches_are_needed() -> None:
    with pytest.raises(ValueError, match="dummy_inputs"):
        fold_gains(nn.Sequential(nn.RMSNorm(K), nn.Linear(K, 8)))
    with pytest.raises(ValueError, match="empty"):
        fold_gains(nn.Linear(K, 8), [])


# --- transformers ---------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def build(name: str, **kwargs: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **kwargs})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if "norm" in parameter_name:
                p.add_(0.3 * torch.randn_like(p))
    return model


def fold(model: nn.Module) -> FoldedGains:
    before = originals(model)
    batch = {"input_ids": tokens(2, 8) % 64, "use_cache": False}
    with torch.no_grad():
        logits = model(**batch).logits
        handle = fold_gains(model, batch)
        torch.testing.assert_close(model(**batch).logits, logits, rtol=1e-3, atol=1e-4)
    assert handle.output_sqnr > 100
    handle.undo()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    return handle


QKV = {f"self_attn.{n}_proj" for n in "qkv"}
MLP = {"mlp.gate_proj", "mlp.up_proj"}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
CASES: dict[str, tuple[dict[str, Any], set[str], dict[str, str]]] = {
    "Qwen3": (
        {"head_dim": 16},
        QKV | MLP,
        {f"model.layers.0.self_attn.{n}_norm": "which is no linear" for n in "qk"},
    ),
    "Gemma": ({"head_dim": 16}, QKV | MLP, {"model.norm": "tied to"}),
    "Mixtral": (
        {"num_local_experts": 4},
        QKV,
        {"model.layers.0.post_attention_layernorm": "mlp.experts"},
    ),
    "DeepseekV3": (
        MLA,
        {f"self_attn.{n}" for n in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj")}
        | MLP,
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_transformers(name: str) -> None:
    kwargs, linears, left = CASES[name]
    handle = fold(build(name, **kwargs))
    expected = {f"model.layers.0.{linear}" for linear in linears}
    expected |= set() if "model.norm" in left else {"lm_head"}
    assert {line.linear for line in handle.linears} == expected
    assert {g.norms[0] for g in handle.left} == set(left)
    for entry in handle.left:
        assert left[entry.norms[0]] in " ".join(entry.why_left)
