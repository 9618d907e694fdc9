"""How databases are opened: what survives a power cut, and how long anything may take."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import InternalError, OperationalError

from app.db.engine import BUSY_TIMEOUT_MS, MIGRATING, open_engine, reading, writing
from app.db.locks import lost_race, settled
from app.db.tables import compatible_revisions, leases
from tests.fakes.served import at


@pytest.mark.parametrize(
    ("pragma", "value"),
    [
        ("journal_mode", "wal"),
        ("synchronous", 2),  # FULL: with NORMAL a power cut takes commits that were acknowledged
        ("busy_timeout", BUSY_TIMEOUT_MS),
        ("foreign_keys", 1),
        ("secure_delete", 1),
    ],
)
def test_sqlite_is_opened_so(sqlite_url: str, pragma: str, value: object) -> None:
    engine = open_engine(sqlite_url)
    with reading(engine) as connection:
        assert connection.execute(text(f"PRAGMA {pragma}")).scalar() == value
    engine.dispose()


def test_a_file_whose_engine_nobody_holds_any_more_is_closed_without_a_word(sqlite_url: str) -> None:
    """Python 3.13 warns of a connection that is left to the collector, and what is warned of fails here."""
    file = sqlite_url.removeprefix("sqlite:///")

    def held() -> int:
        return sum(os.path.realpath(f"/proc/self/fd/{number}") == file for number in os.listdir("/proc/self/fd"))

    engine = open_engine(sqlite_url)
    with reading(engine) as connection:
        connection.execute(text("SELECT 1"))
    assert held() > 0
    del engine, connection
    gc.collect()
    assert held() == 0


def test_a_file_that_cannot_be_opened_is_said_once_and_nothing_else(tmp_path: Path) -> None:
    code = f"from app.db.migrate import current_revision; current_revision('sqlite:///{tmp_path}/nowhere/x.db')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("app.domain.errors.BadConfig: the database cannot be opened")
    assert "ignored" not in done.stderr


def test_what_is_deleted_is_overwritten_in_the_file(sqlite_url: str) -> None:
    engine = open_engine(sqlite_url)
    words = "words-that-somebody-said"
    row = {"name": words * 8, "owner": "o", "token": 1, "expires_at": at(0)}
    with writing(engine) as connection:
        connection.execute(leases.insert(), row)
    with writing(engine) as connection:
        connection.execute(leases.delete())
    raw = engine.raw_connection()
    raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
    raw.close()
    engine.dispose()
    with open(sqlite_url.removeprefix("sqlite:///"), "rb") as file:
        assert words.encode() not in file.read()


def test_what_is_written_while_something_is_read_is_seen_by_the_next_read(engine: Engine) -> None:
    def known() -> set[str]:
        return set(connection.execute(select(compatible_revisions.c.revision)).scalars())

    with reading(engine) as connection:
        before = known()
        with writing(engine) as other:
            other.execute(compatible_revisions.insert(), {"revision": "written-meanwhile"})
        assert known() == before
    with reading(engine) as connection:
        assert known() == before | {"written-meanwhile"}


@pytest.mark.parametrize("locking", [False, True])
def test_on_postgresql_a_read_that_would_write_or_lock_is_refused_and_a_write_is_not(postgres_engine: Engine, locking: bool) -> None:
    would = select(leases).with_for_update() if locking else leases.delete()
    with pytest.raises(InternalError, match="read-only transaction"), reading(postgres_engine) as connection:
        connection.execute(would)
    with writing(postgres_engine) as connection:
        connection.execute(would)
        assert connection.execute(text("SHOW transaction_isolation")).scalar() == "read committed"


@pytest.mark.parametrize(
    ("setting", "value"), [("statement_timeout", "1min"), ("lock_timeout", "10s"), ("idle_in_transaction_session_timeout", "1min")]
)
def test_nothing_on_postgresql_lasts_for_ever(postgres_engine: Engine, setting: str, value: str) -> None:
    with reading(postgres_engine) as connection:
        assert connection.execute(text(f"SHOW {setting}")).scalar() == value


def test_a_connection_whose_server_is_gone_without_a_word_is_noticed(postgres_engine: Engine) -> None:
    raw = postgres_engine.raw_connection()
    told = raw.driver_connection.info.get_parameters()  # type: ignore[union-attr]
    raw.close()
    assert (told["connect_timeout"], told["tcp_user_timeout"]) == ("3", "5000")


def test_a_migration_may_take_hours_but_nobody_waits_long_behind_it_for_a_lock(postgres_url: str) -> None:
    engine = open_engine(postgres_url, session=MIGRATING)
    with reading(engine) as connection:
        assert [connection.execute(text(f"SHOW {name}")).scalar() for name in ("statement_timeout", "lock_timeout")] == ["0", "10s"]
    engine.dispose()


def test_what_the_url_says_goes_before(postgres_url: str) -> None:
    engine = open_engine(postgres_url + "&options=-c%20lock_timeout%3D77s&connect_timeout=9")
    with reading(engine) as connection:
        assert connection.execute(text("SHOW lock_timeout")).scalar() == "77s"
        assert connection.execute(text("SHOW statement_timeout")).scalar() == "1min"
    engine.dispose()


def test_a_transaction_that_lost_a_race_is_begun_again_and_one_that_is_wrong_is_not(postgres_engine: Engine) -> None:
    tries: list[int] = []

    def work(connection: object) -> int:
        tries.append(1)
        if len(tries) < 3:
            connection.execute(text("DO $$ BEGIN RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'; END $$"))  # type: ignore[attr-defined]
        return len(tries)

    waits: list[float] = []
    assert settled(postgres_engine, work, pause=waits.append) == 3
    assert len(waits) == 2
    with pytest.raises(Exception, match="nowhere") as refused:
        settled(postgres_engine, lambda connection: connection.execute(text("SELECT 1 FROM nowhere")), pause=waits.append)
    assert not lost_race(refused.value)
    assert len(waits) == 2


def test_a_wait_for_a_lock_ends(postgres_url: str) -> None:
    engine = open_engine(postgres_url, session={"lock_timeout": "50ms"})
    with writing(engine) as one, pytest.raises(OperationalError) as given_up:
        one.execute(text("LOCK TABLE leases IN ACCESS EXCLUSIVE MODE"))
        with writing(engine) as other:
            other.execute(text("SELECT * FROM leases"))
    assert lost_race(given_up.value)
    engine.dispose()
