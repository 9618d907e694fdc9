"""A PostgreSQL database restored to a moment, beside files that did not go back with it: what it forgot is found and mended."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from click import Command
from click.testing import CliRunner, Result
from sqlalchemy import insert, make_url, select, update

from app import wiring
from app.db.engine import open_engine, reading, writing
from app.db.recovery.checks import SqlRecovery, durability
from app.db.tables import batch_items, deployment_history, returned_items, segments, stream_offsets, training_runs, turns
from app.domain.ids import hash_actor
from app.domain.telemetry.events import Erasure
from app.domain.telemetry.streams import EffectBatch, JoinRules
from app.settings import Settings, from_environment
from pipelines.commands.maintenance.recover import recover
from tests.conftest import NewDatabase
from tests.fakes.served import applied, at, event_of, observation, turn

ALICE = hash_actor("alice@example.com", salt="a pepper of some length")


pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # a command's process would end here, and its connections with it


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()


@dataclass
class Deployment:
    """A data folder over a database, with the commands."""

    environment: dict[str, str]

    @property
    def settings(self) -> Settings:
        return from_environment(self.environment)

    def run(self, command: Command, *arguments: str, said: str | None = None) -> Result:
        return CliRunner().invoke(command, arguments, input=said, env=self.environment, catch_exceptions=False)

    def over(self, url: str) -> "Deployment":
        """The same folder over another database."""
        return Deployment(self.environment | {"RATCHET_DATABASE_URL": url})


@pytest.fixture
def deployment(postgres_url: str, tmp_path: Path) -> Deployment:
    environment = {"RATCHET_DATA": str(tmp_path), "RATCHET_DATABASE_URL": postgres_url, "RATCHET_ACTOR_SALT": "a pepper of some length"}
    return Deployment(environment)


@pytest.fixture
def restored(deployment: Deployment, new_postgres_database: NewDatabase, postgres_server: str) -> Iterator[Deployment]:
    """The database as it was before Alice asked to be forgotten, before the last event was accepted, and before a file was lost."""
    settings, url = deployment.settings, deployment.settings.database_url
    store = wiring.effect_store(settings, rules=JoinRules(policies={}))
    served = [turn("a", actor=ALICE), turn("b", actor="bob"), observation("o", of="a")]
    store.apply(EffectBatch(events=tuple(applied(effect, offset=n) for n, effect in enumerate(served[:2]))), now=at(10))
    store.apply(EffectBatch(events=(applied(turn("c"), offset=7),)), now=at(10))
    name = make_url(url).database
    with psycopg.connect(postgres_server.format("postgres").replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        connection.execute(f"CREATE DATABASE {name}_restored TEMPLATE {name}")  # type: ignore[arg-type] - our own name
        wiring.eraser(settings).erase(Erasure(id="e", actor=ALICE, requested_by="user:x", occurred_at=at(100)), now=at(100))
        inbox = wiring.inbox_writer(settings)
        inbox.append_blocking([event_of(turn("late"))])
        inbox.close()
        yield deployment.over(postgres_server.format(f"{name}_restored"))
        connection.execute(f"DROP DATABASE {name}_restored WITH (FORCE)")  # type: ignore[arg-type] - our own name


def test_what_a_restored_database_forgot_is_found_and_mended(deployment: Deployment, restored: Deployment) -> None:
    assert "no standby is synchronous" in deployment.run(recover, "check", "--no-kafka").output
    before = restored.run(recover, "check", "--no-kafka")
    assert before.exit_code == 1
    assert f"1  erasures that are not known here ({ALICE}): run `ratchet recover erasures`" in before.output
    assert "1  segments whose file is missing" in before.output, "the one that Alice shared was copied without her since"
    assert "found the words of 1 turns in newer files, erased 1 people again" in restored.run(recover, "erasures").output
    after = restored.run(recover, "check", "--no-kafka").output
    assert "erasures that are not known" not in after
    assert "segments whose file" not in after
    store = wiring.trajectories(restored.settings)
    assert sorted(id_ for name in store.names() for id_ in store.turns(name)) == ["b", "c"]
    with reading(wiring.open_state(restored.settings)) as connection:
        assert set(connection.execute(select(turns.c.actor)).scalars()) == {None, "bob", "alice"}
    asked = restored.run(recover, "acknowledged", "-", said="turn-late\n2026-11-22 turn_served inference_id=b episode_id=e\n\n")
    assert asked.exit_code == 1
    assert asked.output.splitlines()[0] == "turn-late"
    assert "1 of 2 acknowledged ids are not known here" in asked.output
    assert deployment.run(recover, "acknowledged", "-", said="turn-late\n").exit_code == 0


def test_words_that_came_back_with_an_older_file_are_taken_out_again(deployment: Deployment) -> None:
    settings = deployment.settings
    store = wiring.trajectories(settings)
    wiring.effect_store(settings, rules=JoinRules(policies={})).apply(
        EffectBatch(events=(applied(turn("a", actor=ALICE)), applied(turn("b", actor="bob"), offset=1))), now=at(10)
    )
    (file,) = Path(settings.segments).glob("*.parquet")
    older = file.read_bytes()
    wiring.eraser(settings).erase(Erasure(id="e", actor=ALICE, requested_by="user:x", occurred_at=at(100)), now=at(100))
    file.write_bytes(older)
    assert store.turns(file.stem) == ["a", "b"]
    assert "the words of erased ones out of 1 segments" in deployment.run(recover, "erasures").output
    assert [id_ for name in store.names() for id_ in store.turns(name)] == ["b"]


def test_each_difference_is_told_by_what_did_not_go_back(postgres_url: str) -> None:
    engine = open_engine(postgres_url)
    found = SqlRecovery(engine, engine)
    topic = "ratchet.events"
    offset = {"consumer_group": "g", "topic": topic, "partition": 0, "next_offset": 40, "high_water": 40, "updated_at": at(0)}
    champion = {"policy": "composer", "generation": 2, "digest": "v2", "anchor": "v1", "action": "promote", "good": True, "actor": "a"}
    run = {"id": "r", "policy": "composer", "batch_id": "b", "parent": "v1", "status": "succeeded", "candidate": "v2", "metrics": {}}
    item = {"inference_id": "t", "episode_id": "e", "reward": 1.0, "label_revision": 1, "segment": ""}
    with writing(engine) as connection:
        connection.execute(insert(stream_offsets), offset)
        connection.execute(insert(deployment_history), champion | {"occurred_at": at(0)})
        connection.execute(insert(training_runs), run | {"config": {}, "started_at": at(0)})
        connection.execute(insert(returned_items), item | {"batch_id": "b"})
        connection.execute(insert(segments), {"name": "s", "rows": 3, "bytes": 1, "created_at": at(0)})
    assert found.behind("g", {(topic, 0): 65, (topic, 1): 0}) == {(topic, 0): 25}
    assert found.unknown_versions(["v9"]) == ["v9"]
    assert found.missing_weights(["v1"]) == ["v2"]
    assert found.missing_segments({"s": 0}.__getitem__) == ["s"]
    assert found.trained_twice() == []  # given back, and in no batch since
    with writing(engine) as connection:
        connection.execute(insert(batch_items), item | {"batch_id": "c"})
    assert found.trained_twice() == ["t"]
    with writing(engine) as connection:
        connection.execute(update(training_runs).values(candidate="never-promoted"))
    assert found.trained_twice() == []
    engine.dispose()


def test_an_acknowledgement_is_on_disk_whatever_the_server_s_default_is(postgres_url: str) -> None:
    engine = open_engine(postgres_url)
    with reading(engine) as connection:
        told = {finding.what for finding in durability(connection)}
    # The tests' server keeps nothing through a crash, and its default is synchronous_commit=off, which a connection of ours overrides.
    assert told == {"fsync is off", "full_page_writes is off", "no standby is synchronous"}
    engine.dispose()
    careless = open_engine(f"{postgres_url}{'&' if '?' in postgres_url else '?'}options=-c%20synchronous_commit%3Doff")
    with reading(careless) as connection:
        assert "synchronous_commit is off" in {finding.what for finding in durability(connection)}
    careless.dispose()
