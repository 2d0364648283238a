"""Models of several graphs: a gain or a weight may be read in another graph, or in none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Norm, gemma_form, rows
from numerics import assert_same_bytes
from test_trust_gains import K, gain, originals
from torch import Tensor, nn

from mxnorm_pass import fold_gains

eagerly = torch._dynamo.disable

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
        self.again = nn.Linear(K, 8)
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
    assert set(why) == {*STAYS, "third"}
    assert {n: w for n, w in why.items() if n in STAYS and STAYS[n] not in w} == {}
    for a, b in zip(*(torch.utils._pytree.tree_leaves(o) for o in (expected, found)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    assert handle.tried and handle.output_sqnr > 120
    handle.undo()
    for name, p in model.named_parameters():
        assert_same_bytes(p.detach(), before[name], name)


class Layer(nn.Module):
    """Compiled by itself: its graph ends inside, and all layers share it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm, self.linear = gain(nn.RMSNorm(K), seed), nn.Linear(K, K)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x))
        torch._dynamo.graph_break()
        return y.relu()


class Scale(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        y = x * w
        torch._dynamo.graph_break()
        return y.sum()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(i) for i in range(4))
        self.scale, self.other = Scale(), nn.Parameter(rows(K, seed=9, dtype=torch.float32))

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
