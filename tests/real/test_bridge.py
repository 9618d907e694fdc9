"""Tasksets of other make, through the bridge in an environment of its own: verifiers' own classes, a puzzle generator, a Harbor folder."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine

from pipelines.__main__ import ratchet
from pipelines.rollouts.bridged import Bridge, BridgedTaskset, Graders
from pipelines.rollouts.check import validity
from pipelines.rollouts.tasks import TaskData
from tests.integration.rollouts.practising import BOXES, Practice, calls, said_by_tools
from tests.real.parts import ROOT, missing

pytestmark = pytest.mark.real
HERE = Path(__file__).parent / "bridged"
PYTHON = ROOT / ".cache" / "verifiers-venv" / "bin" / "python"
PROGRAM = ROOT / "infra" / "verifiers" / "ratchet_bridge.py"
GRADERS = Graders(boxes=BOXES)
START_S = 120.0


@pytest.fixture(scope="session")
def verifiers_python() -> Path:
    """The Python of verifiers' environment, made if need be."""
    made = subprocess.run([sys.executable, str(ROOT / "infra" / "setup.py"), "verifiers"], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        missing("verifiers", made.stderr.strip()[-600:])
    return PYTHON


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(verifiers_python: Path) -> Iterator[Start]:
    """Start bridges; all of them end."""
    begun: list[subprocess.Popen[str]] = []

    def started(*words: str) -> subprocess.Popen[str]:
        environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/tmp"), "PYTHONPATH": str(HERE)}
        command = [str(verifiers_python), str(PROGRAM), *words, "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=HERE)
        begun.append(process)
        return process

    yield started
    for process in begun:
        process.kill()
        process.communicate()


def address(process: subprocess.Popen[str]) -> str:
    """Of a bridge that is ready."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("bridge ready"), line + (process.stderr.read() if process.stderr is not None else "")
    return line.strip().rpartition("address=")[2]


def offered(process: subprocess.Popen[str]) -> dict[str, TaskData]:
    return {task.key: task for task in BridgedTaskset(bridge=Bridge(address(process)), boxes=BOXES).load()}


def test_a_taskset_that_is_written_for_verifiers_is_checked_practised_and_graded(
    start: Start, sqlite_engine: Engine, tmp_path: Path
) -> None:
    tasks = offered(start("puzzles"))
    assert sorted(tasks) == ["puzzle-2", "puzzle-3", "puzzle-4"]
    task = tasks["puzzle-2"]
    assert task.files["puzzle.txt"] == task.instruction == r"What is 1/2 + 1/3? Answer in \boxed{}."
    assert validity(task, GRADERS) is None
    asked = iter(["I think it is 3.", r"It is \boxed{5/6}.", r"\boxed{0.8}", r"\boxed{\frac{10}{12}}"])

    def scripted(request: Any) -> str:
        if not said_by_tools(request):
            return calls("shell", command="cat puzzle.txt")
        return next(asked)

    practice = Practice(sqlite_engine, tmp_path, scripted)
    try:
        dispatch = practice.dispatch(task, config={"group_size": 4, "slots": 1})
        dispatch.workplace.grader = GRADERS
        assert dispatch.run(groups=1) == {"solved": 2, "failed": 2}
    finally:
        practice.close()
    assert [said.value for said in practice.said()] == [0.0, 1.0, 0.0, 1.0]
    assert {turn.source for turn in practice.turns()} == {"rollout:puzzles"}


def test_a_folder_of_harbor_s_shape_is_checked_and_graded_in_parts(start: Start) -> None:
    (task,) = offered(start(f"harbor:{HERE / 'harbor'}")).values()
    assert dict(task.files) == {"name.txt": "Ann\n"}
    assert (task.deadline_s, task.grading_s) == (60.0, 30.0)
    assert validity(task, GRADERS) is None, "solution/solve.sh is paid 1, nothing is paid less"
    worth = {
        name: GRADERS.grade(task, files, seed=0)
        for name, files in {
            "right": {"greeting.txt": "Hello, Ann\n"}, "wrong": {"greeting.txt": "Hello, Bob\n"}, "nothing": {},
            "a verdict of one's own": {"logs/verifier/reward.json": '{"reward": 1.0}', "tests/test.sh": "exit 0\n"},
        }.items()
    }  # fmt: skip
    assert {name: grade.reward for name, grade in worth.items()} == {
        "right": 1.0, "wrong": 0.5, "nothing": 0.0, "a verdict of one's own": 0.0,
    }  # fmt: skip


def test_what_cannot_be_offered_is_refused_by_name_or_left_out(start: Start, tmp_path: Path) -> None:
    wrong = (
        (("puzzles", "--config", '{"with_user": true}'), "puzzle-2: its user opens the conversation"), (("no_such_module",), "not found"),
        ((f"harbor:{tmp_path}",), "no task.toml is below"), (("puzzles", "--config", '{"sauce": 1}'), "sauce"),
    )  # fmt: skip
    for refused, sentence in [(start(*words), sentence) for words, sentence in wrong]:
        _, complaint = refused.communicate(timeout=START_S)
        assert refused.returncode == 2
        assert sentence in complaint
        assert complaint.count("\n") == 1 or "Traceback" not in complaint
    assert sorted(offered(start("puzzles", "--config", '{"with_user": true}', "--leave-out"))) == ["puzzle-3", "puzzle-4"]


def test_the_command_checks_and_holds_a_bridged_taskset(
    start: Start, tmp_path: Path, sqlite_url: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = address(start(f"harbor:{HERE / 'harbor'}"))
    config = tmp_path / "ratchet.toml"
    config.write_text(
        f'[policies.composer]\nmodel = "{tiny_model}"\nbase_name = "t"\nbase_model = "T"\n[rollouts]\ntasksets = ["bridge:{url}"]\n'
    )
    for name, value in (("DATA", str(tmp_path / "data")), ("CONFIG", str(config)), ("DATABASE_URL", sqlite_url)):
        monkeypatch.setenv(f"RATCHET_{name}", value)

    def said(*words: str) -> str:
        return CliRunner().invoke(ratchet, ["env", *words], catch_exceptions=False, standalone_mode=False).output

    assert "1 of 1 tasks" in said("check", f"bridge:{url}")
    assert "bridge" in said("list", f"bridge:{url}")
    assert "sound" in said("try", f"bridge:{url}", "greet", "--gold")
