"""`ratchet suite build`, `probe` and the sealed split, on a database with turns in segments."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, insert

from app.db.engine import open_engine, writing
from app.db.tables import batch_items, batches, observations
from app.domain.errors import Refused
from app.domain.release.gates import GateName, Verdict
from app.domain.release.terms import Terms
from app.trajectories.segments import ParquetSegments
from pipelines.commands.suite import suite
from pipelines.evaluation.suites.judge_model import open_judge
from pipelines.evaluation.suites.offline_config import OfflineConfig
from pipelines.evaluation.suites.suites import Grader, GraderKind, Task, read_tasks
from tests.fakes.releases import ADA, answer, release_room
from tests.integration.batching.rows import NOON, add_turn
from tests.ports.test_trajectory_store_port import payload
from tests.unit.pipelines.evaluation.test_offline import AnsweringEngines, gate
from tests.unit.pipelines.evaluation.test_offline import suite as suite_of
from tests.unit.pipelines.evaluation.test_suites import CODE, SOLUTION

TOML = """
[policies.composer]
model = "."
base_name = "tiny"
base_model = "tiny"

[[offline.suites]]
name = "mine"
source = "mine.jsonl"
"""


@pytest.fixture
def runner(sqlite_url: str, tmp_path: Path) -> CliRunner:
    (tmp_path / "ratchet.toml").write_text(TOML)
    environment = {"RATCHET_DATABASE_URL": sqlite_url, "RATCHET_DATA": str(tmp_path), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml")}
    return CliRunner(env=environment)


def _ended_well(engine: Engine, name: str, value: Any, *, held_out: bool = True, observation: str = "demonstration") -> None:
    add_turn(engine, name, held_out=held_out, actor=f"person-of-{name}")
    row = {
        "source": "api", "id": f"o-{name}", "policy": "composer", "inference_id": name, "episode_id": None, "name": observation,
        "value": value, "occurred_at": NOON, "received_at": NOON, "actor": None, "tags": {}, "status": "joined",
    }  # fmt: skip
    with writing(engine) as connection:
        connection.execute(insert(observations), [row])


def test_a_product_suite_is_cut_from_held_out_people_alone_and_can_be_loaded(runner: CliRunner, sqlite_url: str, tmp_path: Path) -> None:
    engine = open_engine(sqlite_url)
    _ended_well(engine, "shown", CODE)
    _ended_well(engine, "kept", {"after": "all of it kept", "start": None}, observation="edit_persistence")
    _ended_well(engine, "trained", CODE, held_out=False)
    engine.dispose()
    ParquetSegments(str(tmp_path / "segments")).write("segment-1", [payload(name) for name in ("shown", "kept", "trained")])
    out = tmp_path / "product.jsonl"
    told = runner.invoke(suite, ["build", "composer", "--out", str(out)], catch_exceptions=False)
    assert "7 tasks of 2 people" in told.output
    made = read_tasks(out)
    assert {task.cluster for task in made} == {"person-of-shown", "person-of-kept"}
    assert {task.dimension for task in made} == {"correctness", "quality", "efficiency", "interaction"}
    assert all(task.messages for task in made)


def test_without_anything_that_ended_well_nothing_is_built_and_the_cure_is_named(runner: CliRunner, tmp_path: Path) -> None:
    refused = runner.invoke(suite, ["build", "composer", "--out", str(tmp_path / "x.jsonl")])
    assert isinstance(refused.exception, Refused)
    assert "held_out_share" in str(refused.exception)


def test_the_probe_finds_a_solution_in_what_was_trained_on(runner: CliRunner, sqlite_url: str, tmp_path: Path) -> None:
    task = Task(id="leaked", messages=[{"role": "user", "content": "?"}], grader=_similar(SOLUTION))
    (tmp_path / "mine.jsonl").write_bytes(msgspec.json.encode(task))
    assert "none of 1 tasks" in runner.invoke(suite, ["probe", "composer"], catch_exceptions=False).output
    engine = open_engine(sqlite_url)
    add_turn(engine, "learned")
    with writing(engine) as connection:
        batch = {
            "id": "b", "policy": "composer", "slot": 0, "champion": "champion", "anchor": "champion", "rule_set": "r",
            "window_from": NOON, "window_to": NOON, "left_out": {}, "created_at": NOON,
        }  # fmt: skip
        connection.execute(insert(batches), [{key: value for key, value in batch.items() if key in batches.c}])
        item = {"inference_id": "learned", "batch_id": "b", "episode_id": "e", "reward": 1.0, "label_revision": 1, "segment": ""}
        connection.execute(insert(batch_items), [item])
    engine.dispose()
    ParquetSegments(str(tmp_path / "segments")).write("segment-1", [payload("learned", completion=f"I would {SOLUTION}.")])
    leaked = runner.invoke(suite, ["probe", "composer"])
    assert isinstance(leaked.exception, Refused)
    assert "leaked: … " in leaked.output


def _similar(expected: str) -> Grader:
    return Grader(kind=GraderKind.SIMILAR, expected=expected)


def test_the_anchor_waits_for_a_pass_of_the_sealed_split_where_the_terms_ask_for_it(sqlite_url: str) -> None:
    engine = open_engine(sqlite_url)
    room = release_room(engine, terms=Terms(config_hash="config", sealed=True))
    release = room.champion("v2")
    for verdict in (None, Verdict.INCONCLUSIVE, Verdict.FAIL):
        if verdict is not None:
            room.desk.record(release.id, answer(GateName.SEALED, "v2", verdict))
        with pytest.raises(Refused, match="ratchet suite sealed tab"):
            room.desk.renew_anchor("tab", actor=ADA)
    room.desk.record(release.id, answer(GateName.SEALED, "v2"))
    assert room.desk.renew_anchor("tab", actor=ADA).anchor == "v2"
    engine.dispose()


def test_a_judge_that_does_not_answer_leaves_the_gate_undecided_and_the_loop_alive() -> None:
    """An error of the endpoint is no zero and no crash of the cycle."""
    judge = open_judge(OfflineConfig(judge_url="http://127.0.0.1:9/v1", judge_model="m"))
    judged = suite_of(2)
    asked = tuple(msgspec.structs.replace(task, grader=Grader(kind=GraderKind.JUDGE, rubric="Good?")) for task in judged.tasks)
    decided = replace(gate(AnsweringEngines({"v1": set(), "v2": set()}), msgspec.structs.replace(judged, tasks=asked)), judge=judge)
    result = decided.decide(policy="p", candidate="v2", champion="v1")
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "the judge at http://127.0.0.1:9/v1 gave no answer" in result.reason
