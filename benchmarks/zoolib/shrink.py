"""Tiny configurations, by rules on the names of their fields.

A default configuration is turned into a dict, its numbers are replaced by small ones that go
together, and a new configuration is made of it. All widths are multiples of 32, the MX block.
"""

from __future__ import annotations

import re
from typing import Any

from zoolib.inputs import FIRST_SPECIAL

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 4, 2, 16, 128
MAX_LAYERS = 4

# First match of the whole name wins. A number stands for any larger one.
_RULES: tuple[tuple[str, int], ...] = (
    (r"hidden_size_per_layer_input", 32),
    (r"vocab_size_per_layer_input|.*vocab_size|max_num_bins", VOCAB),
    (r"(moe|expert)_.*(intermediate|hidden|ffn).*|share_expert_dim", 64),
    (r".*intermediate_size.*|.*ffn_dim|.*ffn_hidden_size|d_ff|dim_ff|n_inner|mlp_dim", 128),
    (r"feed_forward_size|aligner_ffn_dim|encoder_hidden_dim", 128),
    (r"qk_(rope|nope)_head_dim|v_head_dim", 32),
    (r"qk_head_dim", 64),
    (r"index(er)?_head_dim", 64),
    (r".*head_dim|d_kv|kv_channels|attention_head_size|resampler_dim_head", HEAD_DIM),
    (r"q_lora_rank", 64),
    (r".*(lora|gate|norm|hc_low|adapter|laurel|embedding)_?rank", 32),
    (r".*(num_key_value_heads|num_query_groups|kv_heads)", KV_HEADS),
    (r"(linear|lightning)_num_key_heads", 2),
    (
        r".*(num_attention_heads|num_heads|n_heads?|attention_heads|value_heads|resampler_heads)",
        HEADS,
    ),
    (r"(swa_)?num_attention_heads_per_layer", HEADS),
    (r".*(hidden_size(_global)?|d_model|n_embd|model_dim|embedding_size|lru_width)", HIDDEN),
    (r"(embed|projection|query|output|emb|text_embed|audio_embed|mm_embed|llm_embed)_dim", HIDDEN),
    (r"hidden_dim|embedding_dim|dim|ple_embed_dim|.*latent_size|.*latent_dim|width", HIDDEN),
    (r"projector_(input|output)_dim|vision_output_dim|adapter_out_dim|adapter_in_dim", HIDDEN),
    (r"hidden_channels|merged_hidden_size|projection_hidden_dim|cross_hidden_size", HIDDEN),
    (r".*(num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|top_k_experts)", 2),
    (r".*(num_experts|num_local_experts|n_routed_experts|num_routed_experts)", 4),
    (r"n_group|topk_group|num_expert_group|n_groups|.*mamba_ngroups|mamba_n_groups", 1),
    (r".*shared_experts?", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"index_topk|indexer_budget", 8),
    (r".*max_position_embeddings|max_(source|target)_positions|model_max_length|seq_len", 128),
    (r".*sliding_window(_size)?|attention_window_size|local_radius", 16),
    (r".*chunk_size", 16),
    (r".*state_size|mamba_d_state", 16),
    (r"time_step_rank|mamba_dt_rank", 32),
    (r"image_size|img_size|crop_size", 32),
    (r"patch_size", 8),
    (r"num_position_embeddings|position_embedding_size", 64),
    (r"num_mel_bins|mel_dim|n_mel_bins", 32),
    (r"codebook_size", 64),
    (r".*num_codebooks", 4),
    (r"num_image_tokens|image_seq_length|mm_tokens_per_image", 16),
)
_COUNTS = re.compile(
    r"num_hidden_layers|n_layers?|num_layers|layers|(en|de)coder_layers|num_(en|de)coder_layers|"
    r"depth|num_blocks|resampler_depth|num_(spatial|temporal|auxiliary)_layers|attention_layers|"
    r"conf_num_hidden_layers|num_hidden_blocks|num_global_layers|num_sparse_(en|de)coder_layers"
)
_DROPOUT = re.compile(
    r".*dropout(_?(rate|prob|p|value))?|.*_pdrop|.*layerdrop|.*drop_path.*|droppath"
)
_TOKEN = re.compile(r".*token_(id|index)s?|.*_(start|end|bos|eos|pad)_id|image_patch_id")
_MASKED = ("full_attention", "sliding_attention", "chunked_attention", "attention")
# Written by to_dict() for the reader, or about loading; no argument of a configuration.
_NOT_ARGUMENTS = ("transformers_version", "architectures", "_name_or_path", "dtype", "model_type")

Fields = dict[str, Any]


