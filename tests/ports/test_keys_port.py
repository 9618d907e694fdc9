"""One suite over the stored keys and their fake; and what only the stored ones do."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Protocol

import pytest
from sqlalchemy import text

from app.db.access.keys import SqlKeys
from app.db.engine import open_engine, reading
from app.db.release.audit import entries, verify
from app.domain.access import ApiKey, Scope, split_key
from app.domain.errors import NotFound
from tests.fakes.clock import FrozenClock
from tests.fakes.gateway import MemoryKeys


class Filled(Protocol):
    """Keys to which one can be added."""

    def all(self) -> list[ApiKey]: ...

    def ever(self) -> bool: ...

    def note_used(self, used: Mapping[str, datetime]) -> None: ...

    def add(self, *scopes: Scope, policy: str | None = None, rate_per_s: float | None = None) -> str: ...


class Stored(SqlKeys):
    """The stored keys with the fake's way of adding."""

    def add(self, *scopes: Scope, policy: str | None = None, rate_per_s: float | None = None) -> str:
        return self.create(name="test", scopes=scopes, policy=policy, rate_per_s=rate_per_s)[1]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def keys(request: pytest.FixtureRequest) -> Iterator[Filled]:
    if request.param == "memory":
        yield MemoryKeys()
        return
    engine = open_engine(request.getfixturevalue(f"{request.param}_url"))
    yield Stored(engine)
    engine.dispose()


def test_a_key_is_found_by_its_prefix_and_matches_its_secret_only(keys: Filled) -> None:
    assert not keys.ever()
    shown = keys.add(Scope.INGEST, Scope.READ, policy="composer", rate_per_s=5)
    other = keys.add(Scope.ADMIN)
    parts, others = split_key(shown), split_key(other)
    assert parts is not None
    assert others is not None
    (key,) = [key for key in keys.all() if key.prefix == parts[0]]
    assert key.matches(parts[1])
    assert not key.matches(others[1])
    assert (key.scopes, key.policy, key.rate_per_s) == (frozenset({Scope.INGEST, Scope.READ}), "composer", 5)
    assert (Scope.READ.is_within(key.scopes), Scope.RELEASE.is_within(key.scopes)) == (True, False)


def test_a_keys_last_use_moves_forward_only_and_no_more_than_once_a_minute(keys: Filled) -> None:
    """However many processes say so, in whichever order."""
    keys.add(Scope.INGEST)
    keys.add(Scope.INGEST)
    used, other = (key.id for key in keys.all())
    noon = datetime(2026, 11, 21, 12, tzinfo=UTC)

    def noted(after_s: float) -> list[float | None]:
        keys.note_used({used: noon + timedelta(seconds=after_s), "no key of ours": noon})
        of = {key.id: key.last_used_at for key in keys.all()}
        return [None if at is None else (at - noon).total_seconds() for at in (of[used], of[other])]

    assert [noted(after_s) for after_s in (0, 59.9, 60, 30, -3600)] == [[0, None], [0, None], [60, None], [60, None], [60, None]]


def test_secrets_are_not_stored_and_revoked_and_expired_keys_are_gone(database_url: str) -> None:
    engine, clock = open_engine(database_url), FrozenClock()
    keys = SqlKeys(engine, clock=clock)
    key, shown = keys.create(name="a", scopes=[Scope.INGEST])
    expiring, _ = keys.create(name="b", scopes=[Scope.INGEST], expires_at=clock() + timedelta(days=1))
    with reading(engine) as connection:
        rows = str(connection.execute(text("SELECT * FROM api_keys")).all())
    assert shown[12:] not in rows
    clock.advance(90_000)
    assert [k.prefix for k in keys.all()] == [key.prefix]
    revoked = keys.revoke(key.prefix)
    assert keys.revoke(key.prefix).revoked_at == revoked.revoked_at
    assert (keys.all(), keys.ever()) == ([], True)
    assert [k.prefix for k in keys.history()] == [key.prefix, expiring.prefix]
    with pytest.raises(NotFound, match="ratchet keys list"):
        keys.revoke("rk_00000000")
    engine.dispose()


def test_who_made_and_who_ended_a_key_is_in_the_audit_chain(database_url: str) -> None:
    engine = open_engine(database_url)
    keys = SqlKeys(engine)
    key, shown = keys.create(name="ops", scopes=[Scope.ADMIN], by="user:ada")
    keys.revoke(key.prefix, by="user:bob")
    keys.revoke(key.prefix, by="user:eve")  # it has ended already
    with reading(engine) as connection:
        found = [(entry.actor, entry.action, entry.subject) for entry in entries(connection)]
        said = str([entry.detail for entry in entries(connection)])
        assert verify(connection).problem is None
    assert found == [("user:ada", "key.created", key.prefix), ("user:bob", "key.revoked", key.prefix)]
    assert "admin" in said
    assert shown[12:] not in said
    engine.dispose()
