"""The ledger of engines: what they have to hold (from pointer and releases), and what each really holds."""

from datetime import timedelta

from sqlalchemy import Engine, delete, select

from app.db.engine import expected_to_answer, reading, upsert, writing
from app.db.release.pointer import versions_by_role, wanted_versions
from app.db.tables import engine_versions
from app.domain.ids import utc_now
from app.domain.ports import Clock, EngineState, Holder

SEEN_WITHIN = timedelta(seconds=10)
"""An engine reports every second; after ten without a word it is taken for gone."""


class SqlEngineLedger:
    """The `EngineLedger` port. `engine_id`, `address` and `region` are those of the engine that reports; a reader may leave them empty."""

    def __init__(self, database: Engine, *, engine_id: str = "", address: str = "", region: str = "", clock: Clock = utc_now) -> None:
        self._database = database
        self._engine_id = engine_id
        self._address = address
        self._region = region
        self._clock = clock

    def wanted(self) -> set[tuple[str, str]]:
        """(policy, digest) of everything to hold. Raises `Unavailable` while the database does not answer."""
        with expected_to_answer(), reading(self._database) as connection:
            return wanted_versions(connection)

    def report(self, policy: str, digest: str, state: EngineState, detail: str | None = None) -> None:
        """Upsert this engine's row; `changed_at` moves with the state only, `seen_at` always. Raises `Unavailable`."""
        now = self._clock()
        table = engine_versions
        mine = (table.c.engine_id == self._engine_id) & (table.c.policy == policy) & (table.c.digest == digest)
        with expected_to_answer(), writing(self._database) as connection:
            held = connection.execute(select(table.c.state, table.c.changed_at).where(mine)).first()
            changed_at = held.changed_at if held is not None and held.state == state.value else now
            statement = upsert(
                connection,
                table,
                key=("engine_id", "policy", "digest"),
                update=("address", "region", "state", "detail", "changed_at", "seen_at"),
            )
            where = {"engine_id": self._engine_id, "address": self._address, "region": self._region}
            what = {"policy": policy, "digest": digest, "state": state.value, "detail": detail}
            connection.execute(statement, {**where, **what, "changed_at": changed_at, "seen_at": now})

    def forget(self) -> None:
        """Remove this engine's rows: it is going away in order."""
        with writing(self._database) as connection:
            connection.execute(delete(engine_versions).where(engine_versions.c.engine_id == self._engine_id))

    def addresses(self, digest: str) -> list[str]:
        """Base URLs of engines that hold the version, the most recently heard of first. Raises `Unavailable`."""
        return list(self.holders(digest))

    def holders(self, digest: str) -> dict[str, Holder]:
        """The same, each with what is wrong with its log-probabilities, and its region. Raises `Unavailable`."""
        table = engine_versions
        query = (
            select(table.c.address, table.c.detail, table.c.region)
            .where(table.c.digest == digest, table.c.state == EngineState.READY.value, table.c.seen_at >= self._clock() - SEEN_WITHIN)
            .order_by(table.c.seen_at.desc())
        )
        with expected_to_answer(), reading(self._database) as connection:
            found: dict[str, Holder] = {}
            for address, detail, region in connection.execute(query):
                found.setdefault(address, Holder(doubt=detail, region=region))
            return found

    def everywhere(self) -> list[str]:
        """Base URLs of all engines that reported in the last seconds, whatever they hold. Raises `Unavailable`."""
        table = engine_versions
        with expected_to_answer(), reading(self._database) as connection:
            seen = select(table.c.address).where(table.c.seen_at >= self._clock() - SEEN_WITHIN).distinct().order_by(table.c.address)
            return list(connection.execute(seen).scalars())

    def roles(self, policy: str) -> dict[str, list[str]]:
        """What the versions of a policy are wanted for. Raises `Unavailable` while the database does not answer."""
        with expected_to_answer(), reading(self._database) as connection:
            return versions_by_role(connection, policy)