def shrink(fields: Fields, override: Fields | None = None, depth: int = 0) -> Fields:
    """A default configuration's fields with small numbers; ``override`` has the last word."""
    override = dict(override or {})
    kept = _layers(fields, override)
    count = len(_of(fields, "layer_types")) or _depth(fields)
    out: Fields = {}
    special = iter(range(FIRST_SPECIAL, VOCAB))
    mla = isinstance(fields.get("qk_rope_head_dim"), int)
    for name, value in fields.items():
        if name in override or name in _NOT_ARGUMENTS:
            continue
        if name == "per_layer_config" and isinstance(value, dict):
            out[name] = {
                new: shrink({**_latent(fields), **value[key]}, None, depth + 1)
                for key in value
                for new, old in enumerate(kept)
                if int(key) == old
            }
        elif isinstance(value, dict):
            out[name] = _nested(name, value, fields, depth)
        elif mla and name in ("head_dim", "num_key_value_heads") and isinstance(value, int):
            # Latent attention: the rotated part, and as many keys as queries.
            out[name] = 32 if name == "head_dim" else HEADS
        elif name == "head_dim" and value is None:
            # Some models ask whether it is there, not whether it is set.
            out[name] = HEAD_DIM
        else:
            out[name] = _value(name, value, kept, count, special)
    for name, value in override.items():
        nested = fields.get(name)
        if isinstance(value, dict) and isinstance(nested, dict) and nested.get("model_type"):
            out[name] = {**shrink(nested, value, depth + 1), "model_type": nested["model_type"]}
        else:
            out[name] = value
    if out.get("use_cache"):
        out["use_cache"] = False
    return out


def _latent(fields: Fields) -> Fields:
    """What makes the rules for latent attention hold in a layer's own fields."""
    name = "qk_rope_head_dim"
    return {name: fields[name]} if isinstance(fields.get(name), int) else {}


def _nested(name: str, value: Fields, fields: Fields, depth: int) -> Any:
    if name in ("id2label", "label2id"):
        return value
    if "rope" in name or name == "rope_scaling":
        return _rope(value, fields)
    if "model_type" not in value and not any(str(k).endswith("hidden_size") for k in value):
        return value
    inner = shrink(value, None, depth + 1)
    if value.get("model_type"):
        inner["model_type"] = value["model_type"]
    return inner


def _value(name: str, value: Any, kept: list[int], count: int, special: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if _DROPOUT.fullmatch(name) and isinstance(value, (int, float)):
        return type(value)(0)
    if isinstance(value, (list, tuple)):
        if _TOKEN.fullmatch(name):
            return [next(special) for _ in value]
        if count > 1 and len(value) == count:
            value = [value[i] for i in kept]
        return [_value(name, v, kept, -1, special) for v in value]
    if not isinstance(value, int):
        return value
    if _TOKEN.fullmatch(name):
        return value if value < 4 else next(special)
    if _COUNTS.fullmatch(name):
        return min(value, len(kept))
    for pattern, small in _RULES:
        if re.fullmatch(pattern, name):
            return min(value, small) if value > 0 else value
    return value


def _of(fields: Fields, name: str) -> list[Any]:
    value = fields.get(name)
    return list(value) if isinstance(value, (list, tuple)) else []


def _depth(fields: Fields) -> int:
    for name in ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "depth"):
        value = fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0


def _layers(fields: Fields, override: Fields) -> list[int]:
    """Indices of the layers that are kept: one of each kind that the per-layer lists tell apart.

    Two where a count of dense layers before sparse ones stands for such a list.
    """
    total = len(_of(fields, "layer_types")) or _depth(fields)
    wanted = override.get("num_hidden_layers")
    if not total:
        return [0]
    lists = [v for v in fields.values() if isinstance(v, (list, tuple)) and len(v) == total > 1]
    kinds: dict[str, int] = {}
    for i in range(total):
        # Numbers per layer (rates, scales) are no kinds.
        words = [_kind(v[i]) for v in lists if isinstance(v[i], (str, bool))]
        kinds.setdefault(repr(words), i)
    dense = fields.get("first_k_dense_replace", fields.get("num_dense_layers"))
    kept = list(kinds.values())[:MAX_LAYERS]
    if len(kept) == 1 and total > 1 and dense:
        kept = [0, total - 1]
    if isinstance(wanted, int):
        kept = [i % total for i in range(wanted)]
    return kept


def _kind(word: str | bool) -> str | bool:
    """Attention that differs in its mask alone is of one kind."""
    return "attention" if word in _MASKED else word


def _rope(value: Fields, fields: Fields) -> Fields:
    """Rotary parameters without long-context scaling, whose factors are lists per frequency."""
    if value and all(v is None or isinstance(v, dict) for v in value.values()):
        return {k: v and _rope(v, fields) for k, v in value.items()}
    out = {k: v for k, v in value.items() if k not in ("short_factor", "long_factor")}
    if value.get("rope_type") in ("longrope", "yarn", "llama3", "dynamic", "linear"):
        out["rope_type"] = "default"
    if "mrope_section" in value:
        mla = isinstance(fields.get("qk_rope_head_dim"), int)
        dim = (32 if mla else HEAD_DIM) * float(value.get("partial_rotary_factor") or 1.0)
        out["mrope_section"] = _sections(int(dim) // 2, len(value["mrope_section"]))
    return out


def _sections(total: int, parts: int) -> list[int]:
    share = total // parts
    return [total - share * (parts - 1)] + [share] * (parts - 1)


def make_config(cls: Any, override: Fields | None = None, mrope: bool = False) -> Any:
    """A tiny configuration of a class.

    ``mrope`` says that the model splits its rotary frequencies into three sections, whose default
    sizes may stand in its code.
    """
    fields = cls().to_dict()
    if mrope:
        for part in (fields, *(v for v in fields.values() if isinstance(v, dict))):
            rope = part.get("rope_parameters")
            if isinstance(rope, dict) and "rope_type" in rope:
                rope.setdefault("mrope_section", [0, 0, 0])
    return cls(**shrink(fields, override))
