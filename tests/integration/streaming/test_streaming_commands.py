"""`ratchet dlq`, `ratchet erase` and `ratchet export` over a real data folder."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from click import Command
from click.testing import CliRunner, Result
from kafka import KafkaProducer
from pyarrow.dataset import dataset
from sqlalchemy import insert, select, update

from app import wiring
from app.db.engine import reading, writing
from app.db.tables import audit, batch_items, batches, dead_letters, exposures, labels, observations, outbox, training_runs, turns
from app.domain.errors import BadInput
from app.domain.ids import hash_actor
from app.domain.learning.batches import payload_of
from app.domain.telemetry.streams import AppliedEvent, DeadLetter, EffectBatch, JoinRules
from app.messaging.search import records_with
from app.settings import Settings, from_environment
from pipelines.commands.export import export
from pipelines.commands.maintenance.dlq import dlq
from pipelines.commands.maintenance.erase import erase
from pipelines.commands.maintenance.upkeep import upkeep
from tests.broker import running_broker
from tests.fakes.served import applied, at, event_of, exposure, observation, turn

ALICE = hash_actor("alice@example.com", salt="pepper")
GLASS = "--break-glass"
CANARY = "canary-0451-blue"


@dataclass
class Deployment:
    """A data folder and the commands over it."""

    settings: Settings
    environment: dict[str, str]

    def run(self, command: Command, *arguments: str) -> Result:
        return CliRunner().invoke(command, arguments, env=self.environment, catch_exceptions=False)

    def apply(self, *events: AppliedEvent, dead: tuple[DeadLetter, ...] = ()) -> None:
        store = wiring.effect_store(self.settings, rules=JoinRules(policies={}))
        store.apply(EffectBatch(events=events, dead=dead), now=at(10))


@contextmanager
def _deployment(folder: Path, migrated: Callable[[Settings], None]) -> Iterator[Deployment]:
    environment = {"RATCHET_DATA": str(folder), "RATCHET_ACTOR_SALT": "pepper"}
    folder.mkdir()
    settings = from_environment(environment)
    migrated(settings)
    yield Deployment(settings, environment)


@pytest.fixture
def deployment(tmp_path: Path, migrated: Callable[[Settings], None]) -> Iterator[Deployment]:
    with _deployment(tmp_path / "data", migrated) as made:
        yield made


def letter(offset: int, payload: bytes, type_: str = "ratchet.observation.v1") -> DeadLetter:
    headers = {"ce_id": f"dead-{offset}", "ce_source": "api", "ce_type": type_}
    return DeadLetter(
        topic="ratchet.events.1", partition=0, offset=offset, headers=headers, payload=payload, reason="once upon a time malformed"
    )


def test_dead_letters_are_listed_shown_and_replayed_once(deployment: Deployment) -> None:
    good = event_of(observation("o", of="t")).data
    deployment.apply(applied(turn("t")), dead=(letter(1, good), letter(2, b"\xff")))
    assert "once upon a time" in deployment.run(dlq, "list", GLASS).output
    assert json.loads(deployment.run(dlq, "show", "2", GLASS).output)["payload"] == "\\xff"
    replayed = deployment.run(dlq, "replay", GLASS)
    assert "1 replayed, 1 still make no sense" in replayed.output
    assert "1 replayed, 0 still" in deployment.run(dlq, "replay", "1", GLASS).output  # again, by id: deduplicated
    with reading(wiring.open_state(deployment.settings)) as connection:
        assert connection.execute(select(observations.c.id, observations.c.status)).all() == [("o", "joined")]
        assert connection.execute(select(dead_letters.c.attempts).order_by(dead_letters.c.id)).scalars().all() == [1, 2]
    assert deployment.run(dlq, "list", "--all", GLASS).output.count("replayed") == 1


def person(deployment: Deployment) -> None:
    """Alice said things, was trained on, and is known everywhere; Bob too, and he stays."""
    inbox = wiring.inbox_writer(deployment.settings)
    effects = [
        turn("a", actor=ALICE, completion=f"{CANARY} completion", messages=[{"role": "user", "content": f"{CANARY} prompt"}]),
        observation("o", of="a", name="comment", value=f"{CANARY} comment"),
        exposure("a", actor=ALICE),
        turn("b", actor="bob"),
        observation("p", of="b"),
    ]
    inbox.append_blocking([event_of(effect) for effect in effects])
    inbox.close()
    deployment.apply(*(applied(effect, offset=n) for n, effect in enumerate(effects)), dead=(letter(9, f"{ALICE} {CANARY}".encode()),))
    with writing(wiring.open_state(deployment.settings)) as connection:
        for id_, actor in (("a", ALICE), ("b", "bob")):
            connection.execute(insert(labels), label(id_, actor))
        moment = {"window_from": at(0), "window_to": at(1), "left_out": {}, "created_at": at(1)}
        connection.execute(
            insert(batches), moment | {"id": "B", "policy": "composer", "slot": 0, "champion": "v1", "anchor": "v1", "rule_set": "r"}
        )
        item = {"inference_id": "a", "batch_id": "B", "episode_id": "e", "reward": 1.0, "label_revision": 1, "segment": "", "actor": ALICE}
        connection.execute(insert(batch_items), item)
        run = {"id": "R", "policy": "composer", "batch_id": "B", "parent": "v1", "status": "succeeded", "candidate": "digest-of-v2"}
        connection.execute(insert(training_runs), run | {"metrics": {}, "config": {}, "started_at": at(1)})


def label(id_: str, actor: str) -> dict[str, object]:
    return {
        "inference_id": id_, "revision": 1, "current": True, "policy": "composer", "version": "v1", "reward": 0.5, "terms": [],
        "rule_set": "r", "segment": "task=edit", "actor": actor, "held_out": False, "finished_at": at(0), "labelled_at": at(60),
    }  # fmt: skip


def bytes_with(folder: Path, words: bytes) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and words in path.read_bytes()]


def test_erasing_leaves_no_byte_of_what_the_person_said_and_names_the_versions_trained_on_them(deployment: Deployment) -> None:
    person(deployment)
    assert bytes_with(deployment.settings.data, CANARY.encode())
    first = deployment.run(erase, GLASS, "--actor", "alice@example.com").output
    assert "removed 1 turns" in first
    assert "versions trained on them: digest-of-v2" in first
    assert bytes_with(deployment.settings.data, CANARY.encode()) == []
    with reading(wiring.open_state(deployment.settings)) as connection:
        assert connection.execute(select(turns.c.inference_id, turns.c.actor).order_by(turns.c.inference_id)).all() == [
            ("a", None),
            ("b", "bob"),
        ]
        assert connection.execute(select(observations.c.id)).scalars().all() == ["p"]
        assert connection.execute(select(labels.c.inference_id)).scalars().all() == ["b"]
        assert connection.execute(select(exposures.c.id)).all() == connection.execute(select(dead_letters.c.id)).all() == []
        assert {row.payload for row in connection.execute(select(outbox.c.payload).where(outbox.c.type == "ratchet.erasure.v1"))} == {b""}
        assert connection.execute(select(audit.c.action, audit.c.subject)).all() == [("break_glass", ALICE), ("erase", ALICE)]
    segments = wiring.trajectories(deployment.settings)
    assert set(segments.read([(name, id_) for name in segments.names() for id_ in ("a", "b")])) == {"b"}


def test_erasing_again_is_a_no_op_that_tells_the_same_versions(deployment: Deployment) -> None:
    person(deployment)
    deployment.run(erase, GLASS, "--actor", "alice@example.com")
    again = deployment.run(erase, GLASS, "--pseudonym", ALICE).output
    assert "erased before; removed 0 turns (empty shells stay), 0 observations, 0 labels, 0 exposures" in again
    assert "digest-of-v2" in again


def test_decisions_are_exported_as_dsjson(deployment: Deployment, tmp_path: Path) -> None:
    person(deployment)
    out = tmp_path / "decisions.json"
    assert "2 decisions" in deployment.run(export, "dsjson", "--out", str(out)).output
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["EventId"] for record in records] == ["a", "b"]
    first = records[0]
    assert (first["_label_cost"], first["_label_probability"], first["_label_Action"], first["_labelIndex"]) == (-0.5, 1.0, 1, 0)
    assert (first["a"], first["p"], first["VWState"], first["c"]["segment"]) == ([1], [1.0], {"m": "v1"}, {"task": "edit"})
    assert first["Timestamp"] == "2026-11-21T12:00:00.0000000Z"
    assert "0 decisions" in deployment.run(export, "dsjson", "--since", "2026-11-22", "--out", str(out)).output


def test_turns_are_exported_as_a_parquet_data_set(deployment: Deployment, tmp_path: Path) -> None:
    person(deployment)
    out = tmp_path / "turns"
    assert "2 turns in" in deployment.run(export, "parquet", "--out", str(out)).output
    assert [str(path.relative_to(out)) for path in out.rglob("*.parquet")] == ["policy=composer/day=2026-11-21/part-00000.parquet"]
    rows = dataset(out, format="parquet", partitioning="hive").to_table().to_pylist()
    assert [(row["inference_id"], row["policy"], row["reward"], row["completion_tokens"]) for row in rows] == [
        ("a", "composer", 0.5, [4, 5]),
        ("b", "composer", 0.5, [4, 5]),
    ]
    with pytest.raises(BadInput, match="holds something already"):
        deployment.run(export, "parquet", "--out", str(out))
    assert "0 turns" in deployment.run(export, "parquet", "--since", "2026-11-22", "--out", str(tmp_path / "none")).output


def test_the_house_is_kept_by_hand_and_shown_to_whoever_asks(deployment: Deployment) -> None:
    person(deployment)
    shown = deployment.run(upkeep, "show").output
    assert re.search(r"labels +kept +90 days +oldest +-?[\d.]+ days", shown)
    assert re.search(r"dead_letters +kept +30 days", shown)
    (deployment.settings.data / "short.toml").write_text("[retention]\nexposures_days = 0.000001\n")
    deployment.environment["RATCHET_CONFIG"] = str(deployment.settings.data / "short.toml")
    with writing(wiring.open_state(deployment.settings)) as connection:
        connection.execute(update(exposures).values(occurred_at=at(-86_400 * 3_000)))
    assert re.search(r"\d+  exposures", deployment.run(upkeep, "run").output)
    assert deployment.run(upkeep, "run").output == "nothing was old\n"


def test_what_is_left_of_a_person_is_told_place_by_place_and_after_erasing_nothing_is(deployment: Deployment) -> None:
    person(deployment)
    with running_broker(deployment.settings.data):
        before = deployment.run(erase, GLASS, "--verify", "--actor", "alice@example.com")
        assert before.exit_code == 1
        assert "traces are left" in before.output
        for place in ("table turns", "table labels", "table dead_letters, payloads", "inbox payloads"):
            assert re.search(rf"^ +[1-9]\d*  {place}", before.output, re.MULTILINE), place
        deployment.run(erase, GLASS, "--actor", "alice@example.com")
        after = deployment.run(erase, GLASS, "--verify", "--actor", "alice@example.com")
    assert "nothing is left in" in after.output
    assert after.exit_code == 0


def test_an_export_that_still_holds_a_person_is_told_until_it_is_deleted(deployment: Deployment) -> None:
    """Nobody is named in an export, and it is packed: looking for the pseudonym in its bytes found nothing, and that passed for a proof."""
    person(deployment)
    out = deployment.settings.data / "exports" / "may"
    deployment.run(export, "parquet", "--out", str(out))
    with running_broker(deployment.settings.data):
        deployment.run(erase, GLASS, "--actor", "alice@example.com")
        left = deployment.run(erase, GLASS, "--verify", "--actor", "alice@example.com")
        assert re.search(r"^ +1  exports \(a copy of theirs: delete it", left.output, re.MULTILINE)
        assert left.exit_code == 1
        shutil.rmtree(out)
        after = deployment.run(erase, GLASS, "--verify", "--actor", "alice@example.com")
    assert "nothing is left in" in after.output


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_states_in_a_folder_of_their_own_are_looked_into(deployment: Deployment, tmp_path: Path, prefix: str) -> None:
    states = tmp_path / "states"
    (states / "runs").mkdir(parents=True)
    deployment.environment["RATCHET_STATES"] = f"{prefix}{states}"
    with running_broker(deployment.settings.data):
        assert "nothing is left in" in deployment.run(erase, GLASS, "--verify", "--actor", "bob").output
        (states / "runs" / "progress.json").write_text(f'{{"actor": "{wiring.pseudonym_of(deployment.settings, actor="bob")}"}}')
        left = deployment.run(erase, GLASS, "--verify", "--actor", "bob")
    assert f"1  files in {states}" in left.output
    assert left.exit_code == 1


def test_segments_that_no_row_knows_are_told_and_swept_when_they_are_old(deployment: Deployment) -> None:
    person(deployment)
    store = wiring.trajectories(deployment.settings)
    store.write("orphan-0-1", [payload_of(turn("x", completion=CANARY))])
    store.write("young-0-1", [payload_of(turn("y"))])
    file = Path(deployment.settings.segments) / "orphan-0-1.parquet"
    an_hour_ago = file.stat().st_mtime - 3_700
    os.utime(file, (an_hour_ago, an_hour_ago))
    with running_broker(deployment.settings.data):
        assert "2  segments that no row knows" in deployment.run(erase, GLASS, "--verify", "--actor", "bob").output
    assert "removed 1 segments" in deployment.run(erase, GLASS, "--sweep").output
    assert "orphan-0-1" not in store.names()
    assert "young-0-1" in store.names()


def test_what_the_broker_still_holds_of_a_person_is_told_by_topic(tmp_path: Path) -> None:
    with running_broker(tmp_path) as broker:
        producer = KafkaProducer(bootstrap_servers=broker.cluster.servers(), enable_idempotence=False, acks="all")
        for n in range(40):
            named = ALICE if n % 4 == 0 else "somebody"
            producer.send("ratchet.events.1", key=b"e", value=f'{{"actor": "{named}", "n": {n}}}'.encode())
        producer.send("ratchet.events.1", key=ALICE.encode(), value=ALICE.encode())  # the request to forget them
        producer.send("other", value=ALICE.encode())
        producer.flush()
        producer.close()
        assert records_with(broker.cluster, ALICE.encode()) == {"ratchet.events.1": 10}
