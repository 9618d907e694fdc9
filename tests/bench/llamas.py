"""Llamas of random weights, as large as those that people serve: what benches on a GPU use, where no real ones can be had."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from app.policy.storage.snapshot import finish_snapshot

SHAPES = {
    "tiny": (256, 768, 2, 4, 2), "0.5b": (1280, 3584, 24, 20, 4), "1.5b": (2048, 5632, 28, 16, 8), "3b": (2560, 8192, 36, 20, 4),
}  # fmt: skip
"""Hidden, intermediate, layers, heads, key/value heads."""
VOCABULARY = 49_152


def random_llama(folder: Path, size: str, *, device: torch.device, context: int, sharp: float = 1.0) -> str:
    """Make a snapshot in the folder, beside what is there; returns its digest. Random weights say next to nothing: with embeddings `sharp`
    times as large some tokens are far likelier than others."""
    hidden, intermediate, layers, heads, kv_heads = SHAPES[size]
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=context, tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device(device):
        state = LlamaForCausalLM(config).bfloat16().state_dict()
    state["model.embed_tokens.weight"].mul_(sharp)
    return finish_snapshot(folder, state)
