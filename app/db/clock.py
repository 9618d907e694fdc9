"""The clock that all processes share: the database's.

Leases, slots and due times that each process judged by its own clock would be taken from a live owner by whoever is a few seconds
ahead, and blocked for an hour by whoever was an hour ahead and died. On SQLite all processes share one machine, hence one clock.
"""

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import BigInteger, Connection, Engine, cast, func, select
from sqlalchemy.exc import SQLAlchemyError

from app.db.engine import expected_to_answer, reading
from app.db.tables import EPOCH
from app.domain.errors import BadConfig
from app.domain.ids import utc_now
from app.domain.ports import Clock

log = logging.getLogger(__name__)

ConnectionClock = Callable[[Connection], datetime]
"""The time as the database at the other end of a connection has it."""

ASK_EVERY_S = 1.0
MAX_SKEW = timedelta(seconds=2)
"""A process further away from the database than this says so: its logs and the times that it gives to events mislead."""
SAY_EVERY_S = 60.0


def database_now(connection: Connection) -> datetime:
    """The time now, not that of the transaction's beginning: a transaction that waited for a lock must not see an old one."""
    if connection.dialect.name == "sqlite":
        return utc_now()
    micros = cast(func.extract("epoch", func.clock_timestamp()) * 1_000_000, BigInteger)
    return EPOCH + timedelta(microseconds=connection.execute(select(micros)).scalar_one())


class DatabaseClock:
    """`Clock` by the database's time: asked once a second, and in between carried on by a counter that no clock change moves.

    Where the database does not answer, time goes on by the counter: who needs the database notices by themselves.
    """

    def __init__(
        self, engine: Engine, *, asked: ConnectionClock = database_now, counter: Callable[[], float] = time.monotonic, own: Clock = utc_now
    ) -> None:
        self._engine = engine
        self._asked = asked
        self._counter = counter
        self._own = own
        self._lock = threading.Lock()
        self._at: tuple[float, datetime] | None = None
        """What the counter said when the database said what time it was."""
        self._said_at = float("-inf")
        self._skew = timedelta()
        self._doubt = timedelta()
        """How far the skew may be off: half of what the answer took, which is seconds where the connection had to be opened."""

    def skew_s(self) -> float:
        """How far this machine's clock is ahead, a second old at most while the database answers."""
        self()
        return self._skew.total_seconds()

    def refuse_skew(self) -> None:
        """Raises `BadConfig` where this machine's clock is further away than `MAX_SKEW`: what it says of events' times would mislead."""
        with expected_to_answer():
            self()
        if abs(self._skew) - self._doubt > MAX_SKEW:
            raise BadConfig(
                f"this machine's clock is {self._skew.total_seconds():+.1f} s from the database's, and {MAX_SKEW.total_seconds():g} s are "
                "borne: set both by NTP (chronyc makestep), then start again"
            )

    def __call__(self) -> datetime:
        """The time now. Raises what the database raises while it never answered yet."""
        with self._lock:
            if self._at is None or self._counter() - self._at[0] >= ASK_EVERY_S:
                self._at = self._ask(self._at)
            return self._since(self._at)

    def _ask(self, last: tuple[float, datetime] | None) -> tuple[float, datetime]:
        before = self._counter()
        try:
            with reading(self._engine) as connection:
                told = self._asked(connection)
        except SQLAlchemyError:
            if last is None:
                raise
            return self._counter(), self._since(last)
        after = self._counter()
        self._doubt = timedelta(seconds=(after - before) / 2)
        self._say_skew(told + self._doubt, after)
        return (before + after) / 2, told

    def _since(self, at: tuple[float, datetime]) -> datetime:
        return at[1] + timedelta(seconds=self._counter() - at[0])

    def _say_skew(self, told: datetime, counted: float) -> None:
        skew = self._skew = self._own() - told
        if abs(skew) - self._doubt > MAX_SKEW and counted - self._said_at >= SAY_EVERY_S:
            self._said_at = counted
            log.warning("event=clock_skewed ahead_s=%.1f cure=set this machine's clock by NTP, as the database's", skew.total_seconds())
