"""Blind pairs and the votes about them, in SQL."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, Row, insert, select

from app.db import locks
from app.db.access.erasures import erased_at
from app.db.engine import insert_or_ignore, reading, writing
from app.db.ingestion.observations import JOINED
from app.db.tables import blind_pairs, blind_votes, observations
from app.domain.errors import NotFound
from app.domain.release.pairs import BlindPair, BlindVote, Favoured, Preference, ScoredPair, grader_agrees, preference_of

SOURCE = "blind"
"""Of the gold observations that votes are: no client can send under it."""
NAME = "blind_preference"


class SqlPairs:
    """Keeps pairs for the offline gate."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def keep(self, pairs: Sequence[BlindPair], *, at: datetime) -> None:
        """Store pairs; those that are there stay as they are. None of people who were erased: an examination may have heard them before."""
        with writing(self._engine) as connection:
            locks.share(connection, locks.ERASURES)
            gone = erased_at(connection, {pair.cluster for pair in pairs})
            rows = [{**vars(pair), "kept_at": at} for pair in pairs if pair.cluster not in gone]
            if rows:
                connection.execute(insert_or_ignore(connection, blind_pairs), rows)

    def of(self, release_id: str) -> list[BlindPair]:
        """All of a release, by id."""
        with reading(self._engine) as connection:
            return read_pairs(connection, release_id)

    def graded(self, policy: str, suite: str, *, since: datetime) -> list[bool]:
        """Of each vote since then that counts, where person and grader both favour an answer: whether it is the same one. Oldest first."""
        pair, vote = blind_pairs.c, blind_votes.c
        votes = (
            select(vote.favoured, pair.champion_score, pair.candidate_score)
            .join(blind_pairs, pair.id == vote.pair_id)
            .where(pair.policy == policy, pair.suite == suite, vote.counted, vote.voted_at >= since)
            .order_by(vote.voted_at, vote.pair_id)
        )
        with reading(self._engine) as connection:
            said = [grader_agrees(r.champion_score, r.candidate_score, Favoured(r.favoured)) for r in connection.execute(votes)]
        return [one for one in said if one is not None]


def read_pairs(connection: Connection, release_id: str) -> list[BlindPair]:
    """All of a release, by id."""
    query = select(blind_pairs).where(blind_pairs.c.release_id == release_id).order_by(blind_pairs.c.id)
    return [BlindPair(**{k: v for k, v in row._mapping.items() if k != "kept_at"}) for row in connection.execute(query)]


def read_pair(connection: Connection, pair_id: str) -> BlindPair:
    """By id. Raises `NotFound`."""
    row = connection.execute(select(blind_pairs).where(blind_pairs.c.id == pair_id)).one_or_none()
    if row is None:
        raise NotFound("there is no such pair: open the page again")
    return BlindPair(**{k: v for k, v in row._mapping.items() if k != "kept_at"})


def read_scored(connection: Connection, release_id: str) -> list[ScoredPair]:
    """All of a release, without their words."""
    c = blind_pairs.c
    rows = connection.execute(select(c.id, c.champion_score, c.candidate_score).where(c.release_id == release_id).order_by(c.id))
    return [ScoredPair(**row._mapping) for row in rows]


def read_votes(connection: Connection, release_id: str) -> list[BlindVote]:
    """All about a release, in the order in which they came."""
    c = blind_votes.c
    rows = connection.execute(select(blind_votes).where(c.release_id == release_id).order_by(c.voted_at, c.pair_id, c.voter))
    return [_vote(row) for row in rows]


def _vote(row: Row[Any]) -> BlindVote:
    return BlindVote(
        pair_id=row.pair_id, voter=row.voter, favoured=Favoured(row.favoured), candidate_left=row.candidate_left, counted=row.counted,
        proven=row.proven, voted_at=row.voted_at,
    )  # fmt: skip


def read_preference(connection: Connection, release_id: str) -> Preference:
    """What the votes about a release come to."""
    return preference_of(read_scored(connection, release_id), read_votes(connection, release_id))


def insert_vote(connection: Connection, pair: BlindPair, vote: BlindVote) -> None:
    """The vote's row, and beside it the gold observation that it is: about no turn, so it is joined to none."""
    connection.execute(insert(blind_votes).values(**vars(vote), release_id=pair.release_id))
    said = {"favoured": vote.favoured.value, "counted": vote.counted, "suite": pair.suite, "task": pair.task, "release": pair.release_id}
    connection.execute(
        insert(observations).values(
            source=SOURCE, id=f"{pair.id}:{vote.voter}"[:200], policy=pair.policy, inference_id=pair.id, name=NAME, value=said,
            occurred_at=vote.voted_at, received_at=vote.voted_at, actor=vote.voter[:64], tags={"gold": "true"}, status=JOINED,
        )
    )  # fmt: skip
