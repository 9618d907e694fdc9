"""Where the product reads what a line of a module or of a class sets: a test runs that line at import, and notices by these."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

AT_MOST = 80
"""Places of a name; one that is read in more is read by every test."""

Line = tuple[str, int]
"""A file, from the root of the tree, and a line of it."""


def readers_of(root: Path, file: str, line: int, *, later: bool = True) -> tuple[bool, list[Line]]:
    """Whether a line runs at import, and if so the lines that read the constant, the field or the default that is set on it; `later` too
    those that read what another line made of it at import: a default of a function, a field or a constant."""
    match statement := _statement(root / file, line):
        case ast.FunctionDef() | ast.AsyncFunctionDef() if line >= statement.body[0].lineno > statement.lineno:
            return False, []
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return True, [(file, inside.lineno) for part in statement.body for inside in ast.walk(part) if isinstance(inside, ast.stmt)]
        case _:
            name = _set_by(statement)
            mentions = [] if statement is None or name is None else list(_mentions(root, file, name, but=statement))
            made = [made for mention in mentions for made in readers_of(root, *mention, later=False)[1]] if later else []
            return True, list(dict.fromkeys([*mentions, *made]))


def named_in_tests(root: Path, file: str, line: int) -> list[str]:
    """Tests (file::function) in whose text the constant or the field stands that a line sets: they may read it past any line of the
    product. The whole file where the name stands in it and in none of its tests; none where it is a common word."""
    if (name := _set_by(_statement(root / file, line))) is None:
        return []
    word = _word(name)
    found: list[str] = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        text, place = path.read_text(), path.relative_to(root).as_posix()
        if name in text and word.search(text):
            tests = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            said = [f"{place}::{test.name}" for test in tests if test.name.startswith("test_") and word.search(_text(text, test))]
            found += said or [place]
    return found if len(found) <= AT_MOST else []


def _text(source: str, test: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Of a function, its decorators included."""
    first = min([test.lineno, *(decorator.lineno for decorator in test.decorator_list)])
    return "\n".join(source.splitlines()[first - 1 : test.end_lineno])


def _statement(path: Path, line: int) -> ast.stmt | None:
    """The one of the module or of its classes that the line is of."""
    statements = _at_import(ast.parse(path.read_text()).body)
    return next((found for found in statements if found.lineno <= line <= (found.end_lineno or found.lineno)), None)


def _set_by(statement: ast.stmt | None) -> str | None:
    """The constant or the field that a statement sets."""
    match statement:
        case ast.Assign(targets=[ast.Name(name), *_]) | ast.AnnAssign(target=ast.Name(name)):
            return name
        case _:
            return None


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"\b{re.escape(name)}\b")


def _at_import(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module and of its classes."""
    for statement in statements:
        if isinstance(statement, ast.ClassDef):
            yield from _at_import(statement.body)
        else:
            yield statement


def _mentions(root: Path, file: str, name: str, *, but: ast.stmt) -> Iterator[Line]:
    word = _word(name)
    own = range(but.lineno, (but.end_lineno or but.lineno) + 1)
    others = [] if name.startswith("_") else sorted(path for part in ("app", "pipelines") for path in (root / part).rglob("*.py"))
    found = 0
    for path in dict.fromkeys([root / file, *others]):
        text = path.read_text()
        for number, line in enumerate(text.splitlines() if name in text else [], start=1):
            if word.search(line) and not (path == root / file and number in own) and found < AT_MOST:
                found += 1
                yield path.relative_to(root).as_posix(), number
