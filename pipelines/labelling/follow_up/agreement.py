"""Does whoever reads follow-ups read them as people do? And a classifier made of a judge's readings of a deployment's own messages.

messages of the policy ──by lot──▶ a file ──people write a mood to each──▶ kappa of judge and people, of classifier and people
                       ──judge──▶ its moods ──fit, as the shipped classifier was──▶ a model file ([labelling] follow_up_model)
"""

import hashlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec

from app.domain.errors import BadConfig, BadRequest
from app.domain.learning.readings import cohens_kappa, three
from app.domain.learning.rewards import Labelled
from app.domain.telemetry.signals import ObservationName
from pipelines.labelling.config import LabellingConfig
from pipelines.labelling.follow_up.classifier import Judgement, Model, Mood, Unread
from pipelines.labelling.follow_up.features import NAMES
from pipelines.labelling.follow_up.term import Reader

FEWEST = 300
"""Messages that a classifier is made of; with fewer its threshold of punishing cannot be found (the shipped one had 1,260)."""
SAMPLED = 200
"""Messages that people read, unless they want more or fewer."""
DRAWS = 1000

Pair = tuple[str, str]
"""How people read a message, and how the reader did."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A follow-up, one JSON line of a sample; `mood` is for people to fill in."""

    id: str
    """Of the observation."""
    episode: str
    text: str
    answer: str
    """What the model had said before it."""
    mood: str = ""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How a reader compares with people, over dissatisfied, satisfied and the rest."""

    messages: int
    """That people annotated and the reader read."""
    unread: int
    kappa: float
    """Cohen 1960; 1 is always, 0 is as by chance."""
    interval: tuple[float, float]
    """95 %, by drawing the conversations again (Efron 1979): messages of one are no witnesses of each other."""
    precision_punished: float | None
    """Of what it would punish, the share that people call dissatisfied; None where it would punish nothing."""
    recall_punished: float | None
    confusion: dict[str, dict[str, int]]
    """People's reading → the reader's → messages."""


def messages_of(labelled: Iterable[Labelled]) -> list[Message]:
    """Every follow-up to a turn that is not erased, once."""
    found: dict[str, Message] = {}
    for turn, *_ in labelled:
        facts = turn.facts
        for said in turn.observations:
            if said.name == ObservationName.FOLLOW_UP and not facts.erased and said.id not in found:
                found[said.id] = Message(id=said.id, episode=facts.episode_id, text=str(said.value), answer=facts.completion)
    return list(found.values())


def draw(messages: Sequence[Message], count: int) -> list[Message]:
    """So many by lot: the same ones whoever asks; of what has come since, each may take the place of one."""
    return sorted(messages, key=lambda message: hashlib.sha256(f"agreement/{message.id}".encode()).digest())[:count]


def apart(messages: Sequence[Message], count: int, *, sampled: int) -> list[Message]:
    """So many by lot out of other conversations than the `sampled` messages that `draw` gives to people: what a classifier was made of
    cannot say how well it reads."""
    theirs = {message.episode for message in draw(messages, sampled)}
    return draw([message for message in messages if message.episode not in theirs], count)


def write_messages(messages: Iterable[Message], file: Path) -> None:
    """One JSON object per line."""
    file.write_bytes(b"".join(msgspec.json.encode(message) + b"\n" for message in messages))


def read_annotated(file: Path) -> list[Message]:
    """The lines to which people wrote a mood. Raises `BadRequest`."""
    known, found = {mood.value for mood in Mood}, list[Message]()
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):  # what else Python takes for the end of a line may stand in a text
        if not line.strip():
            continue
        try:
            message = msgspec.json.decode(line, type=Message)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadRequest(f"{file}, line {number}: {error}") from error
        if message.mood and message.mood not in known:
            raise BadRequest(f"{file}, line {number}: mood is {message.mood!r}: write one of {', '.join(sorted(known))}")
        if message.mood:
            found.append(message)
    if not found:
        raise BadRequest(f"{file}: no line has a mood: write one of {', '.join(sorted(known))} into `mood` of each")
    return found


def agreement(annotated: Sequence[Message], read: Reader, *, confident: float = 0.6) -> Agreement:
    """Have every message read and compare."""
    pairs: list[Pair] = []
    by_episode: defaultdict[str, list[Pair]] = defaultdict(list)
    punished: list[bool] = []
    unread = 0
    for message in annotated:
        try:
            found = read(message.text, message.answer)
        except Unread:
            unread += 1
            continue
        pairs.append((three(Mood(message.mood)), three(found.mood)))
        by_episode[message.episode].append(pairs[-1])
        satisfaction = found.satisfaction(confident=confident)
        punished.append(satisfaction is not None and satisfaction < 0.0)
    if not pairs:
        raise BadRequest("none of the messages could be read: is the judge there, and does it answer with JSON?")
    right = sum(is_punished and people == Mood.DISSATISFIED for (people, _), is_punished in zip(pairs, punished, strict=True))
    angry = sum(people == Mood.DISSATISFIED for people, _ in pairs)
    confusion: dict[str, Counter[str]] = {}
    for people, reader in pairs:
        confusion.setdefault(people, Counter())[reader] += 1
    return Agreement(
        messages=len(pairs), unread=unread, kappa=kappa(pairs), interval=_interval(list(by_episode.values())),
        precision_punished=right / sum(punished) if any(punished) else None, recall_punished=right / angry if angry else None,
        confusion={people: dict(counts) for people, counts in sorted(confusion.items())},
    )  # fmt: skip


def kappa(pairs: Sequence[Pair]) -> float:
    """Cohen's; 1 where both only ever say the same one thing."""
    found = cohens_kappa(Counter(pairs))
    return 1.0 if found is None else found


