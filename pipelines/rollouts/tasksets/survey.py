"""Works out which functions of a library are tasks: those whose removal some test notices. Done once, when libraries are chosen.

Fed by the archives; feeds `feature_deletion.json`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.domain.errors import BadInput
from pipelines.rollouts.grading import Grade, Grader
from pipelines.rollouts.tasks import TaskData
from pipelines.rollouts.tasksets.feature_deletion import GONE, Source, functions, tests_of, with_body

MOST_TESTS = 8
"""Hidden tests of one task; a function that more than these notice is known by these just as well."""


def survey(source: Source, files: Mapping[str, str], grader: Grader) -> Iterator[dict[str, Any]]:
    """A row for each function that is a task. Raises `BadInput` where the library's tests do not run."""
    everything = tests_of(source, files)
    sound = set(_run(source, files, everything, grader).passed)
    for path, name in functions(source, files):
        asking = [test for test in everything if test in sound and name in files[test.partition("::")[0]]]
        if asking:
            left = set(_run(source, {**files, path: with_body(files[path], name, GONE)}, asking, grader).passed)
            noticed = sorted(test for test in asking if test not in left)
            named = [test for test in noticed if name in test.rpartition("::")[2]] or noticed
            if named:
                yield {"library": source.name, "file": path, "function": name, "tests": named[:MOST_TESTS]}


def _run(source: Source, files: Mapping[str, str], tests: list[str], grader: Grader) -> Grade:
    tested = {test.partition("::")[0] for test in tests}
    task = TaskData(
        taskset="survey", key=Path(source.archive).stem, instruction="", editable=(), tests={path: files[path] for path in tested},
        files={path: text for path, text in files.items() if path not in tested}, expected=tuple(tests), gold={}, grading_s=300.0,
    )  # fmt: skip
    found = grader.grade(task, {}, seed=0)
    if found.reason and not found.passed and len(tests) > 50:
        raise BadInput(f"the tests of {source.name} do not run here: {found.reason}")
    return found
