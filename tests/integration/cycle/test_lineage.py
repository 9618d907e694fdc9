"""What a version was trained on, and which versions saw a person: in SQL on both databases, and as `ratchet lineage` says it."""

import json
import runpy
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, insert

from app import wiring
from app.db.engine import open_engine, reading, writing
from app.db.learning.lineage import chain_of, version_of_name, versions_that_saw
from app.db.tables import batch_items, batches, training_runs, versions
from app.domain.errors import BadInput, NotFound
from app.domain.ids import hash_actor
from app.domain.release.versions import VersionKind, version_name
from pipelines.commands.lineage import lineage
from tests.integration.batching.rows import NOON, add_turn

SALT = "a-salt"
ADA, BOB, EVE = (hash_actor(name, salt=SALT) for name in ("ada", "bob", "eve"))
POLICY = "composer"


@pytest.fixture
def engine(engine: Engine) -> Engine:
    _write(engine)
    return engine


def _write(engine: Engine) -> None:
    """base ─▶ pretrained on a corpus ─▶ s1 learned from Ada ─▶ s2 learned from Bob; Eve was only served."""
    rows: list[dict[str, Any]] = [
        _version("b" * 64, "smollm2-135m", "base", None, None, {}),
        _version("a" * 64, "smollm2-135m-pretrain-1121-s1", "pretrain", "b" * 64, "pretraining", {"corpus": "arena.parquet", "code": "c0"}),
        _version("1" * 64, "smollm2-135m-rl-1121-s1", "rl", "a" * 64, "run-1", {"batch": "batch-1", "code": "c1"}),
        _version("2" * 64, "smollm2-135m-rl-1121-s2", "rl", "1" * 64, "run-2", {"batch": "batch-2", "code": "c2"}),
    ]
    with writing(engine) as connection:
        connection.execute(insert(versions), rows)
        connection.execute(insert(training_runs), [_run("pretraining", "corpus-digest", "b", "a", {"steps": 50})])
        for n, parent, person in ((1, "a", ADA), (2, "1", BOB)):
            connection.execute(insert(training_runs), [_run(f"run-{n}", f"batch-{n}", parent, str(n), {"learning_rate": 1e-5})])
            connection.execute(insert(batches), [_batch(n, parent)])
            connection.execute(insert(batch_items), [_item(n, turn, person) for turn in range(3)])
    add_turn(engine, "ada-asks", version="a" * 64, actor=ADA)
    add_turn(engine, "eve-asks", version="2" * 64, actor=EVE)


def _version(digest: str, name: str, kind: str, parent: str | None, run: str | None, tags: dict[str, str]) -> dict[str, Any]:
    return {
        "digest": digest, "policy": POLICY, "name": name, "kind": kind, "parent": parent, "step": 0, "run_id": run,
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct", "licence": "Apache-2.0", "tags": tags, "created_at": NOON,
    }  # fmt: skip


def _run(name: str, batch: str, parent: str, candidate: str, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": name, "policy": POLICY, "batch_id": batch, "parent": parent * 64, "status": "succeeded", "candidate": candidate * 64,
        "metrics": {}, "config": config, "started_at": NOON,
    }  # fmt: skip


def _batch(number: int, champion: str) -> dict[str, Any]:
    row = {
        "id": f"batch-{number}", "policy": POLICY, "slot": number, "champion": champion * 64, "anchor": "b" * 64,
        "rule_set": f"rules-{number}", "window_from": NOON, "window_to": NOON, "left_out": {"no_consent": 4}, "created_at": NOON,
    }  # fmt: skip
    return {key: value for key, value in row.items() if key in batches.c}


def _item(number: int, turn: int, person: str) -> dict[str, Any]:
    row = {
        "batch_id": f"batch-{number}", "inference_id": f"t-{number}-{turn}", "policy": POLICY, "episode_id": "e", "reward": 0.5,
        "label_revision": 1, "segment": "", "actor": person,
    }  # fmt: skip
    return {key: value for key, value in row.items() if key in batch_items.c}


