"""Follow-ups that people are asked to read, in SQL: put there with the label that was unsure, and taken away with it.

Besides what the labeller's reader abstained on, one follow-up in `ONE_IN` is asked about by lot, however sure the reader was: else nobody
would know how far it and people agree on what is paid.
"""

import hashlib
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, delete, func, insert, select, update

from app.db.chunks import one_of
from app.db.engine import insert_or_ignore, reading, writing
from app.db.ingestion.observations import JOINED
from app.db.ingestion.words import COMPLETION, WITH_WORDS
from app.db.release import audit
from app.db.tables import follow_up_readings, observations, turns
from app.domain.errors import DoneAlready, NotFound, Refused
from app.domain.ids import utc_now
from app.domain.learning.readings import Agreed, Asked, Mood, Reading, Said
from app.domain.learning.rewards import Label
from app.domain.ports import Clock
from app.domain.telemetry.signals import ObservationName

SOURCE, NAME = "review", "follow_up_reading"
"""Of the gold observations that readings are: no client can send under that source."""
TERM, UNSURE = "follow_up", frozenset({"uncertain", "unread"})
ONE_IN = 50
LOOKED_AT = 20
"""Of so many that wait the first is shown whose words are still there."""
BEFORE = 5
"""Turns of the conversation that are shown before the one in question."""
SHOWN = 12_000
R = follow_up_readings.c


def ask_people(connection: Connection, made: Sequence[Label]) -> None:
    """In the transaction that writes these labels: what nobody has read yet of the turns they are about is asked for as they say."""
    again = [label.inference_id for label in made if label.revision > 1]
    if again:
        connection.execute(delete(follow_up_readings).where(one_of(connection, R.inference_id, again), R.mood.is_(None)))
    rows = [row for label in made for row in _wanted(label)]
    if rows:
        connection.execute(insert_or_ignore(connection, follow_up_readings), rows)


def _wanted(label: Label) -> Iterable[dict[str, Any]]:
    term = next((term for term in label.terms if term.name == TERM and term.evidence), None)
    if term is None or label.exclusion == "erased":
        return
    unsure = term.abstained in UNSURE
    moods: list[str | None] = list(term.detail.get("moods", []))
    moods += [None] * (len(term.evidence) - len(moods))
    for observation_id, leaned_to in zip(term.evidence, moods, strict=False):
        if unsure or drawn(observation_id):
            yield {
                "inference_id": label.inference_id, "observation_id": observation_id, "policy": label.policy,
                "labelled_at": label.labelled_at, "leaned_to": leaned_to, "unsure": unsure,
            }  # fmt: skip


def drawn(observation_id: str) -> bool:
    """One in `ONE_IN`, the same ones whoever asks."""
    return int(hashlib.sha256(f"review/{observation_id}".encode()).hexdigest()[:8], 16) % ONE_IN == 0


def forget_readings(connection: Connection, ids: Sequence[str]) -> None:
    """The turns went, and with them what was asked about them."""
    connection.execute(delete(follow_up_readings).where(one_of(connection, R.inference_id, ids)))


def count_open(connection: Connection, policy: str, *, at_most: int = 1_000) -> int:
    """How many wait, counted no further than `at_most`."""
    some = select(R.inference_id).where(R.policy == policy, R.mood.is_(None)).limit(at_most).subquery()
    return connection.execute(select(func.count()).select_from(some)).scalar_one()


def next_open(connection: Connection, policy: str, *, before: datetime | None) -> Asked | None:
    """The newest that waits; with `before` the newest of those that are older."""
    query = select(R.inference_id, R.observation_id, R.labelled_at).where(R.policy == policy, R.mood.is_(None))
    query = query if before is None else query.where(R.labelled_at < before)
    some = connection.execute(query.order_by(R.labelled_at.desc(), R.inference_id, R.observation_id).limit(LOOKED_AT)).all()
    found = (asked_about(connection, policy, row.inference_id, row.observation_id) for row in some)
    return next((one for one in found if one is not None), None)


def asked_about(connection: Connection, policy: str, inference_id: str, observation_id: str) -> Asked | None:
    """One message in its conversation; None where it is not asked about, or its words went."""
    mine = (R.inference_id == inference_id, R.observation_id == observation_id, R.policy == policy)
    row = connection.execute(select(follow_up_readings).where(*mine)).one_or_none()
    turn = connection.execute(select(turns).where(turns.c.inference_id == inference_id, turns.c.erased_at.is_(None))).one_or_none()
    if row is None or turn is None:
        return None
    t = turns.c
    near = select(t.inference_id, COMPLETION, t.finished_at).select_from(WITH_WORDS)
    near = near.where(t.episode_id == turn.episode_id, t.policy == policy, t.finished_at <= turn.finished_at, t.erased_at.is_(None))
    shown = connection.execute(near.order_by(t.finished_at.desc()).limit(BEFORE + 1)).all()[::-1]
    said = _follow_ups(connection, turn.episode_id, [one.inference_id for one in shown])
    text = next((words for id_, _, words in said if id_ == observation_id), None)
    if text is None:
        return None
    conversation: list[Said] = []
    for one in shown:
        conversation.append(Said(role="assistant", text=one.completion[:SHOWN]))
        conversation += [
            Said(role="user", text=words[:SHOWN]) for id_, of, words in said if of == one.inference_id and id_ != observation_id
        ]
    return Asked(
        inference_id=inference_id, observation_id=observation_id, episode_id=turn.episode_id, labelled_at=row.labelled_at,
        message=text[:SHOWN],
        conversation=tuple(conversation), reading=_reading(row),
    )  # fmt: skip


