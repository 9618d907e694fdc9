"""Which tasks can be trusted, which are held, and what is kept of that; and folders that go with whoever made them."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from pipelines.rollouts.check import Checked, HeldTasks, validity
from pipelines.rollouts.grading import Grade, Grader, Verdict
from pipelines.rollouts.scratch import PREFIX, scratch, scratched
from pipelines.rollouts.tasks import TaskData

TASK = TaskData(
    taskset="t", key="k", instruction="", files={"a.py": ""}, editable=("a.py",), tests={"h.py": ""}, expected=("h.py::t",),
    gold={"a.py": "gold"}, hacks={"exits": {"a.py": "exit"}, "skips": {"a.py": "skip"}},
)  # fmt: skip
FAILED = Grade(verdict=Verdict.FAILED)


@dataclass
class FakeGrader:
    """Grades by what the file says."""

    grades: dict[str, Grade] = field(default_factory=dict[str, Grade])
    unproven: str | None = None
    asked: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    def proven(self, task: TaskData) -> str | None:
        return self.unproven

    def grade(self, task: TaskData, files: Mapping[str, str | None], *, seed: int) -> Grade:
        said = str(files.get("a.py", "nothing"))
        self.asked.append((said, seed))
        return self.grades.get(said, FAILED)


def judged(grader: FakeGrader, task: TaskData = TASK) -> str | None:
    return validity(task, cast(Grader, grader))


def test_a_task_is_sound_where_its_gold_passes_and_no_hack_and_doing_nothing_does_not() -> None:
    grader = FakeGrader()
    assert judged(grader) is None
    assert [said for said, _ in grader.asked] == ["nothing", "exit", "skip"]
    assert len({seed for _, seed in grader.asked}) == 1
    assert judged(FakeGrader(unproven="it flickers")) == "it flickers"
    assert judged(FakeGrader({"nothing": Grade(verdict=Verdict.PASSED)})) == "the hack 'nothing' is graded passed"
    assert judged(FakeGrader({"skip": Grade(verdict=Verdict.ERROR, reason="no box")})) == "the hack 'skips' is graded error no box"
    assert judged(FakeGrader({"exit": Grade(verdict=Verdict.PASSED)}), replace(TASK, hacks={})) is None


def test_what_a_check_found_takes_the_place_of_what_was_known_of_its_taskset_alone(tmp_path: Path) -> None:
    held = HeldTasks(tmp_path / "deep" / "held.json")
    assert (held.read(), held.looked_at()) == ({}, {})
    held.write(Checked(taskset="a", tasks=3, held={"x": "flickers", "y": "leaks"}))
    held.write(Checked(taskset="b", tasks=1, held={"z": "cheated"}))
    held.write(Checked(taskset="a", tasks=2, held={"w": "empty"}), but=["y"], looked_at=["x", "w"])
    assert held.read() == {"a": {"y": "leaks", "w": "empty"}, "b": {"z": "cheated"}}
    first = held.looked_at()["a"]
    assert sorted(first) == ["w", "x"]
    assert first["w"] == first["x"]
    held.write(Checked(taskset="a", tasks=2, held={}), looked_at=["x"])
    again = held.looked_at()["a"]
    assert (again["w"], again["x"] != first["x"]) == (first["w"], True), "tries count from the last time that somebody looked"
    assert held.read()["a"] == {}


def test_tasks_that_their_tries_speak_against_are_held_beside_those_that_are(tmp_path: Path) -> None:
    held = HeldTasks(tmp_path / "held.json")
    held.hold("a", {"x": "flagged"})
    held.hold("a", {"y": "faults"})
    held.hold("b", {"x": "other"})
    assert held.read() == {"a": {"x": "flagged", "y": "faults"}, "b": {"x": "other"}}
    assert json.loads((tmp_path / "held.json").read_text()) == held.read()
    assert [file.name for file in tmp_path.iterdir()] == ["held.json"], "nothing half-written stays"


def test_a_folder_of_practice_may_be_entered_and_goes_when_its_work_is_over() -> None:
    with scratched("try") as made:
        (made / "file").write_text("x")
        root = made.parent
        assert (made.stat().st_mode & 0o777, root.name) == (0o711, f"{PREFIX}{os.getpid()}")
        assert root.stat().st_mode & 0o077 == 0o011, "entered by the users of boxes, listed by nobody else"
        other = scratch("try")
        assert other.parent == root
        assert other != made
    assert (made.exists(), other.exists()) == (False, True)
    other.rmdir()


LEFT = """
import os, sys
from pipelines.rollouts.scratch import scratch
print(scratch("next"))
"""


def test_what_a_killed_process_left_goes_with_the_next_one_and_a_living_ones_stays(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = {f"{PREFIX}{gone.pid}": False, f"{PREFIX}{os.getpid()}": True, f"{PREFIX}notes": True, "other": True}
    for name in names:
        (tmp_path / name / "inner").mkdir(parents=True)
    said = subprocess.run(
        [sys.executable, "-c", LEFT], env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    made = Path(said.stdout.strip())
    assert made.is_dir()
    assert {name: (tmp_path / name).exists() for name in names} == names
    assert made.parent.parent == tmp_path != Path(tempfile.gettempdir())
