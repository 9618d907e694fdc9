"""A database that dies under the processes: none of them ends, and all go on when it is back."""

import time
from pathlib import Path

from app.db.engine import open_engine
from tests.bench.fleet.accounts import lost, unlabelled
from tests.bench.fleet.deployment import Fleet
from tests.bench.fleet.people import People
from tests.broker import free_port
from tests.killable_postgres import KillablePostgres

ROLES = ("api", "relay", "ingest", "label", "watch")
SAID = 20
SETTLE_S = 120.0


def hear(people: People, count: int) -> None:
    """Wait until so many more observations are accepted."""
    wanted, until = len(people.book.said) + count, time.monotonic() + SETTLE_S
    while len(people.book.said) < wanted:
        assert time.monotonic() < until, f"nobody takes what people say: {people.book.failed[-3:]}"
        time.sleep(0.05)


def test_no_process_ends_and_everything_said_arrives(tmp_path: Path) -> None:
    with KillablePostgres(port=free_port()) as postgres:
        fleet = Fleet(folder=tmp_path / "data", database=postgres.url, roles=ROLES, count=1)
        people = People(key=fleet.prepare(), own_answers=True, people=3, keeps_s=60.0, retries=100)
        fleet.on_join = lambda replica: people.add(replica.url) if replica.role == "api" else None
        database = open_engine(postgres.url)
        try:
            fleet.start()
            before = {name: replica.process for name, replica in fleet.replicas.items() if replica.alive}
            people.start()
            for _ in range(2):
                hear(people, SAID)
                postgres.kill()
            hear(people, SAID)
            people.stop()
            until = time.monotonic() + SETTLE_S
            while (lost(database, people.book) or unlabelled(database)) and time.monotonic() < until:
                time.sleep(0.5)
            assert {name: replica.process for name, replica in fleet.replicas.items() if replica.alive} == before
            assert lost(database, people.book) == []
            assert unlabelled(database) == 0
        finally:
            people.stop()
            fleet.stop()
            database.dispose()
