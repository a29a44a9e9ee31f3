"""Tiny random models of every family of recurrent targets: one configuration each, built only when it is asked for.

`FAMILIES` are the ones that most tests run on; `MORE_FAMILIES` and `CONVOLUTIONS` (models that keep windows, and no
recurrent state) are for `test_families.py`; `REFUSED` says with which reason.
"""

from collections.abc import Callable
from typing import Any

import transformers


VOCAB_SIZE = 97
LAYER_TYPES = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
}
NO_SPECIAL_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
GATED_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,  # K != V, so that a transposed state cannot pass
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
LATENT_ATTENTION = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
KDA_HEADS = {"linear_head_dim": 16, "linear_num_heads": 4, "linear_conv_kernel_dim": 4}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
HEADS_ALIKE = {**BASE, "num_key_value_heads": 4}

FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(
        layer_types=LAYER_TYPES, head_dim=16, intermediate_size=96, **GATED_DELTA, **BASE, **NO_SPECIAL_TOKENS
    ),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(
        layer_types=LAYER_TYPES, head_dim=16, **EXPERTS, **GATED_DELTA, **BASE, **NO_SPECIAL_TOKENS
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        layer_types=LAYER_TYPES,
        head_dim=16,
        intermediate_size=96,
        **EXPERTS,
        **GATED_DELTA,
        **BASE,
        **NO_SPECIAL_TOKENS,
    ),
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(
        layer_types=LAYER_TYPES,
        intermediate_size=96,
        **{**GATED_DELTA, "linear_num_key_heads": 4},
        **BASE,
        **NO_SPECIAL_TOKENS,
    ),
    "kimi_linear": lambda: transformers.KimiLinearConfig(
        layer_types=LAYER_TYPES,
        num_local_experts=4,
        qk_rope_head_dim=8,
        **LATENT_ATTENTION,
        **KDA_HEADS,
        **HEADS_ALIKE,
        **NO_SPECIAL_TOKENS,
    ),
    "bamba": lambda: transformers.BambaConfig(
        attn_layer_indices=[2], intermediate_size=96, mamba_chunk_size=32, **MAMBA2, **BASE, **NO_SPECIAL_TOKENS
    ),
    "nemotron_h": lambda: nemotron_h(),
}

MORE_FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen4_exp": lambda: transformers.Qwen4ExpTextConfig(
        layer_types=LAYER_TYPES,
        head_dim=16,
        output_gate_type="sigmoid",
        hc_count=2,
        hc_lowrank=16,
        ple_layer_ids=[1, 2],  # counted from 1: two more convolution windows in the cache layers of mixers
        ple_embed_dim=32,
        heads_per_ngram=2,
        ngram_vocab_size_base=50,
        indexer_n_heads=16,  # with few, many scores are exactly 0
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=16,  # fewer keys than tokens, so that keys are chosen
        indexer_compress_ratio=4,
        **EXPERTS,
        **GATED_DELTA,
        **BASE,
        **{**NO_SPECIAL_TOKENS, "eos_token_id": 1},
    ),
    "lara_mini": lambda: transformers.LaraMiniConfig(
        layer_types=["linear_attention", "sliding_attention", "full_attention", "linear_attention"],
        sliding_window=4,
        head_dim=16,
        tie_word_embeddings=False,  # random weights that are tied repeat a token forever
        **EXPERTS,
        **GATED_DELTA,
        **BASE,
        **NO_SPECIAL_TOKENS,
    ),
    "bailing_hybrid": lambda: transformers.BailingHybridConfig(
        layer_types=LAYER_TYPES,
        num_local_experts=4,
        qk_rope_head_dim=8,
        head_dim=16,
        short_conv_kernel_size=4,
        num_mtp_layers=0,
        **LATENT_ATTENTION,
        **HEADS_ALIKE,
        **NO_SPECIAL_TOKENS,
    ),
    "glm5_next": lambda: transformers.Glm5NextTextConfig(  # only within an image-and-text model
        layer_types=LAYER_TYPES,
        n_routed_experts=4,
        q_lora_rank=16,
        index_topk=16,  # fewer keys than tokens, so that keys are chosen
        index_kpool=4,
        index_head_dim=16,
        index_n_heads=16,  # with few, many scores are exactly 0, and how ties are broken depends on the length
        hc_mult=2,
        hc_sinkhorn_iters=3,
        **LATENT_ATTENTION,
        **KDA_HEADS,
        **HEADS_ALIKE,
        **NO_SPECIAL_TOKENS,
    ),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        layer_types=LAYER_TYPES,
        intermediate_size=96,
        shared_intermediate_size=32,
        num_local_experts=4,
        mamba_chunk_size=32,
        **MAMBA2,
        **BASE,
        **NO_SPECIAL_TOKENS,
    ),
    "zamba2": lambda: transformers.Zamba2Config(
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
        num_mem_blocks=1,
        n_mamba_heads=8,
        mamba_ngroups=2,
        mamba_d_state=12,
        chunk_size=32,
        intermediate_size=96,
        adapter_rank=8,
        use_mem_rope=True,
        tie_word_embeddings=False,
        **HEADS_ALIKE,
        **NO_SPECIAL_TOKENS,
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=4,
        num_heads=8,
        head_dim=16,
        state_size=12,
        n_groups=2,
        chunk_size=32,
        **NO_SPECIAL_TOKENS,
    ),
    "falcon_h1": lambda: transformers.FalconH1Config(
        intermediate_size=96, mamba_chunk_size=32, mamba_d_ssm=128, **MAMBA2, **BASE, **NO_SPECIAL_TOKENS
    ),
}

SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FEW_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "num_dense_layers": 1}
CONV_LAYERS = ["conv", "full_attention", "conv"]

CONVOLUTIONS: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: transformers.Lfm2Config(layer_types=CONV_LAYERS, **SMALL, **NO_SPECIAL_TOKENS),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        layer_types=CONV_LAYERS, **FEW_EXPERTS, **SMALL, **NO_SPECIAL_TOKENS
    ),
    "lfm3": lambda: transformers.Lfm3Config(
        layer_types=CONV_LAYERS, head_dim=8, **FEW_EXPERTS, **SMALL, **NO_SPECIAL_TOKENS
    ),
    "inkling_text": lambda: transformers.InklingTextConfig(
        layer_types=["hybrid"] * 3,
        head_dim=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_shared_experts=1,
        moe_intermediate_size=32,
        **SMALL,
        **NO_SPECIAL_TOKENS,
    ),
}

MAMBA1, UNKNOWN = "Mamba-1", "does not know how to roll back"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "mamba": (
        lambda: transformers.MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, state_size=4),
        MAMBA1,
    ),
    "falcon_mamba": (
        lambda: transformers.FalconMambaConfig(
            vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, state_size=4
        ),
        MAMBA1,
    ),
    "jamba": (
        lambda: transformers.JambaConfig(
            num_experts=2,
            num_experts_per_tok=1,
            mamba_d_state=4,
            mamba_dt_rank=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            **SMALL,
        ),
        MAMBA1,
    ),
    "zamba": (
        lambda: transformers.ZambaConfig(
            layers_block_type=["linear_attention", "hybrid"] * 2,
            mamba_d_state=4,
            mamba_dt_rank=4,
            n_mamba_heads=2,
            **{**SMALL, "num_hidden_layers": 4, "num_key_value_heads": 4},
        ),
        MAMBA1,
    ),
    "zaya": (
        lambda: transformers.ZayaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            moe_intermediate_size=32,
            num_experts=2,
            router_hidden_size=16,
            **NO_SPECIAL_TOKENS,
        ),
        UNKNOWN,
    ),
    "rwkv": (
        lambda: transformers.RwkvConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2),
        UNKNOWN,
    ),
    "minimax": (
        lambda: transformers.MiniMaxConfig(
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            head_dim=8,
            num_local_experts=2,
            **SMALL,
        ),
        UNKNOWN,
    ),
    "recurrent_gemma": (
        lambda: transformers.RecurrentGemmaConfig(lru_width=32, **{**SMALL, "num_key_value_heads": 1}),
        UNKNOWN,
    ),
    "xlstm": (
        lambda: transformers.xLSTMConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, num_heads=4),
        UNKNOWN,
    ),
    "deepseek_v4": (
        lambda: transformers.DeepseekV4Config(
            vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=3, num_attention_heads=4
        ),
        UNKNOWN,
    ),
}


def nemotron_h(**changes: Any) -> Any:
    """Two Mamba-2 layers, experts, and attention."""
    options = {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
        "ssm_state_size": 12,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 32,
        "head_dim": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "intermediate_size": 96,
    }
    base = {name: value for name, value in BASE.items() if name != "num_hidden_layers"}
    return transformers.NemotronHConfig(**{**options, **base, **NO_SPECIAL_TOKENS, **changes})
