"""Models of several graphs: a gain or a weight may be read in another graph, or in none."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import HandLinear, Norm, gemma_form, rows
from numerics import assert_same_bytes
from test_trust_gains import K, gain, originals
from torch import Tensor, nn

from mxnorm_pass import (
    MXNormConfig,
    backend,
    calibrate,
    fidelity,
    fold_gains,
    reference,
    to_rmsnorm,
)

eagerly = torch._dynamo.disable
one_by_one = torch._dynamo.disable(recursive=False)
"""The modules that are called inside become graphs of their own."""

STAYS = {
    # the gain, in another graph than its linear
    "early": "read by aten.mul.Tensor, which is no linear",
    "late": "read by aten.mul.Tensor, which is no linear",
    "early_norm": "read by what the model returns, or another graph",
    "late_norm": "read by what the model returns, or another graph",
    "late_call": "read by aten.sum.default, which is no linear",
    "alias": "alias.weight is other.weight as well",
    "view": "a part of view.weight is read by itself",
    "same": "read by aten.mul.Tensor, which is no linear",
    # in none
    "eager": "eager.weight is read outside of every graph, by aten.mul.Tensor",
    "eager_norm": "eager_norm.weight is read outside of every graph",
    "tolist": "tolist.weight leaves torch, by Tensor.tolist",
    "hidden": "the outputs change where it is doubled and its weights are halved",
    "hidden_gemma": "the outputs change where it is doubled and its weights are halved",
    # the weight
    "w_early": "w_early_linear.weight is also read by aten.mm.default",
    "w_late": "w_late_linear.weight is also read by aten.sum.default",
    "w_table": "w_table_linear.weight is also read by aten.embedding.default",
    "w_tied": "w_tied_linear.weight is tied to table.weight",
    "w_second": "w_second_linear.weight is also read by w_second_linear (aten.addmm.default)",
    "w_eager": "w_eager_linear.weight is read outside of every graph, by aten.sum.default",
    "w_axes": "w_axes_linear.weight is multiplied with the norm along both of its axes",
    "w_hidden": "the outputs change where it is doubled and its weights are halved",
}
MOVES = ("plain", "plain_gemma", "both_graphs")


class Many(nn.Module):
    """Norm and linear of each name, in the second of three graphs; and what else reads them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for i, name in enumerate((*STAYS, *MOVES)):
            form = name.endswith("gemma")
            norm = gain(Norm(gemma_form, K) if form else nn.RMSNorm(K), i, 0.0 if form else 1.0)
            self.add_module(name, norm)
            self.add_module(f"{name}_linear", nn.Linear(K, K))
        self.other, self.third = nn.RMSNorm(K), gain(nn.RMSNorm(K), 99)
        self.other.weight = self.alias.weight
        self.table = nn.Embedding(K, K)
        self.w_tied_linear.weight = self.table.weight
        self.again, self.lonely = nn.Linear(K, 8), gain(nn.RMSNorm(K), 98)
        # What no registered name tells.
        self.half, self.twin = self.view.weight.detach()[: K // 2], self.same.weight.detach()
        names = ("hidden.weight", "hidden_gemma.weight", "w_hidden_linear.weight")
        self.arrays = [self.get_parameter(name).detach().numpy() for name in names]

    def forward(self, x: Tensor, ids: Tensor) -> list[Any]:
        out = [
            (x * self.early.weight).sum(),
            self.early_norm(x),
            x @ self.w_early_linear.weight.T,
            F.embedding(ids, self.w_table_linear.weight),
            self.both_graphs_linear(self.both_graphs(x)),
            x[..., : K // 2] * self.half,
            x * self.twin,
        ]
        torch._dynamo.graph_break()
        for name in (*STAYS, *MOVES):
            out.append(getattr(self, f"{name}_linear")(getattr(self, name)(x)))
        out.append(self.w_axes(x) @ self.w_axes_linear.weight)
        torch._dynamo.graph_break()
        out += [
            (x * self.late.weight).sum(),
            self.late_norm(x),
            F.rms_norm(x, (K,), self.late_call.weight).sum(),
            self.other(x),
            self.w_late_linear.weight.sum(),
            self.w_second_linear(self.third(x)),
            self.again(self.both_graphs(x)),
        ]
        return [*out, self.between(x)]

    @eagerly
    def between(self, x: Tensor) -> list[Any]:
        scale = sum(self.tolist.weight.tolist())
        hidden = [float(array[0].sum()) for array in self.arrays]
        x = x.detach()
        return [
            (x * self.eager.weight).sum(),
            self.eager_norm(x),
            self.lonely(x),
            x * scale,
            hidden,
            self.w_eager_linear.weight.sum(),
        ]


def arguments() -> tuple[Tensor, Tensor]:
    return rows(2, 8, K, seed=5, dtype=torch.float32), torch.tensor([1, 2])


def test_every_read_in_every_graph_and_outside_counts() -> None:
    model = Many().eval()
    before = originals(model)
    with torch.no_grad():
        expected = model(*arguments())
        handle = fold_gains(model, [arguments()])
        found = model(*arguments())
    assert sorted(g.gain for g in handle.folded) == sorted(f"{name}.weight" for name in MOVES)
    assert {line.weight for line in handle.linears} == {
        *(f"{name}_linear.weight" for name in MOVES), "again.weight"
    }  # fmt: skip
    why = {g.gain.removesuffix(".weight"): "; ".join(g.why_left) for g in handle.left}
    assert set(why) == {*STAYS, "third", "lonely"}
    assert why["lonely"] == "lonely.weight is read outside of every graph, by aten.mul.Tensor"
    assert {n: w for n, w in why.items() if n in STAYS and STAYS[n] not in w} == {}
    for a, b in zip(*(torch.utils._pytree.tree_leaves(o) for o in (expected, found)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    assert handle.tried and handle.output_sqnr > 120
    handle.undo()
    for name, p in model.named_parameters():
        assert_same_bytes(p.detach(), before[name], name)


class Layer(nn.Module):
    """Compiled by itself, and all layers share the graph."""

    def __init__(self, seed: int, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.norm, self.linear = gain(nn.RMSNorm(K), seed), linear(K, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)).relu()


class Scale(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (x * w).sum()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(i) for i in range(4))
        self.scale, self.other = Scale(), nn.Parameter(rows(K, seed=9, dtype=torch.float32))

    @one_by_one
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x)
        # The second call of one graph is the one that reads a gain.
        return x, self.scale(x, self.other) + self.scale(x, self.layers[3].norm.weight)


def test_layers_that_share_a_graph_are_told_apart() -> None:
    model = Layers().eval()
    x = arguments()[0]
    with torch.no_grad():
        expected = model(x)
        handle = fold_gains(model, x, exclude=["layers.1.*"])
        found = model(x)
    assert [g.gain for g in handle.folded] == ["layers.0.norm.weight", "layers.2.norm.weight"]
    assert [line.linear for line in handle.linears] == ["layers.0.linear", "layers.2.linear"]
    assert {g.norms[0]: g.why_left for g in handle.left} == {
        "layers.1.norm": ["include/exclude leaves it out"],
        "layers.3.norm": ["read by aten.mul.Tensor, which is no linear"],
    }
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def test_norms_of_a_region_within_a_graph_are_left() -> None:
    """One graph for all equal layers, called by the model's: nothing looks into it."""

    class Region(Layer):
        @torch.compiler.nested_compile_region
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x))

    torch.manual_seed(0)
    model = nn.Sequential(Region(0), Region(1), gain(nn.RMSNorm(K), 2), nn.Linear(K, 8)).eval()
    x = arguments()[0]
    with torch.no_grad():
        expected = model(x)
        handle = fold_gains(model, x)
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    assert [g.gain for g in handle.folded] == ["2.weight"]
    assert [(g.gain, g.why_left) for g in handle.left] == [
        (name, ["no graph shows what its norm does"]) for name in ("0.norm.weight", "1.norm.weight")
    ]


def test_outputs_that_never_repeat_are_said_to_prove_nothing() -> None:
    class Counts(nn.Sequential):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) + float(self.calls)

    model = Counts(gain(nn.RMSNorm(K), 1), nn.Linear(K, 8))
    handle = fold_gains(model, arguments()[0], compare=False)
    assert [g.gain for g in handle.folded] == ["0.weight"] and not handle.tried
    assert "warning: two equal runs give different outputs" in str(handle)


