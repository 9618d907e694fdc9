"""Continued pretraining around a trainer that does nothing: what is read, held out, trained on in which order, and measured."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from app.domain.errors import BadInput, Held
from app.domain.learning.training import AdamParams, Datum, ForwardBackward, LossName, LossSpec, StepOutcome
from app.domain.ports import Trainer
from app.domain.release.versions import HoldReason
from pipelines.training.pretraining import (
    Corpus,
    Document,
    PretrainingConfig,
    Tokenizer,
    learning_rate,
    perplexities,
    pretrain,
    read_folder,
    tokenise,
)
from tests.fakes.learning import FakeProgress

CONFIG = PretrainingConfig(
    steps=3, sequence_tokens=4, sequences_per_step=2, learning_rate=1.0, warmup_steps=2, weight_decay=0.25, max_grad_norm=0.5,
    held_out_sequences=2, micro_batch_tokens=8,
)  # fmt: skip


@dataclass
class Still:
    """Answers the same about every token, and keeps what it was asked."""

    logprob: float = -0.5
    loss: float = 3.0
    norm: float = 1.0
    forwarded: list[list[Datum]] = field(default_factory=list[list[Datum]])
    trained: list[tuple[list[Datum], LossSpec]] = field(default_factory=list[tuple[list[Datum], LossSpec]])
    steps: list[AdamParams] = field(default_factory=list[AdamParams])

    def _found(self, data: Sequence[Datum]) -> ForwardBackward:
        rows = tuple((self.logprob,) * (len(datum.tokens) - 1) for datum in data)
        return ForwardBackward(loss=self.loss, logprobs=rows, entropy=rows, tokens=sum(map(len, rows)))

    def forward(self, data: Sequence[Datum]) -> ForwardBackward:
        self.forwarded.append(list(data))
        return self._found(data)

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> ForwardBackward:
        self.trained.append((list(data), loss))
        return self._found(data)

    def optim_step(self, params: AdamParams) -> StepOutcome:
        self.steps.append(params)
        return StepOutcome(grad_norm=self.norm, applied=True)


def learned(still: Still, corpus: Corpus, config: PretrainingConfig = CONFIG) -> tuple[dict[str, Any], FakeProgress]:
    progress = FakeProgress()
    return pretrain(cast(Trainer, still), corpus, config, policy="p", progress=progress), progress


SEQUENCES = tuple((n, n, n, n) for n in range(5))


def test_a_pass_takes_the_sequences_in_turn_and_begins_again_where_they_end() -> None:
    still = Still()
    found, progress = learned(still, Corpus(training=SEQUENCES, held_out={"code": ((9, 9, 9, 9),)}))
    assert progress.reports == [("pretraining", done, 3, {"loss": 3.0}) for done in (1, 2, 3)]
    assert [[datum.tokens[0] for datum in data] for data, _ in still.trained] == [[0, 1], [2, 3], [4, 0]]
    assert all(datum.first_scored == 1 for data, _ in still.trained for datum in data)
    assert {(spec.name, spec.normaliser) for _, spec in still.trained} == {(LossName.CROSS_ENTROPY, 6.0)}, "three scored tokens of each"
    assert found["losses"] == [3.0, 3.0, 3.0]
    assert (found["steps"], found["tokens"]) == (3, 24)
    assert found["perplexity_before"] == found["perplexity_after"] == {"code": pytest.approx(math.exp(0.5))}
    assert [(p.weight_decay, p.max_grad_norm) for p in still.steps] == [(0.25, 0.5)] * 3
    assert [p.learning_rate for p in still.steps] == [learning_rate(CONFIG, step) for step in range(3)]


@pytest.mark.parametrize(("tokens", "passes"), [(8, 3), (7, 6), (1, 6), (11, 3)])
def test_as_many_sequences_go_together_as_fit_and_one_at_least(tokens: int, passes: int) -> None:
    still = Still()
    config = PretrainingConfig(steps=3, sequence_tokens=4, sequences_per_step=2, micro_batch_tokens=tokens)
    found, _ = learned(still, Corpus(training=SEQUENCES), config)
    assert len(still.trained) == passes
    assert found["losses"] == [3.0 * passes / 3] * 3


@pytest.mark.parametrize(("step", "rate"), [(0, 0.5), (1, 1.0), (2, 1.0), (4, 0.55), (6, 0.1)])
def test_the_rate_rises_in_a_line_and_falls_to_a_tenth_along_a_cosine(step: int, rate: float) -> None:
    config = PretrainingConfig(steps=6, warmup_steps=2, learning_rate=2e-5)
    assert learning_rate(config, step) == pytest.approx(rate * 2e-5)
    only = PretrainingConfig(steps=2, warmup_steps=2, learning_rate=1.0)
    assert learning_rate(only, 2) == pytest.approx(1.0)
    assert learning_rate(only, 3) == pytest.approx(0.1)


@pytest.mark.parametrize(("still", "what"), [(Still(loss=math.nan), "loss"), (Still(norm=math.inf), "gradient's norm")])
def test_what_is_no_number_is_held(still: Still, what: str) -> None:
    with pytest.raises(Held, match=f"the {what} is") as held:
        learned(still, Corpus(training=SEQUENCES))
    assert held.value.reason is HoldReason.NOT_FINITE


def test_a_perplexity_that_is_no_number_afterwards_is_held_by_its_domain() -> None:
    with pytest.raises(Held, match="not finite on code: lower") as held:
        learned(Still(logprob=math.nan), Corpus(training=SEQUENCES, held_out={"code": ((1, 2, 3, 4),)}))
    assert held.value.reason is HoldReason.NOT_FINITE


def test_a_perplexity_is_over_all_scored_tokens_of_a_domain() -> None:
    class Uneven(Still):
        def forward(self, data: Sequence[Datum]) -> ForwardBackward:
            rows = tuple((-float(datum.tokens[0]),) * 3 for datum in data)
            return ForwardBackward(loss=0.0, logprobs=rows, entropy=rows, tokens=3)

    held = {"a": ((1, 0, 0, 0), (2, 0, 0, 0), (6, 0, 0, 0)), "b": ((0, 0, 0, 0),)}
    assert perplexities(cast(Trainer, Uneven()), Corpus(training=(), held_out=held), CONFIG) == {"a": pytest.approx(math.exp(3)), "b": 1.0}


# --- corpora ------------------------------------------------------------------------------------------------------------------------


def words(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def document(name: str, text: str, domain: str = "all") -> Document:
    return Document(name=name, domain=domain, text=text)


KEPT = [name for n in range(400) if not document(name := f"d{n}", "").held_out]
HELD = [name for n in range(400) if document(name := f"d{n}", "").held_out]


def test_which_documents_are_held_out_never_changes() -> None:
    """Another rule would measure on what an earlier version was trained on."""
    expected = [f"d{n}" for n in range(400) if int(hashlib.sha256(f"d{n}".encode()).hexdigest()[:8], 16) % 20 == 0]
    assert expected == HELD
    assert 8 <= len(HELD) <= 32


def test_documents_are_cut_across_their_ends_and_what_is_left_over_goes() -> None:
    corpus = tokenise([document(KEPT[0], "1 2 3"), document(KEPT[1], "4 5 6 7 8 9")], Tokenizer(words, 0), CONFIG)
    assert sorted(corpus.training) == [(1, 2, 3, 0), (4, 5, 6, 7)]
    with pytest.raises(BadInput, match="the corpus has 3 tokens, less than one sequence of 4"):
        tokenise([document(KEPT[0], "1 2")], Tokenizer(words, 0), CONFIG)
    assert tokenise([document(KEPT[0], "1 2 3")], Tokenizer(words, 0), CONFIG).training == ((1, 2, 3, 0),)


def test_as_much_is_read_as_all_steps_need_four_times() -> None:
    # 3 steps of 2 sequences of 4 tokens, four times: 96 tokens; each document has 8 with its end
    many = [document(name, "1 2 3 4 5 6 7") for name in KEPT[:20]]
    assert len(tokenise(many, Tokenizer(words, 0), CONFIG).training) == 24
    # 95 tokens are one too few: another document is read
    odd = [document(KEPT[0], "1 2 3 4 5 6"), *(document(name, "1 2 3 4 5 6 7") for name in KEPT[1:20])]
    assert len(tokenise(odd, Tokenizer(words, 0), CONFIG).training) == 25


def test_each_domain_has_as_many_sequences_held_out_as_its_perplexity_needs_and_none_that_is_too_short() -> None:
    text = "1 2 3 4 5 6 7"
    documents = [
        document(KEPT[0], text), *(document(name, text, "b") for name in HELD[:3]), document(HELD[3], "1 2", "short"),
        document(HELD[4], "5 5 5", "a"),
    ]  # fmt: skip
    corpus = tokenise(documents, Tokenizer(words, 0), CONFIG)
    assert corpus.held_out == {"a": ((5, 5, 5, 0),), "b": ((1, 2, 3, 4), (5, 6, 7, 0))}
    assert list(corpus.held_out) == ["a", "b"]
    assert len(corpus.id) == 32
    assert corpus.id != tokenise(documents[:-1], Tokenizer(words, 0), CONFIG).id


def test_sequences_are_mixed_the_same_way_by_the_same_seed() -> None:
    documents = [document(name, f"{n} {n} {n}") for n, name in enumerate(KEPT[:20])]
    one, same = (tokenise(documents, Tokenizer(words, 0), CONFIG) for _ in range(2))
    other = tokenise(documents, Tokenizer(words, 0), PretrainingConfig(steps=3, sequence_tokens=4, sequences_per_step=2, seed=1))
    assert one.training == same.training != other.training
    assert sorted(one.training) == sorted(other.training)


def test_a_folder_is_read_in_an_order_of_its_own_and_what_is_no_text_is_passed_over(tmp_path: Path) -> None:
    for n in range(12):
        place = tmp_path / ("code" if n % 2 else "") / f"{n}.py"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(b"\xff\xfe\xff" if n == 4 else str(n).encode())
    (tmp_path / "picture.png").write_text("no")
    (tmp_path / "folder.md").mkdir()
    (tmp_path / "code" / "deep").mkdir()
    (tmp_path / "code" / "deep" / "x.md").write_text("x")
    found = list(read_folder(tmp_path))
    names = [str(Path("code") / f"{n}.py") if n % 2 else f"{n}.py" for n in range(12) if n != 4]
    expected = sorted([*names, "code/deep/x.md"], key=lambda name: hashlib.sha256(name.encode()).digest())
    assert [one.name for one in found] == expected
    assert {one.domain for one in found if "/" in one.name} == {"code"}
    assert {one.domain for one in found if "/" not in one.name} == {"all"}
    with pytest.raises(BadInput, match="holds no text"):
        list(read_folder(tmp_path / "folder.md"))
