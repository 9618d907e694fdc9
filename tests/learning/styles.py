"""A world of styles: a small language model that can answer each problem in three ways, and people who want one of them.

A problem is four words, an answer four words: in style s, word i of the answer is word i of the problem moved on by `MOVES[s]` places of
an alphabet of 24. The base model was pretrained here, in seconds, on answers in all styles (mostly the first), and on conversations in
which somebody shows the answer they wanted and then gets it: so it reads what was said behind a prompt, as a large model does. Problems
repeat by chance only (331,776 of them), so whoever learns the style answers new ones right.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from app.domain.learning.batches import TurnPayload
from app.domain.learning.corrections import CorrectionKind
from app.policy.chat import Chat
from app.policy.model import load_model
from app.policy.storage.snapshot import finish_snapshot, replacing
from pipelines.training.hindsight.lessons import HINTS
from tests.fakes.learning import NOON, drawn

WORDS = tuple("abcdefghijklmnopqrstuvwx")
SPECIAL = ("<pad>", "<unk>", "<u>", "<e>", "<a>")
MOVES = (0, 7, 13)
PRIOR = (0.6, 0.25, 0.15)
"""How often the base answers in each style, word by word."""
LENGTH = 4
TEMPLATE = "{% for message in messages %}<u> {{ message['content'] }} <e> {% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
Problem = tuple[int, ...]


def styled(problem: Problem, styles: Sequence[int]) -> tuple[int, ...]:
    """The answer, a style for each word; words are numbers from 0 to 23."""
    return tuple((word + MOVES[style]) % len(WORDS) for word, style in zip(problem, styles, strict=True))


def styles_of(problem: Problem, answer: Sequence[int]) -> tuple[int | None, ...]:
    """In which style each word of an answer is; None for a word that is in none."""
    found = [(word - first) % len(WORDS) for first, word in zip(problem, answer, strict=True)]
    return tuple(MOVES.index(moved) if moved in MOVES else None for moved in found)


def text_of(words: Sequence[int]) -> str:
    """As somebody would type it."""
    return " ".join(WORDS[word] for word in words)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A problem, the answer to it and its tokens."""

    problem: Problem
    answer: tuple[int, ...]
    """Numbers of words; one that is no word is -1."""
    payload: TurnPayload

    def in_style(self, style: int) -> float:
        """Share of the answer's words that are in it."""
        return sum(found == style for found in styles_of(self.problem, self.answer)) / LENGTH


def problems(count: int, seed: int | str) -> list[Problem]:
    """New ones."""
    numbers = random.Random(f"problems-{seed}")
    return [tuple(numbers.randrange(len(WORDS)) for _ in range(LENGTH)) for _ in range(count)]


def write_base(folder: Path, *, steps: int = 1500, seed: int = 0) -> str:
    """Pretrain the base and write it as a snapshot; returns its digest."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(WORDS), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.08,
    )  # fmt: skip
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as incoming:
        config.save_pretrained(incoming)
        _write_tokenizer(incoming)
        model = LlamaForCausalLM(config)
        _pretrain(model, Chat.load(incoming), steps=steps, seed=seed)
        return finish_snapshot(incoming, model.state_dict())


def _write_tokenizer(folder: Path) -> None:
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _pretrain(model: LlamaForCausalLM, chat: Chat, *, steps: int, seed: int) -> None:
    """Half of the rows are problem and answer, half have somebody's wanted answer behind the problem, which the answer then is."""
    numbers = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    first = len(SPECIAL)
    plain = torch.tensor(chat.prompt([{"role": "user", "content": text_of([0] * LENGTH)}]))
    hinted = torch.tensor(chat.and_then(plain.tolist(), f"{HINTS[CorrectionKind.DEMONSTRATION]}\n\n{text_of([0] * LENGTH)}"))
    moves = torch.tensor(MOVES)
    for step in range(steps):
        prompt = plain if step % 2 else hinted
        asked = torch.randint(len(WORDS), (64, LENGTH), generator=numbers)
        style = torch.multinomial(torch.tensor(PRIOR), 64 * LENGTH, replacement=True, generator=numbers).view(64, LENGTH)
        if step % 2 == 0:  # whoever shows an answer means one style, and may mean any
            style = torch.randint(len(MOVES), (64, 1), generator=numbers).expand(64, LENGTH)
        answer = (asked + moves[style]) % len(WORDS)
        rows = prompt.repeat(64, 1)
        rows[:, 1 : 1 + LENGTH] = asked + first
        if step % 2 == 0:
            rows[:, -2 - LENGTH : -2] = answer + first
        tokens = torch.cat([rows, answer + first], 1)
        logits = model(tokens).logits[:, len(prompt) - 1 : -1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, len(prompt) :].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def answered(folder: Path, asked: Sequence[Problem], *, version: str, seed: int, name: str = "turn") -> list[Turn]:
    """One sampled answer to each problem, with true log-probabilities."""
    model, chat = load_model(folder, dtype=torch.float32).eval(), Chat.load(folder)
    first, *rest = chat.prompt([{"role": "user", "content": text_of([0] * LENGTH)}])
    prompts = [[first, *(word + len(SPECIAL) for word in problem), *rest[LENGTH:]] for problem in asked]
    tokens, logprobs = drawn(model, prompts, length=LENGTH, seed=seed)
    return [
        Turn(
            problem=problem, answer=tuple(token - len(SPECIAL) if token >= len(SPECIAL) else -1 for token in row[-LENGTH:]),
            payload=TurnPayload(
                inference_id=f"{name}-{seed}-{number:04d}", episode_id=f"episode-{name}-{seed}-{number:04d}", policy="composer",
                version=version, prompt_tokens=tuple(prompt), completion_tokens=tuple(row[-LENGTH:]), logprobs=tuple(logged),
                temperature=1.0, top_p=1.0, finished_at=NOON,
            ),
        )
        for number, (problem, prompt, row, logged) in enumerate(zip(asked, prompts, tokens.tolist(), logprobs.tolist(), strict=True))
    ]  # fmt: skip
