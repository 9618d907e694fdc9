"""What the architecture tests read: our own source files and the modules each of them imports, parsed, never executed."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

from app.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def python_files(*folders: str) -> list[Path]:
    """Every Python file below these folders of the checkout, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def imported_modules(path: Path) -> tuple[tuple[int, str], ...]:
    """Line number and dotted name of every import in a file, also of those inside functions and under TYPE_CHECKING."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


def within(path: Path, places: set[str]) -> bool:
    """Whether a file is one of these places of the checkout, or below one of them."""
    name = path.relative_to(ROOT).as_posix()
    return any(name == place or name.startswith(f"{place}/") for place in places)


def known_settings() -> set[str]:
    """The environment variables that are read: the fields of Settings, and those that a command or a stage names itself."""
    named = {name for path in python_files("app", "pipelines") for name in re.findall(r"RATCHET_[A-Z_]*[A-Z]\b", path.read_text())}
    return named | {f"RATCHET_{field.name.upper()}" for field in fields(Settings)}
