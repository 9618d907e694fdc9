"""Members of the consumer group share the partitions through the database.

Not through the broker's own group protocol: on the embedded broker every join costs half a session, and a group whose leader was
killed between joining and assigning is stuck for ever (measured). Two members that both believe to own a partition for a moment do
no harm, because deduplication row, effect and offset are one transaction.
"""

from collections.abc import Callable
from datetime import timedelta

from sqlalchemy import Engine, delete, select

from app.db.engine import upsert, writing
from app.db.tables import leases
from app.domain.ids import utc_now, uuid7
from app.domain.ports import Clock
from app.domain.streams import PARTITIONS

TTL = timedelta(seconds=4)
"""How long the partitions of a member that was killed stay unread."""


class SqlMembership:
    """One member; ask `partitions` at least every second to stay one."""

    def __init__(self, engine: Engine, *, group: str, clock: Clock = utc_now, name: Callable[[], str] = uuid7) -> None:
        self._engine = engine
        self._prefix = f"{group}/"
        self._name = f"{group}/{name()}"
        self._clock = clock

    def partitions(self) -> frozenset[int]:
        """The partitions that are this member's now: every n-th, by its rank among the n members alive."""
        now = self._clock()
        row = {"name": self._name, "owner": self._name, "token": 0, "expires_at": now + TTL}
        with writing(self._engine) as connection:
            connection.execute(upsert(connection, leases, key=("name",), update=("expires_at",)), row)
            alive = select(leases.c.name).where(leases.c.name.startswith(self._prefix, autoescape=True), leases.c.expires_at > now)
            names = sorted(connection.execute(alive).scalars())
            gone = leases.c.name.startswith(self._prefix, autoescape=True) & (leases.c.expires_at < now - 15 * TTL)
            connection.execute(delete(leases).where(gone))
        rank = names.index(self._name)
        return frozenset(range(rank, PARTITIONS, len(names)))

    def leave(self) -> None:
        """Hand the partitions over now."""
        with writing(self._engine) as connection:
            connection.execute(delete(leases).where(leases.c.name == self._name))