def distil(messages: Sequence[Message], read: Reader) -> Model:
    """The shipped kind of classifier, fitted to what the judge reads in these messages. Raises `BadConfig` where they are too few."""
    from pipelines.labelling.follow_up.examples import Example
    from pipelines.labelling.follow_up.fit import FOLDS, counted, fit

    examples: list[Example] = []
    for message in messages:
        try:
            mood = read(message.text, message.answer).mood
        except Unread:
            continue
        examples.append(Example(conversation=message.episode, text=message.text, answer=message.answer, mood=mood))
    rare = [f"{count} {mood.value}" for mood in Mood if (count := sum(one.mood is mood for one in examples)) < 2 * FOLDS]
    if len(examples) < FEWEST or rare:
        said = f", and of some kinds too few ({', '.join(rare)})" if rare else ""
        raise BadConfig(f"the judge read {len(examples)} follow-ups{said}: a classifier needs {FEWEST}, {2 * FOLDS} of each kind")
    return fit(counted(examples))


def open_model(file: Path) -> Reader:
    """A reader by a model file. Raises `BadConfig`."""
    try:
        raw = file.read_bytes()
        model = msgspec.json.decode(raw, type=Model)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadConfig(f"[labelling] follow_up_model: {error}; make one with `ratchet labels distil`, or leave it out") from error
    if model.features != NAMES:
        raise BadConfig(f"[labelling] follow_up_model: {file} was made by another version: make it again with `ratchet labels distil`")
    by = f"classifier:{hashlib.sha256(raw).hexdigest()[:12]}"

    def read(text: str, answer: str) -> Judgement:
        return Judgement(probabilities=model.probabilities(text, answer), by=by, punish_from=model.punish_from)

    return read


def open_reader(config: LabellingConfig) -> Reader | None:
    """Who reads follow-ups by the configuration: a judge, a classifier of one's own, or None for the shipped one. Raises `BadConfig`."""
    if config.judge_url is not None:
        from pipelines.labelling.follow_up.judge_model import open_judge  # openai's client takes a second to import

        return open_judge(config)
    return open_model(Path(config.follow_up_model)) if config.follow_up_model is not None else None


def _interval(episodes: Sequence[Sequence[Pair]]) -> tuple[float, float]:
    numbers = random.Random(0)
    found = sorted(kappa(list(chain.from_iterable(numbers.choices(episodes, k=len(episodes))))) for _ in range(DRAWS))
    return found[math.floor(0.025 * DRAWS)], found[math.ceil(0.975 * DRAWS) - 1]
