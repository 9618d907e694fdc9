"""Which tests could notice a change of a module: those that import it, the nearest first, and those that run the command it is."""

import ast
from collections import deque
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

LEFT_OUT = ("tests/e2e/", "tests/learning/", "tests/bench/", "tests/architecture/")
"""Minutes each, or about the text of the sources."""
FAR = 4
"""Imports away; what is further off imports nearly everything."""


class Reach:
    """The import graph of a tree."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @cached_property
    def _files(self) -> dict[str, Path]:
        paths = [path for part in ("app", "pipelines", "tests") for path in (self._root / part).rglob("*.py")]
        return {_module(path.relative_to(self._root)): path for path in paths}

    @cached_property
    def _importers(self) -> dict[str, set[str]]:
        """Who imports a module, by its name."""
        found: dict[str, set[str]] = {}
        for name, path in self._files.items():
            for imported in _imports(path.read_text(), self._files.keys()):
                found.setdefault(imported, set()).add(name)
        return found

    def tests_of(self, file: str, *, at_most: int) -> list[str]:
        """Test files that reach the module, nearest first."""
        distance = self._distances(_module(Path(file)))
        near = [(far, self._place(name)) for name, far in distance.items() if name.rpartition(".")[2].startswith("test_")]
        command = Path(file).stem
        if file.startswith("pipelines/commands/"):
            near += [
                (0, place)
                for name, path in self._files.items()
                if f'"{command}"' in path.read_text() and _is_test(place := self._place(name))
            ]
        stem = Path(file).stem.rstrip("s")
        ordered = sorted({place for _, place in near if _is_test(place)}, key=lambda place: self._rank(place, near, stem))
        return ordered[:at_most]

    def _rank(self, place: str, near: Iterable[tuple[int, str]], stem: str) -> tuple[int, bool, str]:
        far = min(distance for distance, other in near if other == place)
        return (far - (1 if stem in place else 0), place.startswith("tests/integration"), place)

    def _place(self, name: str) -> str:
        return self._files[name].relative_to(self._root).as_posix()

    def _distances(self, module: str) -> dict[str, int]:
        """Imports between the module and everything that reaches it."""
        found, waiting = {module: 0}, deque([module])
        while waiting:
            name = waiting.popleft()
            if found[name] == FAR:
                continue
            for importer in self._importers.get(name, set()) - found.keys():
                found[importer] = found[name] + 1
                waiting.append(importer)
        return found


def _is_test(place: str) -> bool:
    return place.rpartition("/")[2].startswith("test_") and not place.startswith(LEFT_OUT)


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(source: str, known: Iterable[str]) -> set[str]:
    """Modules of the tree that this one imports, wherever in its text."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & set(known)
