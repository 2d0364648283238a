"""`mxnorm explain --config` on public models in their real sizes: right counts, and why no more."""

import html
import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mxnorm_pass.choices import GAUSSIAN
from mxnorm_pass.cli import main

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"

# Sites in the whole model. Two per pre-norm layer and four per layer with latent attention; where
# the feed-forward's linears are experts in 3-D parameters, only those in front of attention.
SITES = {
    "llama-3-8b": 2 * 32,
    "llama-3-70b": 2 * 80,
    "qwen3-8b": 2 * 36,
    "gemma-3-27b": 2 * 62,
    "mixtral-8x7b": 32,
    "gpt-oss-20b": 24,
    "deepseek-v3": 4 * 61,
}
# Norms without a site, by their number and a word of the reason.
WITHOUT = {
    "llama-3-8b": {"model.norm": (1, "lm_head")},
    "llama-3-70b": {"model.norm": (1, "lm_head")},
    "qwen3-8b": {
        "self_attn.q_norm": (36, "attention"),
        "self_attn.k_norm": (36, "attention"),
        "model.norm": (1, "lm_head"),
    },
    "gemma-3-27b": {
        "self_attn.q_norm": (62, "attention"),
        "self_attn.k_norm": (62, "attention"),
        "post_attention_layernorm": (62, "post-norm"),
        "post_feedforward_layernorm": (62, "post-norm"),
        "model.language_model.norm": (1, "lm_head"),
    },
    "mixtral-8x7b": {
        "post_attention_layernorm": (32, "a router and to experts held as 3-D parameters"),
        "model.norm": (1, "lm_head"),
    },
    "gpt-oss-20b": {
        "post_attention_layernorm": (24, "a router and to experts held as 3-D parameters"),
        "model.norm": (1, "lm_head"),
    },
    "deepseek-v3": {"model.norm": (1, "lm_head")},
}
LINEARS = {
    "llama-3-8b": 7 * 32,
    "llama-3-70b": 7 * 80,
    "qwen3-8b": 7 * 36,
    "gemma-3-27b": 7 * 62,
    "mixtral-8x7b": 4 * 32,
    "gpt-oss-20b": 4 * 24,
    # Five of latent attention, three of the feed-forward or of the shared expert.
    "deepseek-v3": 8 * 61,
}


def explained(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    torch._dynamo.reset()
    assert main(["explain", "--json", *argv]) == 0
    content = json.loads(capsys.readouterr().out)
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n, marks=pytest.mark.slow if n in ("llama-3-8b", "deepseek-v3") else pytest.mark.long
        )
        for n in SITES
    ],
)
def test_public_models(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.process_time()
    found = explained(capsys, "--config", str(CONFIGS / f"{name}.json"), "--infer")
    assert time.process_time() - start < 120
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 24e6
    assert (found["rewritten"], found["declined"]) == (SITES[name], 0)
    assert found["linears"]["quantised"] == LINEARS[name]
    without = {u["norm"]: u for u in found["norms_without_a_site"]}
    assert without.keys() == WITHOUT[name].keys()
    for norm, (count, why) in WITHOUT[name].items():
        assert without[norm]["count"] == count and why in without[norm]["why"]
    # All but the first layer's first norm read a residual sum.
    residual = sum(s["residual"] for s in found["sites"])
    plain = sum(s["count"] for s in found["sites"] if "a_layernorm" in s["norm"])
    assert residual == SITES[name] - plain - 1
    if name == "deepseek-v3":
        shared = [s for s in found["sites"] if "mlp.shared_experts.up_proj" in s["consumers"]]
        (site,) = shared
        assert site["count"] == 58 and site["traffic"]["launches"] == 0
        assert [a.split(" ")[0] for a in site["also"]] == ["mlp.gate", "mlp.experts"]
    if name == "llama-3-70b":
        # 160 sites; y of 4096 rows of 8192 in bfloat16, written and read back, less rstd.
        assert found["savings"]["bytes"] == 160 * (2 * 4096 * 8192 * 2 - 4 * 4096)
        assert found["savings"]["launches"] == 160


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 64,
        "attention_bias": True,
    }
    path.write_text(json.dumps(values))
    return str(path)


@pytest.mark.slow
def test_training_and_its_page(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    argv = ["explain", "--config", tiny, "--train", "--html", str(page), "--require", "7"]
    # Layer 2 is like layer 1, and not traced; one choice meets nothing.
    for layer in ("0", "1", "2", "9"):
        argv += ["--include", f"model.layers.{layer}.*"]
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert "6 site(s) in the whole model, 6 rewritten, 0 declined (4 traced)" in out
    assert "3 x  input_layernorm" in out and "fold +add in 2" in out
    said = "biases of k_proj, q_proj, v_proj: torchao's MXFP8 training path ignores them"
    assert said in " ".join(out.split())
    idle = [f"include='model.layers.{n}.*' matches no norm that feeds an MX cast" for n in "0129"]
    assert [line in " ".join(out.split()) for line in idle] == [False, False, False, True]
    said = html.unescape(page.read_text())
    assert [line in said for line in idle] == [False, False, False, True]
    assert all(len(line) <= 100 for line in out.splitlines())
    assert "model.layers.1.input_layernorm" in page.read_text()
    assert f"wrote {page}" in err and "6 of 7 required sites" in err
    assert GAUSSIAN not in " ".join(out.split())


@pytest.mark.slow
def test_options_reach_layers_that_are_not_traced_otherwise(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = explained(
        capsys,
        *("--config", tiny, "--infer", "--format", "nvfp4", "--tensor-scale", "bound"),
        *("--off", "model.layers.2.input_layernorm#0", "--exclude", "*.1.post_attention_layernorm"),
        *("--skip", "*.o_proj", "--also", "lm_head"),
    )
    assert (found["rewritten"], found["declined"]) == (5, 2)
    declined = {i: s["reason"] for s in found["sites"] if s["reason"] for i in s["ids"]}
    assert declined == {
        "model.layers.2.input_layernorm#0": "switched_off",
        "model.layers.1.post_attention_layernorm#0": "excluded",
    }
    # The head has a cast now, and with it the last norm a site.
    last = [s for s in found["sites"] if s["norm"] == "model.norm"]
    assert [s["consumers"] for s in last] == [["lm_head"]]
    assert {s["spec"]["format"] for s in found["sites"] if s["status"] == "rewritten"} == {"NVFP4"}
    assert found["linears"] == {
        "quantised": 6 * 3 + 1,
        "left": [{"why": "--skip", "count": 3, "example": "model.layers.0.self_attn.o_proj"}],
    }
    assert found["options"]["tensor_scale"] == "bound"
    # Public checkpoints were trained with RMSNorm: the notes have the advice, as a compile has it.
    assert found["notes"].count(GAUSSIAN) == found["report"]["warnings"].count(GAUSSIAN) == 1
