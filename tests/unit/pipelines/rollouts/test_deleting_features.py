"""A function of a library loses its body: what is a task, what an agent sees of it, and which tests are hidden."""

import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from app.domain.errors import BadInput
from pipelines.rollouts.grading import Grade, Grader, Verdict
from pipelines.rollouts.tasks import TaskData
from pipelines.rollouts.tasksets import feature_deletion
from pipelines.rollouts.tasksets.feature_deletion import (
    GONE,
    HACKS,
    Source,
    functions,
    read_archive,
    task_of,
    with_body,
    without_tests,
)
from pipelines.rollouts.tasksets.survey import MOST_TESTS, survey

LIB = Source(name="lib", archive="lib-1.0.tar.gz", sha256="", package="lib/", tests=("lib/tests/", "more/"))
CODE = '''import math

def double(n):
    """Twice n."""
    if n:
        return 2 * n
    return 0

@staticmethod
def half(n):
    """Half of n."""
    return n / 2

def _hidden(n):
    """Nobody's business."""
    return n

def untold(n):
    return n

def empty():
    """Nothing to write."""

class Thing:
    def method(self):
        """Inside."""
        return 1
'''
TESTS = """import lib

def helper(): pass

def test_double():
    assert lib.double(1) == 2

@mark
def test_half():
    assert lib.half(2) == 1

class TestThing:
    def test_double_more(self):
        assert lib.double(2) == 4
    def test_other(self):
        pass
"""
FILES = {
    "lib/a.py": CODE, "lib/sandbox/x.py": 'def x():\n    """X."""\n    return 1\n', "lib/tests/test_a.py": TESTS,
    "lib/tests/helpers.py": "def test_no(): pass\n", "setup.py": "",
}  # fmt: skip


def test_a_function_is_a_task_where_it_is_public_told_and_has_a_body() -> None:
    assert list(functions(LIB, FILES)) == [("lib/a.py", "double"), ("lib/a.py", "half")]


def test_a_body_is_replaced_below_its_signature_decorators_and_docstring() -> None:
    changed = with_body(CODE, "double", "x = 1\nreturn x")
    assert changed.startswith('import math\n\ndef double(n):\n    """Twice n."""\n    x = 1\n    return x\n\n@staticmethod\ndef half(n):\n')
    assert changed.endswith(CODE[CODE.index("@staticmethod") :])
    assert with_body(CODE, "untold", "pass").count("def untold(n):\n    pass\n") == 1
    assert with_body(CODE, "half", GONE).count(f'"""Half of n."""\n    {GONE}\n') == 1


def test_all_tests_of_a_library_are_named_by_where_they_stand() -> None:
    assert feature_deletion.tests_of(LIB, FILES) == [
        "lib/tests/test_a.py::test_double", "lib/tests/test_a.py::test_half", "lib/tests/test_a.py::TestThing::test_double_more",
        "lib/tests/test_a.py::TestThing::test_other",
    ]  # fmt: skip


def test_hidden_tests_are_taken_out_with_their_decorators_and_a_file_without_others_is_empty() -> None:
    left = without_tests(TESTS, ["test_half", "TestThing::test_double_more"])
    assert left == (
        "import lib\n\ndef helper(): pass\n\ndef test_double():\n    assert lib.double(1) == 2\n\n\n"
        "class TestThing:\n    pass\n    def test_other(self):\n        pass\n"
    )
    everything = ["test_double", "test_half", "TestThing::test_double_more", "TestThing::test_other"]
    assert without_tests(TESTS, everything) == ""
    assert "def test_other" in without_tests(TESTS, everything[:-1])
    assert without_tests(TESTS, ["test_double_more"]) == TESTS, "a test of a class is named with it"


def test_an_agent_sees_the_package_without_the_body_and_the_tests_that_do_not_notice() -> None:
    row = {
        "file": "lib/a.py",
        "function": "double",
        "tests": ["lib/tests/test_a.py::test_double", "lib/tests/test_a.py::TestThing::test_double_more"],
    }
    task = task_of(LIB, FILES, row, "feature-deletion")
    assert (task.taskset, task.key, task.editable) == ("feature-deletion", "lib/a.double", ("lib/a.py",))
    assert sorted(task.files) == ["lib/a.py", "lib/sandbox/x.py", "lib/tests/helpers.py", "lib/tests/seen_test_a.py", "setup.py"]
    assert task.files["lib/a.py"] == with_body(CODE, "double", GONE)
    assert "test_half" in task.files["lib/tests/seen_test_a.py"]
    assert "double" not in task.files["lib/tests/seen_test_a.py"]
    assert (task.tests, task.gold) == ({"lib/tests/test_a.py": TESTS}, {"lib/a.py": CODE})
    assert task.expected == tuple(row["tests"])
    assert {name: hack["lib/a.py"] for name, hack in task.hacks.items()} == {
        name: with_body(CODE, "double", body) for name, body in HACKS.items()
    }
    whole = task_of(LIB, FILES, {**row, "tests": feature_deletion.tests_of(LIB, FILES)}, "t")
    assert not any("test_a" in path for path in whole.files), "of a file whose tests are all hidden nothing is seen"
    assert "`double` in lib/a.py of the library lib" in task.instruction


