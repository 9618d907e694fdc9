"""The MLflow projection over a real MLflow on SQLite."""

import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.domain.errors import Unavailable
from app.domain.learning.rewards import segment_key
from app.domain.release.versions import RunStatus, TrainingRun, Version, VersionKind
from app.registry.mlflow_registry import MlflowRegistry, _metrics, _millis, _params
from pipelines.projection import Projection, project_once

ROOT = Path(__file__).resolve().parents[3]
TABLES = 200_000
"""Bytes of a file in which some of MLflow's tables are, and not all of them."""
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> MlflowRegistry:
    return MlflowRegistry(f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db")


def version(number: int, policy: str) -> Version:
    return Version(
        digest=f"{policy}-{number}".ljust(64, "0"), policy=policy, name=f"base-rl-1121-s{number}", kind=VersionKind.RL, parent=None,
        step=number, run_id=None, created_at=NOW, base_model="base", licence="Apache-2.0",
    )  # fmt: skip


def run(number: int, policy: str) -> TrainingRun:
    return TrainingRun(
        id=f"run-{number}", policy=policy, batch_id="b", parent="p", status=RunStatus.SUCCEEDED, started_at=NOW, finished_at=NOW,
        metrics={
            "loss": [0.5, 0.25], "steps": [{"entropy": 2.0, "tokens": 7}, {"entropy": 1.5, "tokens": 9}], "many": [1.0] * 1500,
            "kl": {"anchor": 0.1}, "segments": {"task=a,tier=b": 2}, "broken": float("nan"), "word": "x",
        }, config={"lr": 1e-5, "adam": {"beta": 0.9}},
    )  # fmt: skip


def test_a_version_is_registered_once_with_its_run_metrics_and_card(registry: MlflowRegistry, tmp_path: Path) -> None:
    for _ in range(2):
        registry.register(version(1, "once"), folder=tmp_path, run=run(1, "once"), card="# card")
    client = registry.client
    found = client.search_model_versions("name = 'once'")
    assert len(found) == 1
    assert found[0].description == "# card"
    stored = client.get_run(str(found[0].run_id))
    assert stored.data.metrics == {  # the last of each series, and no NaN
        "loss": 0.25, "steps.entropy": 1.5, "steps.tokens": 9.0, "many": 1.0, "kl.anchor": 0.1, "segments.task_a_tier_b": 2.0,
    }  # fmt: skip
    assert [m.value for m in client.get_metric_history(str(found[0].run_id), "steps.entropy")] == [2.0, 1.5]
    assert [m.value for m in client.get_metric_history(str(found[0].run_id), "loss")] == [0.5, 0.25]
    assert stored.data.params["adam.beta"] == "0.9"


def test_aliases_follow_sql_and_drift_is_repaired_and_told(registry: MlflowRegistry, tmp_path: Path) -> None:
    versions = [version(n, "drift") for n in (1, 2)]
    for v in versions:
        registry.register(v, folder=tmp_path, run=None, card="")
    wanted = {"champion": versions[1].digest, "previous": versions[0].digest, "anchor": versions[0].digest}
    registry.reconcile("drift", wanted)
    assert registry.reconcile("drift", wanted) == []
    registry.client.set_registered_model_alias("drift", "champion", "1")  # somebody moves it by hand
    assert registry.reconcile("drift", wanted) == ["alias champion → version 2"]
    assert registry.reconcile("drift", {"champion": versions[1].digest}) == ["alias previous removed", "alias anchor removed"]


def test_a_version_deleted_in_mlflow_is_reported_and_comes_back_with_the_next_registration(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    """MLflow deletes every alias with the version it points at, without a word (facts/gates.md, section 8)."""
    only = version(1, "deleted")
    registry.register(only, folder=tmp_path, run=None, card="")
    registry.reconcile("deleted", {"champion": only.digest})
    registry.client.delete_model_version("deleted", "1")
    assert registry.reconcile("deleted", {"champion": only.digest}) == [f"alias champion: version {only.digest[:12]} is missing in MLflow"]
    registry.register(only, folder=tmp_path, run=None, card="")
    assert registry.reconcile("deleted", {"champion": only.digest}) == ["alias champion → version 2"]


@pytest.mark.parametrize("value", ["https://shop.example/checkout", "../etc", "a/./b", "a/", "/", "..", "x" * 300])
def test_whatever_a_segment_is_called_its_version_is_registered(registry: MlflowRegistry, tmp_path: Path, value: str) -> None:
    policy, numbers = f"named-{hash(value)}", {segment_key({"task": value}): {"turns": 1}, value: {"turns": 2}}
    ran = replace(run(1, policy), metrics={"segments": numbers, "by task": numbers, **numbers})
    registry.register(version(1, policy), folder=tmp_path, run=ran, card="")
    (found,) = registry.client.search_model_versions(f"name = '{policy}'")
    assert len(registry.client.get_run(str(found.run_id)).data.metrics) == 6


CLASHING = {"adam": {"beta=1": 0.9, "beta,1": 0.8}}
"""A configuration of which MLflow takes no run: two of its names are one there."""


def test_a_registration_that_was_refused_is_gone_on_with_in_its_run(registry: MlflowRegistry, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(Unavailable, match="did not take version"):
            registry.register(version(1, "again"), folder=tmp_path, run=replace(run(1, "again"), config=CLASHING), card="")
    registry.register(version(1, "again"), folder=tmp_path, run=run(1, "again"), card="")
    registry.register(version(2, "again"), folder=tmp_path, run=run(2, "again"), card="")
    experiment = registry.client.get_experiment_by_name("again")
    assert experiment is not None
    assert [one.info.status for one in registry.client.search_runs([experiment.experiment_id])] == ["FINISHED"] * 2
    versions = registry.client.search_model_versions("name = 'again'")
    assert len({one.run_id for one in versions}) == 2, "each version has its own"


def test_a_version_that_mlflow_does_not_take_holds_no_other_alias_up(
    registry: MlflowRegistry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = {one.digest: one for one in (version(number, "held") for number in (1, 2, 3))}
    first, refused, third = known
    runs = {"run-1": run(1, "held"), "run-2": replace(run(2, "held"), config=CLASHING), "run-3": run(3, "held")}
    pointer: Any = SimpleNamespace(digest=third, anchor=first, previous=refused)
    projection = Projection(
        releases=cast(Any, SimpleNamespace(pointer=lambda policy: pointer, list=lambda **asked: [])),
        versions=cast(Any, SimpleNamespace(find=lambda policy, digest: replace(known[digest], run_id=f"run-{known[digest].step}"))),
        weights=cast(Any, SimpleNamespace(path=lambda digest: tmp_path)), runs=cast(Any, SimpleNamespace(get=runs.get)), registry=registry,
    )  # fmt: skip
    project_once(["held"], projection)
    aliased = {alias: registry.client.get_model_version_by_alias("held", alias).tags["digest"] for alias in ("champion", "anchor")}
    assert aliased == {"champion": third, "anchor": first}
    assert f"projection waits policy=held version={refused[:12]}: MLflow at" in caplog.text


def test_a_server_that_is_away_is_said_to_be_soon(tmp_path: Path) -> None:
    """Registering is a step of the cycle: it must not wait for minutes for a projection."""
    program = (
        "import sys, time; from pathlib import Path; from app.domain.errors import Unavailable\n"
        "from app.registry.mlflow_registry import MlflowRegistry; from tests.integration.release.test_registry import version\n"
        "registry, began = MlflowRegistry('http://127.0.0.1:9'), time.monotonic()\n"
        "try: registry.register(version(1, 'away'), folder=Path('/'), run=None, card='')\n"
        "except Unavailable as error: assert '127.0.0.1:9' in str(error); print(time.monotonic() - began)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600, cwd=ROOT)
    assert float(told.stdout) < 30.0


def test_numbers_of_a_report_become_metrics_with_steps_and_what_is_no_number_is_left_out() -> None:
    tree = {
        "loss": 1.5, "turns": 3, "fits": True, "name": "x", "odd": float("nan"), "by=who": {"a,b": 2.0}, "none": None,
        "curve": [1.0, {"kl": 0.5}, "y", 4],
    }  # fmt: skip
    assert [(one.key, one.value, one.timestamp, one.step) for one in _metrics(tree, 77)] == [
        ("loss", 1.5, 77, 0), ("turns", 3.0, 77, 0), ("fits", 1.0, 77, 0), ("by_who.a_b", 2.0, 77, 0), ("curve", 1.0, 77, 0),
        ("curve.kl", 0.5, 77, 1), ("curve", 4.0, 77, 3),
    ]  # fmt: skip


def test_parameters_are_named_by_their_tables_and_cut_where_mlflow_refuses_more() -> None:
    found = _params({"a": {"b=c": 1, "d": None}, "long": "x" * 6001})
    assert [(one.key, one.value) for one in found] == [("a.b_c", "1"), ("a.d", "None"), ("long", "x" * 6000)]


def test_moments_are_milliseconds() -> None:
    assert _millis(datetime(2026, 1, 1, 0, 0, 1, 500_900, tzinfo=UTC)) == 1_767_225_601_500


OPENING = """
import sys
from app.registry.mlflow_registry import MlflowRegistry
print("loaded", flush=True)
sys.stdin.readline()
print(len(MlflowRegistry(sys.argv[1]).client.search_registered_models()), flush=True)
"""


def opener(file: Path) -> "subprocess.Popen[str]":
    """A process that has everything loaded and opens the registry when it is told to."""
    command = [sys.executable, "-c", OPENING, f"sqlite:///{file}"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "loaded\n"
    return process


def tell(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def test_two_that_open_it_for_the_first_time_at_once_both_have_it(tmp_path: Path) -> None:
    two = [opener(tmp_path / "mlflow.db") for _ in range(2)]
    for process in two:
        tell(process)
    for process in two:
        said, complained = process.communicate(timeout=300)
        assert (process.returncode, said) == (0, "0\n"), complained


def test_one_killed_while_it_makes_the_tables_leaves_nothing_that_the_next_one_falls_over(tmp_path: Path) -> None:
    first = opener(tmp_path / "mlflow.db")
    tell(first)
    deadline = time.monotonic() + 300
    while not any(size(file) > TABLES for file in (tmp_path / "mlflow.db", tmp_path / "mlflow.db.half")):
        assert time.monotonic() < deadline, "no table is made"
        time.sleep(0.005)
    first.kill()
    first.communicate()
    second = opener(tmp_path / "mlflow.db")
    said, complained = second.communicate("\n", timeout=300)
    assert (second.returncode, said) == (0, "0\n"), complained
    assert not list(tmp_path.glob("*.half*"))


def test_tables_that_are_not_whole_are_told_with_the_cure(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("CREATE TABLE secrets (words TEXT)")
    cure = "move the file away, and what is in use is written anew from the ledger"
    with pytest.raises(Unavailable, match=rf"mlflow\.db are not whole \(.*\): {cure}$"):
        MlflowRegistry(f"sqlite:///{tmp_path}/mlflow.db")


def test_tables_that_cannot_be_made_are_told_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "full").touch()  # a file where a folder is wanted
    with pytest.raises(Unavailable, match=rf"mlflow\.db are not made \(.*\): let it write to {tmp_path}/full, and give it space$"):
        MlflowRegistry(f"sqlite:///{tmp_path}/full/mlflow.db")


def test_tables_of_another_mlflow_are_told_with_the_command_that_upgrades_them(tmp_path: Path) -> None:
    MlflowRegistry(f"sqlite:///{tmp_path}/made.db")
    shutil.copy(tmp_path / "made.db", tmp_path / "older.db")
    with closing(sqlite3.connect(tmp_path / "older.db")) as database, database:
        database.execute("UPDATE alembic_version SET version_num = 'df50e92ffc5e'")
    with pytest.raises(Unavailable, match=r"older\.db is not opened: .*mlflow db upgrade"):
        MlflowRegistry(f"sqlite:///{tmp_path}/older.db")


def test_who_logs_in_is_no_part_of_a_complaint(tmp_path: Path) -> None:
    nobody = MlflowRegistry("http://ratchet:open-sesame@127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"MLflow at http://127\.0\.0\.1:1 did not take") as told:
        nobody.register(version(1, "p"), folder=tmp_path, run=None, card="")
    assert "open-sesame" not in str(told.value)