def test_undo_of_a_parameter_that_was_replaced_is_refused() -> None:
    model = nn.Sequential(gain(nn.RMSNorm(K), 1), nn.Linear(K, 8))
    before = originals(model)
    handle = fold_gains(model, arguments()[0], compare=False)
    assert len(handle.folded) == 1
    folded = model[1].weight
    model[1].weight = nn.Parameter(folded.detach().clone())
    now = originals(model)
    with pytest.raises(RuntimeError, match=r"undo: 1\.weight is another tensor now"):
        handle.undo()
    for name, p in model.named_parameters():
        assert_same_bytes(p.detach(), now[name], name)
    model[1].weight = folded
    handle.undo()
    for name, p in model.named_parameters():
        assert_same_bytes(p.detach(), before[name], name)


READ_ELSEWHERE = {
    "early": ("by aten.mul.Tensor",),
    "late": ("by late (aten.mul.Tensor)",),
    "second_call": ("by second_call (aten.mul.Tensor)",),
    "unseen": (
        "something that takes a part of it",
        "aten.sum.default outside of every graph",
        "Tensor.tolist",
    ),
}


class Estimated(nn.Module):
    """Norms before casts, in the second of three graphs; and what else reads their gains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for i, name in enumerate((*READ_ELSEWHERE, "residual", "gemma", "again")):
            form = name == "gemma"
            norm = gain(Norm(gemma_form, K) if form else nn.RMSNorm(K), i, 0.0 if form else 1.0)
            self.add_module(name, norm)
            self.add_module(f"{name}_linear", HandLinear(K, 16))
        self.half = self.unseen.weight.detach()[: K // 2]

    def forward(self, x: Tensor) -> dict[str, Any]:
        early = [(x * self.early.weight).sum(), self.half.sum()]
        again = self.again_linear(self.again(x))
        torch._dynamo.graph_break()
        names = (*READ_ELSEWHERE, "gemma", "again")
        sites = [getattr(self, f"{n}_linear")(getattr(self, n)(x)) for n in names]
        y = self.residual(x)
        sites.append(self.residual_linear(y) + y[:, :16])
        plain = self.second_call(x) + 1
        torch._dynamo.graph_break()
        others = [*early, self.late(x) + 1, plain, *self.between(x)]
        return {"sites": [again, *sites], "others": others}

    @eagerly
    def between(self, x: Tensor) -> list[Tensor]:
        return [self.unseen.weight.sum() * x.sum(), x * sum(self.unseen.weight.tolist())]


def test_a_ratio_goes_into_gains_that_nothing_else_reads() -> None:
    torch.manual_seed(1)
    x = torch.distributions.Laplace(0.0, 1.0).sample((64, K))
    model = Estimated().eval()
    before = originals(model)
    with torch.no_grad():
        others = model(x)["others"]
        handle = to_rmsnorm(model, [x])
        for a, b in zip(others, model(x)["others"], strict=True):
            assert torch.equal(a, b)
    assert {g.gain: round(g.ratio, 2) for g in handle.gains} == {
        f"{name}.weight": pytest.approx(1.24, abs=0.04) for name in ("residual", "gemma", "again")
    }
    assert [g.rows for g in handle.gains if g.norm == "again"] == [2 * 64]
    assert set(handle.left) == set(READ_ELSEWHERE)
    for name, reads in READ_ELSEWHERE.items():
        assert "is also read where nothing is estimated: " in handle.left[name]
        assert all(by in handle.left[name] for by in reads), handle.left[name]
        assert torch.equal(model.get_parameter(f"{name}.weight"), before[f"{name}.weight"])
    handle.undo()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


class Wide(nn.Module):
    """Its norm is called as those of the layers are, its rows are longer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(4 * K), HandLinear(4 * K, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)).relu()


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # The user compiles one of them as well: with an estimate, which nothing here may run with.
        compiled = torch.compile(Layer(1, HandLinear), backend=backend(inner="eager"))
        self.layers = nn.ModuleList([Layer(0, HandLinear), compiled])
        self.wide = Wide()

    @one_by_one
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.wide(x.repeat(1, 4))


