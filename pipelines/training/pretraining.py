"""Continued pretraining: next-token loss on text, packed, with held-out perplexity per domain before and after.

Fed by a folder or Parquet of text / feeds the gates with a new base version. A domain is the first folder below the corpus (or the Parquet
column `domain`); every 20th document, drawn by a hash of its name, is held out and never trained on.
"""

import hashlib
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from app.domain.errors import BadInput, Held
from app.domain.learning.training import AdamParams, Datum, LossName, LossSpec
from app.domain.ports import ProgressLog, Trainer
from app.domain.release.versions import HoldReason
from pipelines.training import guards

TEXT_SUFFIXES = frozenset(
    {".txt", ".md", ".rst", ".py", ".js", ".ts", ".go", ".rs", ".c", ".h", ".cpp", ".java", ".toml", ".json", ".yaml"}
)
HELD_OUT_EVERY = 20


class PretrainingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pass of next-token training."""

    steps: int = 50
    sequence_tokens: int = 512
    sequences_per_step: int = 8
    learning_rate: float = 2e-5
    warmup_steps: int = 10
    """The learning rate rises linearly over these, then falls to a tenth along a cosine."""
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    held_out_sequences: int = 8
    """Per domain, for the perplexity."""
    micro_batch_tokens: int = 512
    dtype: str = "auto"
    threads: int = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text."""

    name: str
    domain: str
    text: str

    @property
    def held_out(self) -> bool:
        """Drawn once, by a hash of the name."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big") % HELD_OUT_EVERY == 0


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Token sequences of equal length, ends of documents marked, cut across documents so that nothing is padded."""

    training: tuple[tuple[int, ...], ...]
    held_out: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict[str, tuple[tuple[int, ...], ...]])
    """Per domain."""

    @property
    def id(self) -> str:
        """SHA-256 (first 32 hex digits) of the sequences: what a batch's id is to an RL run."""
        return hashlib.sha256(repr((self.training, sorted(self.held_out.items()))).encode()).hexdigest()[:32]


class Tokenizer:
    """What pretraining needs of one."""

    def __init__(self, encode: Any, end_token: int) -> None:  # noqa: ANN401 - any callable from text to token ids
        self.encode = encode
        self.end_token = end_token


def read_folder(folder: Path) -> Iterator[Document]:
    """Every text file below the folder, in an order drawn by a hash of the names, so that the first so many are a sample of all domains;
    files that are not UTF-8 are passed over. Raises `BadInput` where there is none."""
    files = [path for path in folder.rglob("*") if path.suffix in TEXT_SUFFIXES and path.is_file()]
    files.sort(key=lambda path: hashlib.sha256(str(path.relative_to(folder)).encode()).digest())
    if not files:
        raise BadInput(f"{folder} holds no text ({', '.join(sorted(TEXT_SUFFIXES))}): give a folder with some, or a Parquet file")
    for path in files:
        relative = path.relative_to(folder)
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        yield Document(name=str(relative), domain=relative.parts[0] if len(relative.parts) > 1 else "all", text=text)


def tokenise(documents: Iterable[Document], tokenizer: Tokenizer, config: PretrainingConfig) -> Corpus:
    """Cut the documents into sequences; what is beyond the need of all steps, or of a domain's perplexity, is not tokenised."""
    wanted = config.steps * config.sequences_per_step * 4  # a choice of sequences, so that a step mixes domains
    training: list[int] = []
    held_out: defaultdict[str, list[int]] = defaultdict(list)
    for document in documents:
        pool, needed = (held_out[document.domain], config.held_out_sequences) if document.held_out else (training, wanted)
        if len(pool) < needed * config.sequence_tokens:
            pool += [*tokenizer.encode(document.text), tokenizer.end_token]
    sequences = _cut(training, config.sequence_tokens)
    if not sequences:
        raise BadInput(f"the corpus has {len(training)} tokens, less than one sequence of {config.sequence_tokens}: give more text")
    random.Random(config.seed).shuffle(sequences)
    kept = {domain: tuple(_cut(tokens, config.sequence_tokens)[: config.held_out_sequences]) for domain, tokens in sorted(held_out.items())}
    return Corpus(training=tuple(sequences), held_out={domain: cut for domain, cut in kept.items() if cut})


def pretrain(trainer: Trainer, corpus: Corpus, config: PretrainingConfig, *, policy: str, progress: ProgressLog) -> dict[str, Any]:
    """Train in place; returns perplexities per domain before and after, and the losses. Raises `Held` where something is not finite."""
    before = perplexities(trainer, corpus, config)
    losses: list[float] = []
    for step in range(config.steps):
        first = step * config.sequences_per_step
        chosen = [corpus.training[(first + i) % len(corpus.training)] for i in range(config.sequences_per_step)]
        losses.append(_step(trainer, chosen, config, step))
        progress.report(policy, "pretraining", step + 1, config.steps, {"loss": losses[-1]})
    after = perplexities(trainer, corpus, config)
    worse = [domain for domain in after if not math.isfinite(after[domain])]
    if worse:
        raise Held(HoldReason.NOT_FINITE, f"perplexity is not finite on {', '.join(worse)}: lower the learning rate")
    return {"perplexity_before": before, "perplexity_after": after, "losses": losses, "steps": config.steps,
            "tokens": config.steps * config.sequences_per_step * config.sequence_tokens}  # fmt: skip


def perplexities(trainer: Trainer, corpus: Corpus, config: PretrainingConfig) -> dict[str, float]:
    """exp of the mean negative log-probability per held-out token, per domain."""
    found: dict[str, float] = {}
    for domain, sequences in corpus.held_out.items():
        logprobs = [p for micro in _micro_batches(sequences, config) for row in trainer.forward(micro).logprobs for p in row]
        found[domain] = math.exp(-math.fsum(logprobs) / len(logprobs))
    return found


def learning_rate(config: PretrainingConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def _step(trainer: Trainer, sequences: Sequence[tuple[int, ...]], config: PretrainingConfig, step: int) -> float:
    normaliser = float(sum(len(sequence) - 1 for sequence in sequences))
    spec = LossSpec(name=LossName.CROSS_ENTROPY, normaliser=normaliser)
    loss = sum(trainer.forward_backward(micro, spec).loss for micro in _micro_batches(sequences, config))
    guards.check_finite("loss", loss)
    rate = learning_rate(config, step)
    outcome = trainer.optim_step(AdamParams(learning_rate=rate, weight_decay=config.weight_decay, max_grad_norm=config.max_grad_norm))
    guards.check_finite("gradient's norm", outcome.grad_norm)
    return loss


def _micro_batches(sequences: Sequence[tuple[int, ...]], config: PretrainingConfig) -> Iterator[list[Datum]]:
    per_pass = max(1, config.micro_batch_tokens // config.sequence_tokens)
    for start in range(0, len(sequences), per_pass):
        yield [Datum(tokens=sequence, first_scored=1) for sequence in sequences[start : start + per_pass]]


def _cut(tokens: Sequence[int], length: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[start : start + length]) for start in range(0, len(tokens) - length + 1, length)]
