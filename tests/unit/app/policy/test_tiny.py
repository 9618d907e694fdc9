"""The tiny world: its words mean what they say, and its first policy has something to learn."""

import ast
from collections import Counter
from pathlib import Path

import torch

from app.domain.telemetry.turns import SamplingParams
from app.policy.chat import Chat
from app.policy.decoding.sampling import sample
from app.policy.model import load_policy
from app.policy.tiny import VOCABULARY
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
