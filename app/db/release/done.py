"""Requests that were carried out, by name: asking again does nothing twice."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, Engine, Row, delete, select

from app.db.engine import insert_or_ignore, reading, writing
from app.db.release.audit import append
from app.db.tables import audit, done_requests
from app.domain.access import Order
from app.domain.errors import DoneAlready, Refused, StaleGeneration
from app.domain.ids import utc_now
from app.domain.ports import Clock

NOTHING_MOVED = ("person.signed_in", "person.sign_in_failed")
"""What happens to people without changing what was looked at."""
MOST_MOVES = 5


def once(connection: Connection, request_id: str, *, actor: str, act: str, subject: str, now: datetime) -> None:
    """Write down that this transaction carries out the request. Raises `DoneAlready`; `Refused` where the name was another act's."""
    if _write(connection, request_id, actor=actor, act=act, subject=subject, now=now):
        return
    known = connection.execute(select(done_requests).where(done_requests.c.request_id == request_id)).one()
    _refuse(known, (actor, act, subject))


def _write(connection: Connection, request_id: str, *, actor: str, act: str, subject: str, now: datetime) -> bool:
    """Write it down; False where it is written down already."""
    row = {"request_id": request_id, "actor": actor, "act": act, "subject": subject, "done_at": now}
    fresh = insert_or_ignore(connection, done_requests).values(row).returning(done_requests.c.request_id)
    return connection.execute(fresh).one_or_none() is not None


def _refuse(known: Row[Any], wanted: tuple[str, str, str]) -> None:
    if (known.actor, known.act, known.subject) != wanted:
        raise Refused(
            f"the request id {known.request_id} was used for another act already ({known.act} of {known.subject}): use a fresh one"
        )
    raise DoneAlready(f"done already, at {known.done_at:%Y-%m-%d %H:%M:%S} UTC by {known.actor}: nothing was done twice")


def begin(connection: Connection, order: Order | None, *, now: datetime) -> None:
    """Write down that this transaction carries the order out; without one nothing is asked.

    Raises `DoneAlready`, `Refused`; `StaleGeneration` with what happened to its subject since it was looked at.
    """
    if order is None:
        return
    once(connection, order.request_id, actor=order.actor, act=order.act, subject=order.subject, now=now)
    _require_unmoved(connection, order)


def _require_unmoved(connection: Connection, order: Order) -> None:
    if order.seen is None:
        return
    a = audit.c
    query = select(a.action, a.actor, a.occurred_at).where(a.seq > order.seen, a.subject == order.subject, a.action.not_in(NOTHING_MOVED))
    query = query.where(a.action.startswith(order.moves, autoescape=True)) if order.moves else query
    rows = connection.execute(query.order_by(a.seq.desc()).limit(MOST_MOVES)).all()
    if rows:
        since = "; ".join(f"{row.action} by {row.actor} at {row.occurred_at:%Y-%m-%d %H:%M:%S} UTC" for row in reversed(rows))
        raise StaleGeneration(f"{order.subject} is not as you looked at it any more: {since}. Nothing was done: look again, then decide")


class SqlRequests:
    """Requests for acts that are no single transaction: refused where they were carried out, written down when they are.

    Most such acts do no harm when two of the same request meet (what was applied is not applied twice), and are written down once, after
    they are done. What must not be done twice is written down first (`carrying_out`).
    """

    def __init__(self, engine: Engine, *, clock: Clock = utc_now) -> None:
        self._engine = engine
        self._clock = clock

    def refuse_done(self, order: Order) -> None:
        """Raises `DoneAlready`, `Refused`, `StaleGeneration`."""
        with reading(self._engine) as connection:
            known = connection.execute(select(done_requests).where(done_requests.c.request_id == order.request_id)).one_or_none()
            if known is not None:
                _refuse(known, (order.actor, order.act, order.subject))
            _require_unmoved(connection, order)

    @contextmanager
    def carrying_out(self, order: Order) -> Iterator[None]:
        """Written down before what is done within, and taken back where that fails: two of the same at once do it once.

        Raises `DoneAlready`, `Refused`, `StaleGeneration`. A process that is killed within leaves it written down as done.
        """
        with writing(self._engine) as connection:
            begin(connection, order, now=self._clock())
        try:
            yield
        except BaseException:
            with writing(self._engine) as connection:
                connection.execute(delete(done_requests).where(done_requests.c.request_id == order.request_id))
            raise

    def done(self, order: Order, *, action: str = "", about: str = "", detail: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Write it down, and an audit entry about it where there is an action."""
        now = self._clock()
        with writing(self._engine) as connection:
            if _write(connection, order.request_id, actor=order.actor, act=order.act, subject=order.subject, now=now) and action:
                append(connection, actor=order.actor, action=action, subject=about, detail=dict(detail), now=now)
