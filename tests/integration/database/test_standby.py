"""A primary is lost and its standby takes over: what was acknowledged is there where it was waited for; else what is missing is found."""

import threading
from pathlib import Path

from sqlalchemy import Engine, select

from app import wiring
from app.db.engine import open_engine, reading
from app.db.ingestion.inbox import SqlInbox
from app.db.migrate import upgrade
from app.db.operations.server import timeline
from app.db.recovery.checks import SqlRecovery, durability_of
from app.db.tables import inbox
from app.domain.errors import Unavailable
from app.settings import from_environment
from tests.fakes.served import event_of, observation
from tests.standby_postgres import ReplicatedPostgres


def either(pair: ReplicatedPostgres) -> str:
    """The URL of whichever of the two takes writes, as an operator names them."""
    hosts = "&".join(f"host=127.0.0.1:{server.port}" for server in (pair.primary, pair.standby))
    return f"postgresql+psycopg://postgres@/postgres?{hosts}"


def accept(door: SqlInbox, name: str) -> bool:
    """Whether the door said that it has the event."""
    try:
        door.append_blocking([event_of(observation(name, of=f"turn-of-{name}"))])
    except Unavailable:
        return False
    return True


def test_what_was_acknowledged_survives_the_loss_of_the_primary_where_commits_wait_for_the_standby() -> None:
    with ReplicatedPostgres() as pair:
        upgrade(pair.url)
        engine = open_engine(either(pair))
        before = timeline_of(engine)
        assert [finding.what for finding in durability_of(engine)] == ["fsync is off"]  # of this server in tests, and nothing else
        door = SqlInbox(engine, free_bytes=lambda: 1 << 40)
        acknowledged, over = set[str](), threading.Event()

        def client(number: int) -> None:
            said = 0
            while not over.is_set():
                name = f"{number}-{said}"
                said += 1
                if accept(door, name):
                    acknowledged.add(name)

        clients = [threading.Thread(target=client, args=[number]) for number in range(4)]
        for one in clients:
            one.start()
        while len(acknowledged) < 200:
            over.wait(0.01)
        pair.fail_over()
        at_the_failover = len(acknowledged)
        while len(acknowledged) < at_the_failover + 200:
            over.wait(0.01)
        over.set()
        for one in clients:
            one.join()
        door.close()
        assert SqlRecovery(engine, engine).not_known(acknowledged) == []
        assert timeline_of(engine) > before
        engine.dispose()


def test_a_standby_that_was_not_waited_for_and_lost_commits_is_found_out_by_what_was_acknowledged() -> None:
    with ReplicatedPostgres(synchronous=False) as pair:
        upgrade(pair.url)
        engine = open_engine(either(pair))
        assert "no standby is synchronous" in [finding.what for finding in durability_of(engine)]
        door = SqlInbox(engine, free_bytes=lambda: 1 << 40)
        acknowledged = {name for name in map(str, range(50)) if accept(door, name)}
        assert len(acknowledged) == 50

        def say_more() -> None:
            acknowledged.update(name for name in (f"lost-{n}" for n in range(30)) if accept(door, name))

        pair.fail_over(behind=say_more)
        missing = SqlRecovery(engine, engine).not_known(acknowledged)
        assert missing == sorted(name for name in acknowledged if name.startswith("lost-"))
        assert len(missing) == 30
        for name in missing:  # the client sends again what it holds an answer for and nobody knows
            while not accept(door, name):
                pass
        door.close()
        assert SqlRecovery(engine, engine).not_known(acknowledged) == []
        with reading(engine) as connection:
            found = connection.execute(select(inbox.c.event_id)).scalars().all()
        assert sorted(found) == sorted(acknowledged)
        engine.dispose()


def test_the_one_that_takes_writes_is_found_behind_a_standby_that_is_named_first_and_it_is_durable_enough(tmp_path: Path) -> None:
    with ReplicatedPostgres() as pair:
        upgrade(pair.url)
        hosts = "&".join(f"host=127.0.0.1:{server.port}" for server in (pair.standby, pair.primary))
        url = f"postgresql+psycopg://postgres@/postgres?{hosts}"
        engine = open_engine(url)
        door = SqlInbox(engine, free_bytes=lambda: 1 << 40)
        assert accept(door, "a")
        door.close()
        engine.dispose()
        secrets = {"RATCHET_ACTOR_SALT": "s" * 40, "RATCHET_SESSION_SECRETS": "t" * 40, "RATCHET_STANDBY": "required"}
        wiring.refuse_one_machine(from_environment({"RATCHET_DATA": str(tmp_path), "RATCHET_DATABASE_URL": url, **secrets}))


def timeline_of(engine: Engine) -> int:
    with reading(engine) as connection:
        return timeline(connection)
