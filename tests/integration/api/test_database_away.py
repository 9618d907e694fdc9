"""A database that says neither yes nor no: people are answered over the route that is known, and what was answered waits on the disk."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Engine, select

from app.db.access.keys import SqlKeys
from app.db.engine import open_engine, reading, writing
from app.db.migrate import upgrade
from app.db.release.pointer import swap_pointer
from app.db.tables import inbox
from app.domain.access import Scope
from app.domain.release.releases import Pointer
from app.settings import from_environment
from tests.broker import free_port
from tests.fakes.gateway import CHAMPION, ScriptedEngines
from tests.fakes.served import at
from tests.fakes.service import running_service
from tests.killable_postgres import KillablePostgres

CONFIG = '[policies.composer]\nmodel = "m"\nbase_name = "tiny"\nbase_model = "tiny"\n'
SECRETS = dict.fromkeys(("ACTOR_SALT", "SESSION_SECRETS", "WEBHOOK_KEYS"), "s" * 64)
NOTICES_S = 8.0
"""The first who asks finds out about keys, episode and route, a second each, and about commits, two."""
GOES_ON_S = 1.5
"""Everybody after that, on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Away:
    """A service over a PostgreSQL that can be made silent."""

    client: httpx.Client
    postgres: KillablePostgres
    database: Engine
    key: str

    def ask(self, **more: object) -> float:
        """One answer; how long it took."""
        began = time.monotonic()
        body = {"model": "composer", "messages": [{"role": "user", "content": "Why?"}], **more}
        reply = self.client.post("/v1/chat/completions", json=body, headers={"x-api-key": self.key})
        assert reply.status_code == 200, reply.text
        return time.monotonic() - began

    def health(self) -> str:
        """What `/health` says of the control plane."""
        return str(self.client.get("/health").json()["control_plane"])

    def kept(self) -> set[str]:
        """Kinds and keys of what is in the inbox."""
        with reading(self.database) as connection:
            return {f"{row.type} {row.key}" for row in connection.execute(select(inbox.c.type, inbox.c.key))}


@pytest.fixture
def away(tmp_path: Path) -> Iterator[Away]:
    with KillablePostgres(port=free_port()) as postgres:
        upgrade(postgres.url)
        database = open_engine(postgres.url)
        with writing(database) as connection:
            pointer = Pointer(
                policy="composer", digest=CHAMPION, generation=1, previous=None, anchor=CHAMPION, holdback=0.0, release_id=None,
                changed_at=at(0),
            )  # fmt: skip
            swap_pointer(connection, pointer, expected=None, action="bootstrap", actor="test", reason=None)
        (tmp_path / "ratchet.toml").write_text(CONFIG)
        named = {"DATA": str(tmp_path), "CONFIG": str(tmp_path / "ratchet.toml"), "DATABASE_URL": postgres.url, **SECRETS}
        settings = from_environment({f"RATCHET_{name}": value for name, value in named.items()})
        _, key = SqlKeys(database).create(name="product", scopes=[Scope.INGEST])
        with (
            running_service(settings, engines=ScriptedEngines()) as url,
            httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client,
        ):
            yield Away(client=client, postgres=postgres, database=database, key=key)
            postgres.resume()
        database.dispose()


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.1)


def test_people_are_answered_while_it_is_silent_and_nothing_of_it_is_lost(away: Away) -> None:
    away.ask(user="before")
    away.postgres.pause()
    time.sleep(2.5)  # keys and route are old by now, and may be older
    assert away.ask(**{"tensorzero::episode_id": "begun elsewhere"}) < NOTICES_S
    assert away.client.get("/status").status_code == 200, "a readiness that asked the database would take every api out of service at once"
    took = [away.ask(user=f"person-{number}") for number in range(20)]
    assert sorted(took)[-2] < GOES_ON_S, took
    said = away.health()
    assert said.startswith("cut off from the database since "), said
    assert f"may be old (composer {CHAMPION})" in said
    away.postgres.resume()
    until(lambda: len(away.kept()) == 2 * 22)
    until(lambda: away.health() == "ok")
