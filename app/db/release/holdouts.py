"""Long-term holdouts in SQL: which one is open, and what the people have had whom it follows.

Every exposure is looked at once, in order: `pieces` cuts them into bounded pieces, and `count` adds a piece's sums and moves on in one
transaction. So it costs what is new, a process may be killed at any point, and two of them count nothing twice.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from operator import itemgetter
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, Row, delete, func, insert, select, update

from app.db import locks
from app.db.access.erasures import erased_at
from app.db.chunks import one_of
from app.db.engine import add_up, reading, writing
from app.db.tables import exposures, holdout_people, holdouts, quarantine
from app.domain.release.holdouts import Counted, Holdout, PersonSums, Piece, Reading, Seen

H, P, E = holdouts.c, holdout_people.c, exposures.c
SUMMED = ("holdout", "week", "person", "metric")
"""What a person's sums are of."""


def read_open(connection: Connection, policy: str) -> Holdout | None:
    """The holdout of a policy that is open."""
    row = connection.execute(select(holdouts).where(H.policy == policy, H.ended_at.is_(None))).one_or_none()
    return None if row is None else _holdout(row)


def open_holdouts(connection: Connection) -> list[Holdout]:
    """Of all policies."""
    return [_holdout(row) for row in connection.execute(select(holdouts).where(H.ended_at.is_(None)))]


def read_holdouts(connection: Connection, policy: str, *, limit: int = 10) -> list[Holdout]:
    """The newest first, whether open or not."""
    rows = connection.execute(select(holdouts).where(H.policy == policy).order_by(H.began_at.desc()).limit(limit))
    return [_holdout(row) for row in rows]


def insert_holdout(connection: Connection, holdout: Holdout) -> None:
    """It is open from now on."""
    row = asdict(holdout) | {"readings": msgspec.to_builtins(holdout.readings), "thresholds": dict(holdout.thresholds)}
    connection.execute(insert(holdouts).values(row))


def close_holdout(connection: Connection, holdout_id: str, *, reason: str, now: datetime) -> bool:
    """False where somebody closed it before."""
    mine = (H.id == holdout_id) & H.ended_at.is_(None)
    return connection.execute(update(holdouts).where(mine).values(ended_at=now, ended_because=reason)).rowcount == 1


class SqlHoldoutBook:
    """Holdouts of one database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def open(self, policy: str) -> Holdout | None:
        """The one that is open."""
        with reading(self._engine) as connection:
            return read_open(connection, policy)

    def newest(self, policy: str, *, limit: int = 10) -> list[Holdout]:
        """The newest first, whether open or not."""
        with reading(self._engine) as connection:
            return read_holdouts(connection, policy, limit=limit)

    def is_barred(self, holdout: Holdout) -> bool:
        """Whether its version is quarantined."""
        barred = select(quarantine.c.digest).where(quarantine.c.policy == holdout.policy, quarantine.c.digest == holdout.digest)
        with reading(self._engine) as connection:
            return connection.execute(barred).first() is not None

    def piece(self, holdout: Holdout, *, until: datetime, limit: int) -> Piece | None:
        """The next `limit` exposures by `until`, and all of the last moment; None where it was counted until then."""
        if holdout.counted_until >= until:
            return None
        mine = (E.policy == holdout.policy) & (E.occurred_at > holdout.counted_until) & (E.occurred_at <= until)
        query = select(E.occurred_at, E.inference_id, E.actor, E.episode_id, E.arm).order_by(E.occurred_at)
        with reading(self._engine) as connection:
            rows = list(connection.execute(query.where(mine).limit(limit)))
            edge = until
            if len(rows) == limit:
                edge = rows[-1].occurred_at
                last = connection.execute(query.where(E.policy == holdout.policy, E.occurred_at == edge)).all()
                rows = [*(row for row in rows if row.occurred_at < edge), *last]
        seen = [Seen(inference_id=r.inference_id, person=r.actor, arm=r.arm) for r in rows if r.actor != r.episode_id]
        return Piece(edge=edge, seen=tuple(seen))

    def count(self, holdout: Holdout, piece: Piece, counted: Sequence[Counted]) -> bool:
        """Add what a piece's people have had, and go on behind it. False where another process did; nothing is changed then."""
        with writing(self._engine) as connection:
            locks.share(connection, locks.ERASURES)
            held = (H.id == holdout.id) & (H.counted_until == holdout.counted_until) & H.ended_at.is_(None)
            if connection.execute(update(holdouts).where(held).values(counted_until=piece.edge)).rowcount != 1:
                return False
            gone = erased_at(connection, {one.person for one in counted})
            rows = [{"holdout": holdout.id, **asdict(one)} for one in counted if one.person not in gone or gone[one.person] < one.since]
            for row in rows:
                row.pop("since")
            rows.sort(key=itemgetter(*SUMMED[1:]))
            add_up(connection, holdout_people, rows, key=SUMMED, add=("turns", "total"))
            return True

    def sums(self, holdout: Holdout, *, week: int | None) -> Mapping[tuple[str, bool], PersonSums]:
        """By metric and whether held: sums over people and of their squares, of one week or of all."""
        mine = P.holdout == holdout.id if week is None else (P.holdout == holdout.id) & (P.week == week)
        n, x = func.sum(P.turns).label("n"), func.sum(P.total).label("x")
        each = select(P.metric, P.held, n, x).where(mine).group_by(P.metric, P.held, P.person).subquery().c
        added = (func.sum(each.n), func.sum(each.x), func.sum(each.n * each.n), func.sum(each.x * each.x), func.sum(each.n * each.x))
        with reading(self._engine) as connection:
            rows = connection.execute(select(each.metric, each.held, func.count(), *added).group_by(each.metric, each.held)).all()
        return {
            (metric, held): PersonSums(people=people, n=float(n), x=float(x), nn=float(nn), xx=float(xx), nx=float(nx))
            for metric, held, people, n, x, nn, xx, nx in rows
        }

    def keep(self, holdout: Holdout, readings: Collection[Reading], *, until: datetime) -> Holdout:
        """Write down what was read as of `until`, unless another process has read later already."""
        values = {"readings": msgspec.to_builtins(list(readings)), "read_until": until}
        older = (H.id == holdout.id) & (H.read_until.is_(None) | (H.read_until < until))
        with writing(self._engine) as connection:
            connection.execute(update(holdouts).where(older).values(values))
        return replace(holdout, readings=tuple(readings), read_until=until)

    def forget(self, policy: str, *, limit: int) -> int:
        """Delete people's sums of holdouts that have ended, `limit` rows at most; returns how many."""
        ended = select(H.id).where(H.policy == policy, H.ended_at.is_not(None))
        with reading(self._engine) as connection:  # as a rule there is nothing: no write lock for that
            people = list(dict.fromkeys(connection.execute(select(P.person).where(P.holdout.in_(ended)).limit(limit)).scalars()))
        if not people:
            return 0
        with writing(self._engine) as connection:
            mine = P.holdout.in_(ended) & one_of(connection, P.person, people)
            return connection.execute(delete(holdout_people).where(mine)).rowcount


def _holdout(row: Row[Any]) -> Holdout:
    return Holdout(**{**row._mapping, "readings": tuple(msgspec.convert(row.readings, list[Reading]))})
