"""Versions by digest, with their lineage."""

from sqlalchemy import Connection, Engine, Row, select

from app.db.engine import insert_or_ignore, reading, writing
from app.db.tables import versions
from app.domain.errors import NotFound, Refused
from app.domain.release.versions import Version, VersionKind


def _version(row: Row[tuple[object, ...]]) -> Version:
    return Version(**{**row._asdict(), "kind": VersionKind(row.kind)})


def add_version(connection: Connection, version: Version) -> None:
    """Record a version; the same one again changes nothing. Raises `Refused` when the digest or name means something else already."""
    values = {column: getattr(version, column) for column in versions.c.keys()}  # noqa: SIM118 (a ColumnCollection iterates over columns)
    connection.execute(insert_or_ignore(connection, versions).values(**values))
    stored = connection.execute(select(versions).where(versions.c.policy == version.policy, versions.c.digest == version.digest)).first()
    if stored is None or stored.name != version.name:
        raise Refused(
            f"version {version.name} of {version.policy} is not new: the name or the digest {version.digest[:12]} is taken; "
            "a candidate must differ from every earlier version"
        )


def find_version(connection: Connection, policy: str, digest: str) -> Version:
    """The version of that digest. Raises `NotFound`."""
    row = connection.execute(select(versions).where(versions.c.policy == policy, versions.c.digest == digest)).first()
    if row is None:
        raise NotFound(f"no version of {policy} has the digest {digest[:12]}…; `ratchet lineage` lists those there are")
    return _version(row)


def lineage(connection: Connection, policy: str, digest: str) -> list[Version]:
    """The version and its ancestors, newest first, back to the base."""
    chain: list[Version] = []
    following: str | None = digest
    while following is not None:
        version = find_version(connection, policy, following)
        chain.append(version)
        following = version.parent
    return chain


class SqlVersions:
    """The `VersionBook` port on SQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, version: Version) -> None:
        """Record a version, idempotently."""
        with writing(self._engine) as connection:
            add_version(connection, version)

    def find(self, policy: str, digest: str) -> Version:
        """The version of that digest. Raises `NotFound`."""
        with reading(self._engine) as connection:
            return find_version(connection, policy, digest)

    def of_policy(self, policy: str) -> list[Version]:
        """Every version of a policy, oldest first."""
        with reading(self._engine) as connection:
            rows = connection.execute(select(versions).where(versions.c.policy == policy).order_by(versions.c.created_at, versions.c.name))
            return [_version(row) for row in rows]
