"""Corrections as tokens: which turns of a batch have a teacher or a pair, how much each weighs, and what the parent says of them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from app.domain.learning.corrections import Correction, CorrectionKind
from app.domain.learning.training import Datum
from app.domain.ports import Trainer
from app.policy.chat import Chat
from pipelines.training.hindsight.config import HindsightConfig
from pipelines.training.hindsight.trust import trusted
from pipelines.training.samples import Sample

HINTS = {
    CorrectionKind.DEMONSTRATION: "After an earlier answer to this, I changed it into what follows. Answer so that I need not.",
    CorrectionKind.EDIT: "After an earlier answer to this, I rewrote a part, which now reads as follows. Answer so that I need not.",
    CorrectionKind.REGENERATE: "I refused an earlier answer to this and kept the following one. Answer so that I keep it at once.",
    CorrectionKind.FOLLOW_UP: "After an earlier answer to this, I had to write what follows. Answer so that I have no reason to.",
}
"""What the teacher reads before the person's own words, as a message of theirs."""
MOST_CHARACTERS = 8
"""Per token that a turn may have: what is longer than that need not be counted in tokens."""


@dataclass
class Lessons:
    """What an update learns from corrections, by inference id; JSON in its checkpoint, so that a resumed run learns the same."""

    weights: dict[str, float] = field(default_factory=dict[str, float])
    hinted: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """The prompt with the person's words behind it."""
    wanted: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """The answer they wanted."""
    teacher: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """[T] log π_T of the served tokens."""
    reference: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Σ log π_ref of the wanted answer, and of the served one."""


def read_lessons(
    corrections: Sequence[Correction], samples: Sequence[Sample], *, config: HindsightConfig, chat: Chat, max_tokens: int
) -> tuple[Lessons, dict[str, int]]:
    """The lessons that fit, and the count per reason of the corrections that are no lesson."""
    left_out: Counter[str] = Counter()
    by_id = {sample.item.inference_id: sample for sample in samples}
    lessons, usable = Lessons(), list[Correction]()
    for correction in corrections:
        sample = by_id.get(correction.inference_id)
        reason = "not_in_batch" if sample is None else _read(lessons, correction, sample, config, chat, max_tokens)
        if reason is None:
            usable.append(correction)
        else:
            left_out[reason] += 1
    lessons.weights = trusted(usable, max_share=config.max_person_share, newcomer=config.newcomer_weight)
    if usable and not lessons.weights:
        left_out["too_few_people"] = len(usable)
        lessons = Lessons()
    return lessons, dict(left_out)


def _read(lessons: Lessons, correction: Correction, sample: Sample, config: HindsightConfig, chat: Chat, max_tokens: int) -> str | None:
    """Write the lesson down, or say why it is none."""
    if len(correction.said) + len(correction.wanted or "") > MOST_CHARACTERS * max_tokens:
        return "too_long"
    payload = sample.payload
    if config.objective == "self_distillation":
        hinted = chat.and_then(payload.prompt_tokens, f"{HINTS[correction.kind]}\n\n{correction.said}")
        if hinted is None:
            return "template"
        if len(hinted) + len(payload.completion_tokens) > max_tokens:
            return "too_long"
        lessons.hinted[correction.inference_id] = hinted
        return None
    if correction.wanted is None:
        return "no_wanted_answer"
    wanted = chat.encode(correction.wanted)
    if chat.end_token is not None and payload.completion_tokens[-1] == chat.end_token:
        wanted.append(chat.end_token)
    if not wanted or tuple(wanted) == payload.completion_tokens:
        return "same_answer"
    if len(payload.prompt_tokens) + len(wanted) > max_tokens:
        return "too_long"
    lessons.wanted[correction.inference_id] = wanted
    return None


def score_lessons(trainer: Trainer, lessons: Lessons, samples: Sequence[Sample], *, most: int) -> None:
    """What the weights in the trainer, the parent's, say: of the served answers as teachers, or of both answers of a pair."""
    by_id = {sample.item.inference_id: sample for sample in samples}
    for some in _packs({name: hinted_datum(by_id[name], tokens) for name, tokens in lessons.hinted.items()}, most):
        for name, logprobs in zip(some, trainer.forward(list(some.values())).logprobs, strict=True):
            lessons.teacher[name] = list(logprobs)
    for some in _packs({name: wanted_datum(by_id[name], tokens) for name, tokens in lessons.wanted.items()}, most):
        for name, logprobs in zip(some, trainer.forward(list(some.values())).logprobs, strict=True):
            lessons.reference[name] = [sum(logprobs)]
    for some in _packs({name: served_datum(by_id[name]) for name in lessons.wanted}, most):
        for name, logprobs in zip(some, trainer.forward(list(some.values())).logprobs, strict=True):
            lessons.reference[name].append(sum(logprobs))


def hinted_datum(sample: Sample, hinted: Sequence[int]) -> Datum:
    """The served answer behind the hinted prompt, drawn as it was. What was kept of it was the policy's: the same is taken off both."""
    payload = sample.payload
    return Datum(
        tokens=(*hinted, *payload.completion_tokens), first_scored=len(hinted), temperature=payload.temperature,
        kept_log_mass=payload.kept_log_mass or (), shape=payload.shape,
    )  # fmt: skip


def wanted_datum(sample: Sample, wanted: Sequence[int], *, weight: float = 1.0) -> Datum:
    """The wanted answer behind the prompt, each token weighing the same."""
    prompt = sample.payload.prompt_tokens
    return Datum(
        tokens=(*prompt, *wanted), first_scored=len(prompt), temperature=sample.payload.temperature, advantages=(weight,) * len(wanted)
    )


def served_datum(sample: Sample, *, weight: float = 1.0) -> Datum:
    """The served answer, likewise."""
    return wanted_datum(sample, sample.payload.completion_tokens, weight=weight)


def _packs(data: Mapping[str, Datum], most: int) -> Iterator[dict[str, Datum]]:
    """As many at a time as have at most so many tokens together; a longer one alone."""
    some: dict[str, Datum] = {}
    tokens = 0
    for name, datum in sorted(data.items()):
        if some and tokens + len(datum.tokens) > most:
            yield some
            some, tokens = {}, 0
        some[name] = datum
        tokens += len(datum.tokens)
    if some:
        yield some
