"""Tiny random mixture-of-experts models, for the tests of expert recording and router replay.

Written as snapshots with the tiny world's tokenizer. The routers are random with a spread wide enough that tokens really choose.
"""

from enum import StrEnum
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedConfig, Qwen3MoeConfig

from app.policy.experts import routers
from app.policy.storage.snapshot import finish_snapshot, replacing
from app.policy.tiny import CONTEXT, END, PAD, START, VOCABULARY, write_tiny_tokenizer

EXPERTS = 8
PER_TOKEN = 2


class Architecture(StrEnum):
    """Mixture-of-experts families."""

    QWEN3_MOE = "qwen3_moe"
    """Softmax over experts, then top-k; every layer has experts."""
    DEEPSEEK_V3 = "deepseek_v3"
    """Sigmoid scores, grouped top-k with a correction bias, a shared expert, a dense first layer, latent attention (Kimi-K2 as well)."""


def write_tiny_moe(folder: Path, architecture: Architecture, *, seed: int = 0) -> str:
    """Write a tiny model with 8 experts, 2 per token; returns its digest."""
    torch.manual_seed(seed)
    config = _config(architecture)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for _, router in routers(model):
            torch.nn.init.normal_(router.get_parameter("weight"), std=0.5)
    with replacing(folder) as incoming:
        config.save_pretrained(incoming)
        write_tiny_tokenizer(incoming)
        return finish_snapshot(incoming, model.state_dict())


def _config(architecture: Architecture) -> PreTrainedConfig:
    common = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_experts_per_tok": PER_TOKEN, "max_position_embeddings": CONTEXT, "bos_token_id": START,
        "eos_token_id": END, "pad_token_id": PAD, "tie_word_embeddings": False, "initializer_range": 0.1,
    }  # fmt: skip
    if architecture is Architecture.QWEN3_MOE:
        return Qwen3MoeConfig(**common, num_key_value_heads=2, num_experts=EXPERTS, norm_topk_prob=True, decoder_sparse_step=1)
    return DeepseekV3Config(
        **common, num_key_value_heads=4, n_routed_experts=EXPERTS, n_shared_experts=1, n_group=4, topk_group=2, first_k_dense_replace=1,
        q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )  # fmt: skip
