"""Feature deletion: a function of a real library has lost its body, and the library's own tests say when it is back.

    source distribution (set-up fetched it, by its hash) ──▶ the package without one body ──▶ workspace
                                                        └──▶ its tests: those that then fail are hidden, the others stay to be seen

Which functions those are is worked out once (`survey`) and written down in `feature_deletion.json`: a function is a task only where a test
passes with it and fails without. What was removed is nowhere else in the box: no installed copy, no compiled file, no history.
"""

import ast
import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from app.domain.errors import BadInput
from pipelines.rollouts.tasks import TaskData, checked

SURVEY = Path(__file__).with_name("feature_deletion.json")
GONE = 'raise RuntimeError("this function has no body yet")'
HACKS = {
    "empty": "pass",
    "leaves": "import os; os._exit(0)",
    "exits": "raise SystemExit(0)",
    "skips": "import pytest as p; p.skip('no')",
    "nothing comes back": "return None",
    "always equal": "return type('E', (), {'__eq__': lambda s, o: True, '__ne__': lambda s, o: False, '__hash__': lambda s: 0})()",
}
"""Bodies that a careless grader pays."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One library."""

    name: str
    archive: str
    sha256: str
    package: str
    """Folder of its sources."""
    tests: tuple[str, ...]
    """Files or folders of its tests."""


SOURCES = (
    Source(
        name="toolz", archive="toolz-1.0.0.tar.gz", sha256="2c86e3d9a04798ac556793bced838816296a2f085017664e4995cb40a1047a02",
        package="toolz/", tests=("toolz/tests/",),
    ),
    Source(
        name="boltons", archive="boltons-23.1.1.tar.gz", sha256="d2cb2fa83cf2ebe791be1e284183e8a43a1031355156a968f8e0a333ad2448fc",
        package="boltons/", tests=("tests/",),
    ),
    Source(
        name="inflection", archive="inflection-0.5.1.tar.gz", sha256="1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417",
        package="inflection/", tests=("test_inflection.py",),
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FeatureDeletion:
    """The taskset."""

    sources: Path
    """Where set-up puts the archives."""
    survey: Path = SURVEY
    name: str = "feature-deletion"

    def load(self) -> Sequence[TaskData]:
        """A task for each function of the survey. Raises `BadInput` where an archive is missing or another one."""
        surveyed = json.loads(self.survey.read_text())
        libraries = {source.name: read_archive(self.sources / source.archive, source) for source in SOURCES}
        by_name = {source.name: source for source in SOURCES}
        return checked([task_of(by_name[row["library"]], libraries[row["library"]], row, self.name) for row in surveyed])


def read_archive(archive: Path, source: Source) -> dict[str, str]:
    """The sources and tests of a library, by path; nothing else of what is in its archive."""
    if not archive.is_file():
        raise BadInput(f"{archive} is not there: run `make data`, which fetches it")
    if hashlib.sha256(archive.read_bytes()).hexdigest() != source.sha256:
        raise BadInput(f"{archive} is not the file that it should be: remove it and run `make data`")
    found: dict[str, str] = {}
    with tarfile.open(archive) as tar:
        for entry in tar:
            path = entry.name.partition("/")[2]
            wanted = path.endswith(".py") and (path.startswith((source.package, *source.tests)))
            opened = tar.extractfile(entry) if wanted and entry.isfile() else None
            if opened is not None:
                found[path] = opened.read().decode()
    return found


def functions(source: Source, files: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(file, name) of every public function of a library that has a body worth writing."""
    for path, text in sorted(files.items()):
        if path.startswith(source.package) and not path.startswith(source.tests) and "/sandbox/" not in path:
            for node in _tree(text).body:
                if (
                    isinstance(node, ast.FunctionDef)
                    and not node.name.startswith("_")
                    and ast.get_docstring(node)
                    and len(_body(node)) >= 1
                ):
                    yield path, node.name


def with_body(text: str, name: str, body: str) -> str:
    """The file with this in the place of the function's body; signature, decorators and docstring stay."""
    lines = text.splitlines()
    found = _function(text, name)
    kept = _body(found)
    begin, end = kept[0].lineno - 1, found.end_lineno
    indent = " " * (kept[0].col_offset)
    return "\n".join([*lines[:begin], *(indent + line for line in body.splitlines()), *lines[end:]]) + "\n"


def without_tests(text: str, hidden: Sequence[str]) -> str:
    """A test file without these tests; empty where none is left."""
    lines, tree = text.splitlines(), _tree(text)
    gone: set[int] = set()
    left = 0
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef) and child.name.startswith("test"):
                inside = f"{node.name}::{child.name}" if isinstance(node, ast.ClassDef) else child.name
                if inside in hidden:
                    first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                    assert child.end_lineno is not None
                    gone.update(range(first, child.end_lineno + 1))
                    if isinstance(node, ast.ClassDef):
                        indent = " " * child.col_offset
                        lines[child.end_lineno - 1] = f"{indent}pass"
                        gone.discard(child.end_lineno)
                else:
                    left += 1
    return "\n".join(line for number, line in enumerate(lines, 1) if number not in gone) + "\n" if left else ""


def task_of(source: Source, files: Mapping[str, str], row: Mapping[str, object], taskset: str) -> TaskData:
    """One function of the survey as a task."""
    path, name, expected = str(row["file"]), str(row["function"]), tuple(str(test) for test in _list(row["tests"]))
    tested = {test.partition("::")[0] for test in expected}
    workspace = {p: text for p, text in files.items() if not p.startswith(source.tests)}
    workspace[path] = with_body(files[path], name, GONE)
    for seen in sorted(p for p in files if p.startswith(source.tests)):
        hidden = [test.partition("::")[2] for test in expected if test.partition("::")[0] == seen]
        text = without_tests(files[seen], hidden) if hidden else files[seen]
        if text and seen not in tested:
            workspace[seen] = text
        elif text:
            workspace[str(Path(seen).with_name("seen_" + Path(seen).name))] = text
    instruction = (
        f"The function `{name}` in {path} of the library {source.name} has lost its body. Write it again, so that it does what its "
        f"docstring says and the library's tests pass. Change nothing else. When you are done, answer in one sentence."
    )
    return TaskData(
        taskset=taskset, key=f"{source.name}/{Path(path).stem}.{name}", instruction=instruction, files=workspace, editable=(path,),
        tests={p: files[p] for p in sorted(tested)}, expected=expected, gold={path: files[path]},
        hacks={hack: {path: with_body(files[path], name, body)} for hack, body in HACKS.items()},
    )  # fmt: skip


def tests_of(source: Source, files: Mapping[str, str]) -> list[str]:
    """The ids of all of a library's tests."""
    found: list[str] = []
    for path, text in sorted(files.items()):
        if path.startswith(source.tests) and Path(path).name.startswith("test_"):
            for node in _tree(text).body:
                inner = [(f"{node.name}::", member) for member in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
                named = [(owner, one) for owner, one in inner if isinstance(one, ast.FunctionDef) and one.name.startswith("test")]
                found += [f"{path}::{owner}{one.name}" for owner, one in named]
    return found


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return list(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


@lru_cache(maxsize=256)
def _tree(text: str) -> ast.Module:
    """Read, never changed: parsing is most of what loading takes."""
    return ast.parse(text)


def _function(text: str, name: str) -> ast.FunctionDef:
    return next(node for node in _tree(text).body if isinstance(node, ast.FunctionDef) and node.name == name)


def _body(node: ast.FunctionDef) -> list[ast.stmt]:
    """The statements after the docstring."""
    return node.body[1:] if ast.get_docstring(node) is not None else node.body