def test_a_chain_goes_back_to_the_base_with_licence_batches_rule_sets_corpus_code_and_config(engine: Engine) -> None:
    with reading(engine) as connection:
        chain = chain_of(connection, version_of_name(connection, "smollm2-135m-rl-1121-s2"))
    assert [link["name"] for link in chain] == [
        "smollm2-135m-rl-1121-s2", "smollm2-135m-rl-1121-s1", "smollm2-135m-pretrain-1121-s1", "smollm2-135m",
    ]  # fmt: skip
    assert {link["licence"] for link in chain} == {"Apache-2.0"}
    newest, pretrained, base = chain[0], chain[2], chain[3]
    assert (newest["batch"], newest["rule_set"], newest["turns"], newest["people"]) == ("batch-2", "rules-2", 3, 1)
    assert (newest["config"], newest["tags"]["code"], newest["left_out"]) == ({"learning_rate": 1e-5}, "c2", {"no_consent": 4})
    assert (pretrained["tags"]["corpus"], pretrained["config"], pretrained["run"]) == ("arena.parquet", {"steps": 50}, "pretraining")
    assert "batch" not in pretrained
    assert (base["base_model"], "run" in base) == ("HuggingFaceTB/SmolLM2-135M-Instruct", False)


def test_a_version_is_found_by_name_or_by_the_beginning_of_its_digest(engine: Engine) -> None:
    with reading(engine) as connection:
        assert version_of_name(connection, "2222").name == "smollm2-135m-rl-1121-s2"
        for unknown in ("smollm2-135m-rl-9999-s9", "%", "_" * 64):
            with pytest.raises(NotFound, match="give a full name"):
                version_of_name(connection, unknown)
        with pytest.raises(NotFound, match="4 versions"):
            version_of_name(connection, "")


def test_a_person_is_told_who_served_them_who_learned_from_them_and_who_descends_from_those(engine: Engine) -> None:
    with reading(engine) as connection:
        ada, bob, eve, nobody = (versions_that_saw(connection, actor) for actor in (ADA, BOB, EVE, "x"))
    first, second, pretrained = "smollm2-135m-rl-1121-s1", "smollm2-135m-rl-1121-s2", "smollm2-135m-pretrain-1121-s1"
    assert ada == {"served": [pretrained], "trained": [first], "descended": [second]}
    assert bob == {"served": [], "trained": [second], "descended": []}
    assert eve == {"served": [second], "trained": [], "descended": []}
    assert nobody == {"served": [], "trained": [], "descended": []}


def test_the_command_answers_both_questions_in_json(sqlite_url: str) -> None:
    engine = open_engine(sqlite_url)
    _write(engine)
    engine.dispose()
    runner = CliRunner(env={"RATCHET_DATABASE_URL": sqlite_url, "RATCHET_ACTOR_SALT": SALT})
    told = runner.invoke(lineage, ["smollm2-135m-rl-1121-s2"], catch_exceptions=False)
    assert [link["kind"] for link in json.loads(told.output)] == ["rl", "rl", "pretrain", "base"]
    saw = runner.invoke(lineage, ["--actor", "ada"], catch_exceptions=False)
    assert json.loads(saw.output)["trained"] == ["smollm2-135m-rl-1121-s1"]
    for wrong in ([], ["x", "--actor", "ada"]):
        assert isinstance(runner.invoke(lineage, wrong).exception, BadInput)


def test_names_are_made_of_base_kind_day_and_step() -> None:
    made = version_name(base="smollm2-135m", kind=VersionKind.RL, created_at=datetime(2026, 11, 21, tzinfo=UTC), step=7)
    assert made == "smollm2-135m-rl-1121-s7"


def test_the_code_that_ran_is_named_by_its_content() -> None:
    assert wiring.code_version() == wiring.code_version()
    assert wiring.code_version().startswith("ratchet 0.")
    assert len(wiring.code_version().rpartition(":")[2]) == 16


def test_whoever_changes_one_source_file_runs_other_code(tmp_path: Path) -> None:
    for room in ("app", "pipelines"):
        (tmp_path / room).mkdir()
    elsewhere = shutil.copy(wiring.__file__, tmp_path / "app")
    named: list[str] = []
    for content in ("STEPS = 1", "STEPS = 1", "STEPS = 2"):
        (tmp_path / "pipelines" / "cycle.py").write_text(content)
        named.append(runpy.run_path(str(elsewhere))["code_version"]())
    assert named[0] == named[1] != named[2]
