"""What `ratchet env check` finds: tasks that can be cheated, and a harness that is another one in practice."""

from dataclasses import replace
from pathlib import Path

import pytest

from app.domain.errors import BadInput
from app.sandbox.processes import ProcessBoxes
from pipelines.rollouts.check import PROBES, HeldTasks, check, differential, validity
from pipelines.rollouts.grading import Grader
from pipelines.rollouts.harness import AGENT, CodingAgent
from pipelines.rollouts.tasks import TaskData, checked
from pipelines.rollouts.tasksets.feature_deletion import FeatureDeletion
from pipelines.rollouts.tasksets.small_functions import SmallFunctions
from tests.architecture.sources import ROOT
from tests.integration.rollouts.practising import BOXES

GRADER = Grader(boxes=BOXES)
ADD = SmallFunctions().load()[0]
SOURCES = ROOT / ".cache" / "tasksets"


def test_a_task_of_each_kind_is_sound() -> None:
    assert validity(ADD, GRADER) is None
    deleted = {task.key: task for task in FeatureDeletion(sources=SOURCES).load()}
    assert len(deleted) > 100
    assert validity(deleted["inflection/__init__.dasherize"], GRADER) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"gold": {"solution.py": "def add(a, b):\n    return 3\n"}}, "gold patch does not pass"),
        ({"hacks": {"the answer": dict(ADD.gold)}}, "the hack 'the answer' is graded passed"),
        (
            {"tests": {"hidden/test_solution.py": "def test_0():\n    pass\n"}, "expected": ("hidden/test_solution.py::test_0",)},
            "'nothing' is",
        ),
    ],
)
def test_a_task_that_cannot_be_trusted_is_held(change: dict[str, object], sentence: str) -> None:
    assert sentence in (validity(replace(ADD, **change), GRADER) or "")  # type: ignore[arg-type]


def test_the_harness_is_the_same_in_a_box_and_in_production() -> None:
    assert len(PROBES) == 40
    assert differential(CodingAgent(), boxes=BOXES, plain=ProcessBoxes()) is None


def test_a_step_that_another_policy_does_is_the_same_too() -> None:
    few = {"here": PROBES["here"]}
    agent = CodingAgent(search_model="scout")
    assert differential(agent, boxes=BOXES, plain=ProcessBoxes(), probes=few, components=["scout"]) is None
    assert agent.hash != CodingAgent().hash, "with the step it is another harness"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("+ found_first(task)}]", '+ (" (practice)" if os.path.exists("/run/keeper.py") else "")}]', "differs in 'user'"),
        ('return "replaced"', 'return "replaced" if os.path.exists("/run/keeper.py") else "done"', "differs in 'edit'"),
        ("else TOOLS", 'else TOOLS[: 4 if os.path.exists("/run/keeper.py") else 5]', "schemas differ"),
    ],
)
def test_a_harness_that_knows_where_it_is_holds_the_taskset(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    program = tmp_path / "agent.py"
    text = AGENT.read_text()
    assert old in text
    program.write_text(text.replace(old, new))
    found = check("small", [], grader=GRADER, harness=CodingAgent(program=program), boxes=BOXES, plain=ProcessBoxes())
    assert sentence in found.held["*"]
    held = HeldTasks(tmp_path / "held.json")
    held.write(found)
    assert held.read() == {"small": dict(found.held)}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"expected": ()}, "has no tests"),
        ({"expected": ("other.py::test",)}, "no file of `tests` is called so"),
        ({"instruction": "x" * 20_001}, "may have 20000"),
        ({"files": {"hidden/test_solution.py": ""}}, "hidden test that the agent sees"),
        ({"editable": ("conftest.py",), "gold": {}}, "decide how tests run"),
        ({"gold": {"other.py": ""}}, "what may not travel"),
        ({"files": {"../x": ""}}, "no path within a workspace"),
        ({"deadline_s": 0}, "above zero"),
        ({"taskset": "My Tasks"}, "a taskset is called 'My Tasks'"),
    ],
)
def test_a_task_that_cannot_be_graded_is_refused(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        checked([replace(ADD, **change)])  # type: ignore[arg-type]


def test_two_tasks_with_one_key_and_no_tasks_are_refused() -> None:
    twice: list[TaskData] = [ADD, ADD]
    with pytest.raises(BadInput, match="another task has this key"):
        checked(twice)
    with pytest.raises(BadInput, match="no tasks"):
        checked([])
