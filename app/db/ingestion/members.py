"""Members of the consumer group share the partitions through the database.

Not through the broker's own group protocol: on the embedded broker every join costs half a session, and a group whose leader was
killed between joining and assigning is stuck for ever (measured). Two members that both believe to own a partition for a moment do
no harm, because deduplication row, effect and offset are one transaction.
"""

from collections.abc import Callable
from datetime import timedelta

from sqlalchemy import Engine, delete, or_, select

from app.db.clock import database_now
from app.db.engine import upsert, writing
from app.db.leases import expired
from app.db.tables import leases
from app.db.verdicts import judged
from app.domain.ids import uuid7
from app.domain.ports import Clock
from app.domain.telemetry.streams import PARTITIONS

TTL = timedelta(seconds=4)
"""How long the partitions of a member that was killed stay unread."""


class SqlMembership:
    """One member; ask `partitions` at least every second to stay one. Time is the database's where no clock is given."""

    def __init__(
        self, engine: Engine, *, group: str, clock: Clock | None = None, name: Callable[[], str] = uuid7, partitions: int = PARTITIONS
    ) -> None:  # fmt: skip
        self._engine = engine
        self._prefix = f"{group}/"
        self._name = f"{group}/{name()}"
        self._clock = clock
        self._partitions = partitions

    def partitions(self) -> frozenset[int]:
        """The partitions that are this member's now: every n-th, by its rank among the n members alive. Raises `Unavailable`."""
        ours = leases.c.name.startswith(self._prefix, autoescape=True)
        with judged(), writing(self._engine) as connection:
            now = database_now(connection) if self._clock is None else self._clock()
            row = {"name": self._name, "owner": self._name, "token": 0, "expires_at": now + TTL}
            connection.execute(upsert(connection, leases, key=("name",), update=("expires_at",)), row)
            alive = select(leases.c.name).where(ours, ~expired(leases.c.expires_at, ttl=TTL, now=now))
            names = sorted(connection.execute(alive).scalars())
            gone = or_(leases.c.expires_at < now - 15 * TTL, leases.c.expires_at > now + 15 * TTL)
            # Rows of members that do not hold theirs at this moment: two who tidy up at once would wait for each other in a ring.
            dead = select(leases.c.name).where(ours, gone).order_by(leases.c.name).with_for_update(skip_locked=True)
            connection.execute(delete(leases).where(leases.c.name.in_(dead)))
        rank = names.index(self._name)
        return frozenset(range(rank, self._partitions, len(names)))

    def leave(self) -> None:
        """Hand the partitions over now."""
        with writing(self._engine) as connection:
            connection.execute(delete(leases).where(leases.c.name == self._name))
