"""Clocks that jump under running processes, as after a wrong NTP server or a virtual machine that was asleep: libfaketime moves them live.

One of two relays, members of ingestion and labellers has a clock that goes ten seconds and three hours forth and back. Nothing is taken
from whoever holds it, nothing is labelled early, nothing is lost or doubled; whoever starts on such a clock is refused.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, select

from app.db.engine import open_engine, reading
from app.db.tables import labels, leases, turns
from tests.bench.fleet.accounts import doubled, lost, unlabelled
from tests.bench.fleet.deployment import Fleet
from tests.bench.fleet.people import People
from tests.broker import free_port
from tests.killable_postgres import KillablePostgres
from tests.real.parts import ROOT, from_wheels, missing

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
ROLES = ("api", "relay", "ingest", "label")
JUMPS = ("+10s", "-10s", "+3h", "-3h")
EACH_S = 5.0
SETTLE_S = 90.0
LABEL_WAIT = timedelta(seconds=2.5)
"""Of the tiny profile."""


class Wrong:
    """A clock that is set while processes run."""

    def __init__(self, folder: Path) -> None:
        found = sorted(from_wheels("libfaketime", "libfaketime==3.0.1").rglob("libfaketime.so*"))
        if not found:
            missing("libfaketime", "its wheel has no library for this platform")
        self._file = folder / "clock"
        self.set("+0")
        self.variables = {
            "LD_PRELOAD": str(found[0]), "FAKETIME_TIMESTAMP_FILE": str(self._file), "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }  # fmt: skip

    def set(self, offset: str) -> None:
        """From now on it is so far off."""
        self._file.write_text(f"{offset}\n")


@pytest.fixture
def wrong(tmp_path: Path) -> Wrong:
    return Wrong(tmp_path)


@pytest.fixture
def postgres() -> Iterator[KillablePostgres]:
    with KillablePostgres(port=free_port()) as started:
        yield started


def in_office(database: Engine) -> str:
    """Who holds the relay's lease."""
    with reading(database) as connection:
        return str(connection.execute(select(leases.c.owner).where(leases.c.name == "relay")).scalar_one())


def test_clocks_that_jump_take_nothing_from_anybody(postgres: KillablePostgres, wrong: Wrong, tmp_path: Path) -> None:
    own = {f"{role}-2": wrong.variables for role in ROLES if role != "api"}
    fleet = Fleet(folder=tmp_path / "data", database=postgres.url, roles=ROLES, own=own)
    people = People(key=fleet.prepare(), own_answers=True)
    fleet.on_join = lambda replica: people.add(replica.url) if replica.role == "api" else None
    database = open_engine(postgres.url)
    try:
        fleet.start()
        people.start()
        time.sleep(2)
        owner = in_office(database)
        for jump in JUMPS:
            wrong.set(jump)
            ends = time.monotonic() + EACH_S
            while time.monotonic() < ends:
                assert in_office(database) == owner, f"the office was taken by a clock that is off by {jump}"
                time.sleep(0.2)
        wrong.set("+0")
        people.stop()
        until = time.monotonic() + SETTLE_S
        while (lost(database, people.book) or unlabelled(database)) and time.monotonic() < until:
            time.sleep(0.5)
        assert people.book.failed == []
        assert lost(database, people.book) == []
        assert unlabelled(database) == 0
        assert sum(doubled(database).values()) == 0
        assert len(people.book.answers) > 50
        assert early(database) == []
        assert {replica.name for replica in fleet.running()} == {f"{role}-{number}" for role in ROLES for number in (1, 2)}
    finally:
        people.stop()
        fleet.stop()
        database.dispose()


def early(database: Engine) -> list[str]:
    """Turns whose first label was made before their wait was over, by the database's own clock."""
    both = turns.join(labels, labels.c.inference_id == turns.c.inference_id)
    query = select(turns.c.inference_id, turns.c.finished_at, labels.c.labelled_at).select_from(both)
    with reading(database) as connection:
        return [row.inference_id for row in connection.execute(query) if row.labelled_at < row.finished_at + LABEL_WAIT]


@pytest.mark.parametrize("role", ["relay", "ingest"])
def test_who_starts_on_a_wrong_clock_is_refused_in_a_sentence(postgres: KillablePostgres, wrong: Wrong, tmp_path: Path, role: str) -> None:
    fleet = Fleet(folder=tmp_path / "data", database=postgres.url, roles=ROLES, count=1)
    fleet.prepare()
    wrong.set("+10s")
    began = time.monotonic()
    command, variables = [sys.executable, "-m", "pipelines", role], fleet.variables | wrong.variables
    told = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=60.0)
    assert told.returncode == 2
    assert "from the database's, and 2 s are borne: set both by NTP" in told.stderr
    assert time.monotonic() - began < 60.0
