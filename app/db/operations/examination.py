"""What `ratchet doctor` asks the database: whose right it is to act, what engines hold against what is live, how it is set up."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Engine, select, text

from app.db.clock import DatabaseClock
from app.db.engine import expected_to_answer, reading, writing
from app.db.operations.facts import BACKUP, DRILL, identity, read_fact, write_fact
from app.db.operations.server import ServerState, server_state
from app.db.release.engines import SEEN_WITHIN
from app.db.tables import deployment_pointer, engine_versions, versions
from app.domain.ports import EngineState

TIMEOUTS = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")


@dataclass(frozen=True, kw_only=True)
class Held:
    """A version that an engine holds or fails to."""

    engine: str
    policy: str
    digest: str
    state: str
    detail: str | None


class SqlDeploymentState:
    """The deployment as its database knows it."""

    def __init__(self, state: Engine) -> None:
        self._state = state
        self._clock = DatabaseClock(state)

    def close(self) -> None:
        """Let go of the database."""
        self._state.dispose()

    def server(self) -> ServerState | None:
        """The server; None on SQLite. Raises `Unavailable`."""
        with expected_to_answer(), reading(self._state) as connection:
            return server_state(connection)

    def unlimited(self) -> list[str]:
        """Timeouts that this connection lacks: a statement or a lock could hold a thread for ever."""
        with expected_to_answer(), reading(self._state) as connection:
            if connection.dialect.name == "sqlite":
                return []
            shown = {name: connection.execute(text(f"SHOW {name}")).scalar_one() for name in TIMEOUTS}
        return [name for name, value in shown.items() if value in ("0", "0ms")]

    def identity(self) -> str:
        """The deployment's id, made with the first call."""
        with expected_to_answer(), writing(self._state) as connection:
            return identity(connection, now=self._clock())

    def champions(self) -> dict[str, str]:
        """Digest that is live, by policy."""
        p = deployment_pointer.c
        with expected_to_answer(), reading(self._state) as connection:
            return {row[0]: row[1] for row in connection.execute(select(p.policy, p.digest))}

    def held(self) -> list[Held]:
        """What engines that were heard of in the last ten seconds have."""
        e = engine_versions.c
        query = select(e.engine_id, e.policy, e.digest, e.state, e.detail).where(e.seen_at >= self._clock() - SEEN_WITHIN)
        with expected_to_answer(), reading(self._state) as connection:
            rows = connection.execute(query.where(e.state != EngineState.DROPPED.value).order_by(e.engine_id)).all()
        return [Held(engine=row[0], policy=row[1], digest=row[2], state=row[3], detail=row[4]) for row in rows]

    def unknown(self, digests: set[str]) -> set[str]:
        """Those that no version of ours has: what engines hold of a history that a restored database does not know."""
        with expected_to_answer(), reading(self._state) as connection:
            known = set(connection.execute(select(versions.c.digest).where(versions.c.digest.in_(sorted(digests)))).scalars())
        return digests - known

    def ages_s(self) -> dict[str, float | None]:
        """Seconds since the newest backup and the newest drill; None before the first."""
        with expected_to_answer(), reading(self._state) as connection:
            facts = {name: read_fact(connection, name) for name in (BACKUP, DRILL)}
            now = self._clock()
        return {name: None if fact is None else (now - fact.at).total_seconds() for name, fact in facts.items()}

    def note(self, name: str, value: dict[str, object], *, at: datetime | None = None) -> None:
        """Write down that something was done."""
        with expected_to_answer(), writing(self._state) as connection:
            write_fact(connection, name, dict(value), now=at or self._clock())