def test_norms_that_graphs_call_alike_are_measured_one_by_one() -> None:
    model = Rows().eval()
    seen: dict[str, Tensor] = {}
    names = {"layers.0.norm": K, "layers.1._orig_mod.norm": K, "wide.norm": 4 * K}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen.__setitem__(name, args[0])
        )
    x = rows(64, K, seed=3, dtype=torch.float32)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        model(x)
    forward = model.layers[1].forward
    ratios = {
        name: (reference.rms_estimate(y, 32, 1).squeeze(-1) / y.square().mean(-1).sqrt())
        for name, y in seen.items()
    }
    config = MXNormConfig(p=1)
    found = fidelity(model, [x], config=config, bound=0.2)
    assert [(site.norm, site.k, site.rows) for site in found.sites] == [
        ("norm", k, 64) for k in names.values()
    ]
    for site, (name, ratio) in zip(found.sites, ratios.items(), strict=True):
        assert f"({name}.weight, " in site.id
        assert site.median == pytest.approx(float(ratio.quantile(0.5)), rel=1e-2), name
    medians = [site.median for site in found.sites]
    assert model.layers[1].forward is forward
    assert abs(medians[0] - medians[1]) > 0.1  # relu makes rows of other kinds

    with pytest.warns(UserWarning, match="so few rows"):
        fitted = calibrate(model, [x], p=1)
    assert fitted.shared == {"norm": [f"{name}.weight" for name in names]}
    assert json.loads(fitted.to_json())["shared"] == fitted.shared
    assert fitted.norms["norm"].rows == 2 * 64
    assert "rows of 64 in blocks of 32 in one graph, rows of 256" in fitted.skipped["norm"]
    assert "one constant for 3 norms that the graphs call alike" in " ".join(str(fitted).split())

    with to_rmsnorm(model, [x], config=config) as baked:
        assert [(g.norm, g.rows) for g in baked.gains] == [
            (name.replace("_orig_mod.", ""), 64) for name in names
        ]
        assert [g.ratio for g in baked.gains] == pytest.approx(medians, rel=0.02)