def _follow_ups(connection: Connection, episode: str, ids: Sequence[str]) -> list[tuple[str, str, str]]:
    """(id, turn, words) of what users wrote after these turns, in order; what is said of the whole conversation comes after the last."""
    o = observations.c
    about = one_of(connection, o.inference_id, ids) | (o.episode_id == episode)
    query = select(o.id, o.inference_id, o.value).where(about, o.name == ObservationName.FOLLOW_UP, o.retracted_at.is_(None))
    rows = connection.execute(query.order_by(o.occurred_at, o.id))
    return [(row.id, row.inference_id or ids[-1], str(row.value)) for row in rows]


def _gold_id(inference_id: str, observation_id: str) -> str:
    """Together they may have more characters than an id; cut off, two of one turn whose ids begin alike would be one."""
    whole = f"{inference_id}:{observation_id}"
    return whole if len(whole) <= 200 else hashlib.sha256(whole.encode()).hexdigest()


def _reading(row: Any) -> Reading | None:  # noqa: ANN401 - a row
    if row.mood is None:
        return None
    leaned_to = None if row.leaned_to is None else Mood(row.leaned_to)
    return Reading(mood=Mood(row.mood), leaned_to=leaned_to, unsure=row.unsure, by=row.read_by, at=row.read_at)


def agreed(connection: Connection, policy: str, *, newest: int = 2_000) -> Agreed:
    """How far people and the reader agree on what people read, of those it was sure of and of those it was not."""
    query = select(R.leaned_to, R.mood, R.unsure).where(R.policy == policy, R.mood.is_not(None)).order_by(R.read_at.desc()).limit(newest)
    counted: dict[tuple[str, str, bool], int] = {}
    for row in connection.execute(query):
        key = (row.leaned_to or "unread", row.mood, row.unsure)
        counted[key] = counted.get(key, 0) + 1
    return Agreed(counted=counted)


class SqlReadings:
    """Takes what people say of follow-ups."""

    def __init__(self, engine: Engine, *, clock: Clock = utc_now) -> None:
        self._engine = engine
        self._clock = clock

    def say(self, policy: str, inference_id: str, observation_id: str, mood: Mood, *, by: str, proven: bool) -> Reading:
        """Store what somebody read, and the gold observation that it is. Raises `NotFound`, `Refused`; `DoneAlready` where they read it."""
        now, mine = self._clock(), (R.inference_id == inference_id) & (R.observation_id == observation_id) & (R.policy == policy)
        with writing(self._engine) as connection:
            before = connection.execute(select(follow_up_readings).where(mine).with_for_update()).one_or_none()
            if before is None:
                raise NotFound("nobody is asked about this message (any more): open the page again")
            if before.mood is not None:
                if before.read_by == by:
                    raise DoneAlready(f"{by} read this message before")
                raise Refused(
                    f"{before.read_by} read it as {before.mood} at {before.read_at:%Y-%m-%d %H:%M:%S} UTC: it is asked about once"
                )
            said = {"mood": mood.value, "read_by": by, "proven": proven, "read_at": now}
            connection.execute(update(follow_up_readings).where(mine).values(said))
            connection.execute(
                insert(observations).values(
                    source=SOURCE, id=_gold_id(inference_id, observation_id), policy=policy, inference_id=inference_id, name=NAME,
                    value={"mood": mood.value, "of": observation_id, "proven": proven}, occurred_at=now, received_at=now, actor=by[:64],
                    tags={"gold": "true"}, status=JOINED,
                )
            )  # fmt: skip
            detail = {"policy": policy, "observation": observation_id, "mood": mood.value}
            audit.append(connection, actor=by, action="follow_up.read", subject=inference_id, detail=detail, now=now)
            after = _reading(connection.execute(select(follow_up_readings).where(mine)).one())
            assert after is not None
            return after

    def annotated(self, policy: str) -> list[Asked]:
        """What people read, newest first, with its words where they are still there."""
        query = select(R.inference_id, R.observation_id).where(R.policy == policy, R.mood.is_not(None)).order_by(R.read_at.desc())
        with reading(self._engine) as connection:
            found = [asked_about(connection, policy, row.inference_id, row.observation_id) for row in connection.execute(query).all()]
        return [one for one in found if one is not None]
