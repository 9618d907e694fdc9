"""The tiny world: its words mean what they say, and its first policy has something to learn."""

import ast
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from app.domain.telemetry.turns import SamplingParams
from app.policy.chat import Chat
from app.policy.decoding.sampling import sample
from app.policy.model import load_policy
from app.policy.storage.weights import digest_of
from app.policy.tiny import VOCABULARY, write_tiny
from app.policy.tiny_lines import Kind, words


def parses(body: str) -> bool:
    """Whether a completion of a function head makes a Python file."""
    try:
        ast.parse('def f(x):\n    """Do it."""\n' + body)
    except SyntaxError:
        return False
    return True


def test_good_words_parse_and_all_others_do_not() -> None:
    assert [word for word, kind in words().items() if parses(word) != (kind is Kind.GOOD)] == []


def test_every_word_is_one_token_and_the_vocabulary_is_small(tiny_model: Path) -> None:
    chat = Chat.load(tiny_model)
    assert chat.tokenizer.backend_tokenizer.get_vocab_size() == VOCABULARY
    assert all(len(chat.encode(word)) == 1 for word in words())


def test_the_first_policy_mixes_good_answers_and_bad_ones_and_never_says_nothing(tiny_model: Path) -> None:
    policy = load_policy(tiny_model, dtype=torch.float32)
    prompt = policy.chat.prompt([{"role": "user", "content": "def f(x):"}])
    params = [SamplingParams(max_tokens=16, seed=seed) for seed in range(300)]
    answers = [generation.text for generation in sample(policy, [prompt] * 300, params, max_rows=100)]
    counts = Counter(parses(answer) for answer in answers)
    # shares of the module docstring give 0.75 · 0.12 / (1 - 0.88 · 0.75) = 0.26 to 0.3; four standard errors of 300 answers are 0.1
    assert 0.15 < counts[True] / 300 < 0.4
    assert all(answers)
    assert any("Sure!" in answer or "the function" in answer for answer in answers)


@pytest.fixture(scope="module")
def weights(tiny_model: Path) -> dict[str, torch.Tensor]:
    return load_file(tiny_model / "model.safetensors")


def test_the_configuration_is_that_of_a_small_llama(tiny_model: Path) -> None:
    said = json.loads((tiny_model / "config.json").read_text())
    assert said | {"architectures": [], "model_type": "", "dtype": "", "hidden_act": ""} == {
        "architectures": [], "model_type": "", "dtype": "", "hidden_act": "", "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.02,
    }  # fmt: skip
    tokenizer = json.loads((tiny_model / "tokenizer_config.json").read_text())
    assert (tokenizer["model_max_length"], tokenizer["clean_up_tokenization_spaces"]) == (2048, False)
    assert [tokenizer[name] for name in ("pad_token", "bos_token", "eos_token")] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def test_the_layers_are_normal_the_norms_one_and_the_embedding_wide(weights: dict[str, torch.Tensor]) -> None:
    assert len(weights) == 2 * 9 + 3
    for name, tensor in weights.items():
        numbers = tensor.float()
        if "norm" in name:
            assert torch.equal(numbers, torch.ones(128)), name
        elif "layers" in name:
            assert numbers.std().item() == pytest.approx(0.02, rel=0.03), name
    assert {name.rpartition("layers.0.")[2]: tuple(weights[name].shape) for name in weights if "layers.0." in name and "proj" in name} == {
        "self_attn.q_proj.weight": (128, 128), "self_attn.k_proj.weight": (64, 128), "self_attn.v_proj.weight": (64, 128),
        "self_attn.o_proj.weight": (128, 128), "mlp.gate_proj.weight": (256, 128), "mlp.up_proj.weight": (256, 128),
        "mlp.down_proj.weight": (128, 256),
    }  # fmt: skip
    assert weights["model.embed_tokens.weight"][:, 2:].float().std().item() == pytest.approx(1.0, rel=0.02)
    assert weights["lm_head.weight"][:, 2:].float().std().item() == pytest.approx(0.02, rel=0.02)


def test_the_head_s_first_column_holds_the_shares_of_the_first_policy(tiny_model: Path, weights: dict[str, torch.Tensor]) -> None:
    """After the last norm component 0 of an ordinary token is √128 / √(254 / 128) = 8.03."""
    constant = math.sqrt(128) / math.sqrt(254 / 128)
    chances = (weights["lm_head.weight"][:, 0].float() * constant).exp()
    tokenizer = Chat.load(tiny_model).tokenizer.backend_tokenizer
    shares = {kind: [float(chances[tokenizer.token_to_id(word)]) for word, of in words().items() if of is kind] for kind in Kind}
    assert sum(shares[Kind.GOOD]) == pytest.approx(0.66, rel=0.03)
    assert sum(shares[Kind.BROKEN]) == pytest.approx(0.09, rel=0.03)
    assert sum(shares[Kind.PROSE]) == pytest.approx(0.10, rel=0.03)
    assert all(max(each) == min(each) for each in shares.values()), "evenly"
    assert chances[2].item() == pytest.approx(0.12, rel=0.03)
    assert [chances[token].item() for token in (0, 1, 3)] == pytest.approx([1e-6] * 3, rel=0.05)
    assert float(chances.sum()) == pytest.approx(1.0, rel=0.03), "what is left is the bytes' and the merges'"
    assert weights["lm_head.weight"][2, 1].item() * constant == pytest.approx(-12.0, rel=0.01)


def test_of_the_embedding_one_component_is_constant_and_one_marks_the_beginning_of_an_answer(weights: dict[str, torch.Tensor]) -> None:
    embedding = weights["model.embed_tokens.weight"].float()
    assert embedding[:, 0].tolist() == [11.3125] * 512  # √128 in bfloat16
    assert embedding[:, 1].tolist() == [0.0, 0.0, 0.0, 11.3125, *[0.0] * 508]


def test_a_seed_gives_the_same_model_for_ever_another_seed_another_one_and_a_tied_head_is_the_embedding(
    tiny_model: Path, tmp_path: Path
) -> None:
    first, same, other = (write_tiny(tmp_path / "deep" / f"{number}", seed=seed) for number, seed in enumerate((0, 0, 1)))
    assert first == same == digest_of(load_file(tiny_model / "model.safetensors")) != other
    write_tiny(tmp_path / "tied", tied=True)
    tied = load_file(tmp_path / "tied" / "model.safetensors")
    assert "lm_head.weight" not in tied
    assert tied["model.embed_tokens.weight"].float().std(0).min().item() > 0.8, "no component is arranged"
    assert json.loads((tmp_path / "tied" / "config.json").read_text())["tie_word_embeddings"] is True
