"""What the rules on names cannot know, per model type: fields of the configuration.

An entry is merged over the shrunk configuration; a dict is merged into the nested configuration.
"""

from __future__ import annotations

from typing import Any

# d_inner is 128 = heads x head_dim, and in_proj has 2 * 128 + 2 * 16 + heads outputs, a multiple
# of 32.
_MAMBA = {"mamba_n_heads": 32, "mamba_d_head": 4}

OVERRIDES: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 32, "head_dim": 4, "n_groups": 1, "state_size": 16, "expand": 2},
    "bamba": {**_MAMBA, "attn_layer_indices": [1], "num_hidden_layers": 2},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128, "mamba_rms_norm": True},
    "granitemoehybrid": {
        **_MAMBA,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 128,
    },
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "num_hidden_layers": 2,
        "hybrid_layer_ids": [1],
        "mamba_headdim": 4,
        "n_mamba_heads": 32,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
    },
    "clvp_encoder": {"hidden_size": 128},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
            }
        }
    },
    # A window of 128 tokens is never complete here, and what is computed for it is dead code.
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma_text": {
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "dory": {
        "num_hidden_layers": 6,
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
        "layer_types": ["sliding_attention", "mlp"] * 3,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "deepseek_ocr2_text": {
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "num_hidden_layers": 2,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "num_key_value_heads": 4},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "emu3": {"vocabulary_map": {"<image>": 3}},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [3, 3, 2],
        }
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "neomme": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {},
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "step3p5": {"sliding_window": 16},
    "esmc": {"num_key_value_heads": 4},
    "glm5_next_text": {"num_key_value_heads": 4, "index_topk": 16},
    "xlstm": {"inference_state_dtype": "bfloat16"},
    "vibevoice_acoustic_tokenizer_encoder": {"depths": [1] * 7, "num_filters": 32},
    "vibevoice_acoustic_tokenizer_decoder": {"depths": [1] * 7, "num_filters": 32},
}