def archived(folder: Path, **files: str) -> Source:
    path = folder / LIB.archive
    with tarfile.open(path, "w:gz") as tar:
        for name, text in {**{f"lib-1.0/{name}": text for name, text in FILES.items()}, **files}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
        link = tarfile.TarInfo("lib-1.0/lib/link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return replace(LIB, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def test_of_an_archive_the_sources_and_tests_are_read_and_nothing_else(tmp_path: Path) -> None:
    source = archived(tmp_path, **{"lib-1.0/lib/notes.txt": "x", "lib-1.0/more/test_b.py": "pass", "lib-1.0/elsewhere/c.py": "pass"})
    found = read_archive(tmp_path / LIB.archive, source)
    assert sorted(found) == ["lib/a.py", "lib/sandbox/x.py", "lib/tests/helpers.py", "lib/tests/test_a.py", "more/test_b.py"]
    assert found["lib/a.py"] == CODE
    with pytest.raises(BadInput, match="is not the file that it should be"):
        read_archive(tmp_path / LIB.archive, LIB)
    with pytest.raises(BadInput, match="is not there"):
        read_archive(tmp_path / "none", source)


@dataclass
class Noticing:
    """Runs tests by what the library's file says: those that name a function fail where it is gone."""

    broken: bool = False
    asked: list[TaskData] = field(default_factory=list[TaskData])

    def grade(self, task: TaskData, files: Mapping[str, str | None], *, seed: int) -> Grade:
        self.asked.append(task)
        if self.broken:
            return Grade(verdict=Verdict.FAILED, reason="nothing runs")
        sound = task.files["lib/a.py"] != with_body(CODE, "double", GONE)
        passed = tuple(test for test in task.expected if sound or not ("double" in test or "twice" in test))
        return Grade(verdict=Verdict.PASSED, passed=passed)


def test_a_function_is_surveyed_by_the_tests_that_notice_its_removal_those_of_its_name_first() -> None:
    grader = Noticing()
    rows = list(survey(LIB, FILES, cast(Grader, grader)))
    assert rows == [
        {
            "library": "lib", "file": "lib/a.py", "function": "double",
            "tests": ["lib/tests/test_a.py::TestThing::test_double_more", "lib/tests/test_a.py::test_double"],
        }
    ]  # fmt: skip
    assert {(task.grading_s, task.key) for task in grader.asked} == {(300.0, "lib-1.0.tar")}
    assert all("lib/tests/test_a.py" in task.tests and "lib/tests/test_a.py" not in task.files for task in grader.asked)
    many = "import lib\n" + "".join(f"def test_double_{n}():\n    lib.double({n})\n" for n in range(MOST_TESTS + 3))
    (row,) = survey(LIB, {**FILES, "lib/tests/test_a.py": many}, cast(Grader, grader))
    assert len(row["tests"]) == 8


def test_a_test_of_another_name_counts_where_none_has_the_functions() -> None:
    def found(*names: str) -> list[list[str]]:
        text = "import lib\n" + "".join(f"def {name}():\n    lib.double(1)\n" for name in names)
        other = "def test_twice_elsewhere():\n    pass\n"
        files = {**FILES, "lib/tests/test_a.py": text, "lib/tests/test_b.py": other}
        return [row["tests"] for row in survey(LIB, files, cast(Grader, Noticing())) if row["function"] == "double"]

    assert found("test_double", "test_twice") == [["lib/tests/test_a.py::test_double"]]
    assert found("test_twice", "test_sum") == [["lib/tests/test_a.py::test_twice"]], "of a file that names the function"
    assert found("test_sum") == [], "what nothing notices is no task"


def test_a_library_whose_tests_do_not_run_is_refused_where_it_has_more_than_fifty() -> None:
    def many(count: int) -> dict[str, str]:
        return {**FILES, "lib/tests/test_a.py": "".join(f"def test_{n}(): pass\n" for n in range(count))}

    assert list(survey(LIB, many(50), cast(Grader, Noticing(broken=True)))) == []
    with pytest.raises(BadInput, match="the tests of lib do not run here: nothing runs"):
        list(survey(LIB, many(51), cast(Grader, Noticing(broken=True))))
