"""Where the product reads what a line of a module or of a class sets: a test runs that line at import, and notices by these."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

AT_MOST = 80
"""Places of a name; one that is read in more is read by every test."""

Line = tuple[str, int]
"""A file, from the root of the tree, and a line of it."""


def readers_of(root: Path, file: str, line: int) -> tuple[bool, list[Line]]:
    """Whether a line runs at import, and if so the lines that read the constant, the field or the default that is set on it."""
    source = (root / file).read_text()
    for statement in _at_import(ast.parse(source).body):
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            match statement:
                case ast.FunctionDef() | ast.AsyncFunctionDef() if line >= statement.body[0].lineno > statement.lineno:
                    return False, []
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    return True, [(file, inside.lineno) for inside in ast.walk(statement) if isinstance(inside, ast.stmt)]
                case ast.Assign(targets=[ast.Name(name), *_]) | ast.AnnAssign(target=ast.Name(name)):
                    return True, list(_mentions(root, file, name, but=statement))
                case _:
                    return True, []
    return True, []


def _at_import(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module and of its classes."""
    for statement in statements:
        if isinstance(statement, ast.ClassDef):
            yield from _at_import(statement.body)
        else:
            yield statement


def _mentions(root: Path, file: str, name: str, *, but: ast.stmt) -> Iterator[Line]:
    word = re.compile(rf"\b{re.escape(name)}\b")
    own = range(but.lineno, (but.end_lineno or but.lineno) + 1)
    others = [] if name.startswith("_") else sorted(path for part in ("app", "pipelines") for path in (root / part).rglob("*.py"))
    found = 0
    for path in dict.fromkeys([root / file, *others]):
        text = path.read_text()
        for number, line in enumerate(text.splitlines() if name in text else [], start=1):
            if word.search(line) and not (path == root / file and number in own) and found < AT_MOST:
                found += 1
                yield path.relative_to(root).as_posix(), number
