"""Equal layers are told from others, and skipping them changes no count."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mxnorm_pass import MXNormConfig, explain
from mxnorm_pass.cli.from_config import META, build, make_inputs
from mxnorm_pass.cli.layers import Cut, Form, Skip, find_layers
from mxnorm_pass.cli.quantise import FORMATS, Chooser, quantise_
from mxnorm_pass.cli.whole import explain_config

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"


class Layer(nn.Module):
    """A layer with a number, a setting and, where asked for, an output of several parts."""

    def __init__(self, number: int, *, wide: bool = False, window: int = 0, parts: bool = False):
        super().__init__()
        self.layer_idx, self.window, self.parts = number, window, parts
        self.linear = nn.Linear(8, 16 if wide else 8)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Any:
        out = x + self.linear(x)[..., :8]
        return (out, None, bias) if self.parts else out


class Stack(nn.Module):
    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        bias = x.sum()
        for layer in self.layers:
            out = layer(x, bias=bias)
            if isinstance(out, tuple):
                x, nothing, bias = out
                assert nothing is None and bias is not None
            else:
                x = out
        return x


def members(model: nn.Module, **kwargs: Any) -> list[tuple[list[int], list[int]]]:
    return [(k.members, k.traced) for k in find_layers(model, **kwargs).kinds]


def test_kinds_by_shape_setting_and_choice() -> None:
    alike = Stack(*(Layer(i) for i in range(5)))
    # The number of a layer makes no kind; the first one, whose input is no residual sum, is traced.
    assert members(alike) == [([0, 1, 2, 3, 4], [0, 1])]
    shapes = Stack(*(Layer(i, wide=i in (2, 3)) for i in range(5)))
    assert members(shapes) == [([0, 1, 4], [0, 1]), ([2, 3], [2])]
    windows = Stack(*(Layer(i, window=512 * (i % 2)) for i in range(4)))
    assert members(windows) == [([0, 2], [0, 2]), ([1, 3], [1])]
    assert [k.label for k in find_layers(windows).kinds] == ["window=0", "window=512"]
    chosen = members(alike, choice=lambda path, _: path.startswith("layers.3."))
    assert chosen == [([0, 1, 2, 4], [0, 1]), ([3], [3])]


def test_weights_add_up_to_all_layers() -> None:
    layers = find_layers(Stack(*(Layer(i, wide=i > 2) for i in range(7))))
    assert [layers.weight(f"layers.{i}.linear") for i in range(7)] == [1, 2, 0, 4, 0, 0, 0]
    assert layers.weight("elsewhere") == 1


@pytest.mark.parametrize("parts", [False, True])
def test_a_skipped_layer_hands_on_what_the_form_says(parts: bool) -> None:
    model = Stack(*(Layer(i, parts=parts) for i in range(4)))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    expected = model.layers[1](model.layers[0](x)[0] if parts else model.layers[0](x))
    cut = Cut(model, find_layers(model))
    assert cut.skipped == 2
    assert cut.learn(lambda: model(x))
    torch.testing.assert_close(model(x), expected[0] if parts else expected, rtol=0, atol=0)
    assert isinstance(model.layers[3], Skip) and model.layers[3].layer_idx == 3
    cut.restore()
    assert all(isinstance(layer, Layer) for layer in model.layers)


def test_a_layer_that_changes_its_input_cannot_be_skipped() -> None:
    form = Form()
    form.learn((torch.ones(2, 8),), {}, torch.ones(2, 4))
    assert not form.fits
    form.learn((torch.ones(2, 8),), {}, torch.ones(2, 8))
    assert form.fits and form.entries is None


# Sum of the elements of all parameters, from the models' public cards. DeepSeek-V3's 58 vectors of
# 256 for the router's correction are buffers in transformers.
PARAMETERS = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "gemma-3-27b": 27_432_406_640,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "gpt-oss-20b": 20_914_757_184,
}
KINDS = {
    "llama-3-8b": [32],
    "llama-3-70b": [80],
    "qwen3-8b": [36],
    # The vision tower, then five layers in six with a window.
    "gemma-3-27b": [27, 52, 10],
    "mixtral-8x7b": [32],
    "deepseek-v3": [3, 58],
    "gpt-oss-20b": [12, 12],
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_public_models_have_their_public_sizes(name: str) -> None:
    built = build(json.loads((CONFIGS / f"{name}.json").read_text()), torch.bfloat16)
    assert built.parameters == PARAMETERS[name]
    assert [len(k.members) for k in find_layers(built.model).kinds] == KINDS[name]
    assert {p.device for p in built.model.parameters()} == {META}


TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
# One dense layer, three with experts; four norms in each.
SMALL: dict[str, Any] = {
    **TINY,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 32,
    "v_head_dim": 16,
}


@pytest.mark.long
def test_skipping_changes_no_count() -> None:
    """Sites of the traced layers, times how many are alike, are the sites of all layers traced."""
    fmt = FORMATS["mxfp8"]
    content = {"model_type": "deepseek_v3", **SMALL}
    kwargs: Any = {"training": False, "batch": 1, "seq": 32, "dtype": torch.bfloat16}
    whole = explain_config(build(content, torch.bfloat16), "small", fmt, MXNormConfig(), **kwargs)
    assert sum(len(k.traced) for k in whole.layers.kinds) < sum(
        len(k.members) for k in whole.layers.kinds
    )
    full = build(content, torch.bfloat16)
    choose = Chooser(full.config, fmt)
    paths = [
        path
        for path, module in full.model.named_modules()
        if isinstance(module, nn.Linear) and choose(path, module).chosen
    ]
    quantise_(full.model, paths, fmt, training=False)
    inputs = make_inputs(full, 1, 32, torch.bfloat16)[0]
    report = explain(full.model.eval(), training=False, **inputs)
    assert whole.rewritten == report.rewritten == 4 * 4
    assert whole.quantised == len(paths)
    residual = sum(g.residual for g in whole.sites)
    assert residual == sum(bool(s.spec["residual"]) for s in report.sites)
