"""Which tests could notice a change of a module: those that import it, the nearest first, and those that run the command it is."""

import ast
from collections import deque
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

LEFT_OUT = ("tests/e2e/", "tests/learning/", "tests/bench/", "tests/integration/bench/", "tests/architecture/")
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
        """Test files that reach the module: those that speak of what it defines first, then the nearest."""
        distance = self._distances(_module(Path(file)))
        near = {self._place(name): far for name, far in distance.items() if _is_test(self._place(name))}
        if file.startswith("pipelines/commands/"):
            words = {Path(file).stem, *_commands((self._root / file).read_text())}
            near |= {place: 0 for place, text in self._texts.items() if _is_test(place) and any(f'"{word}"' in text for word in words)}
        names = _defined((self._root / file).read_text())
        said = {place: sum(name in self._texts[place] for name in names) + (Path(file).stem.rstrip("s") in place) for place in near}
        return sorted(near, key=lambda place: (near[place] - min(3, said[place]), -said[place], place))[:at_most]

    @cached_property
    def _texts(self) -> dict[str, str]:
        return {self._place(name): path.read_text() for name, path in self._files.items()}

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


def _defined(source: str) -> set[str]:
    """Public names of a module, methods included; short ones are everywhere."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    return {node.name for node in nodes if not node.name.startswith("_") and len(node.name) > 4}


def _commands(source: str) -> set[str]:
    """Words of the terminal that a module defines: decorated functions by their names, or as the decorator says."""
    found: set[str] = set()
    for node in [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]:
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith((".command", ".group")):
                said = [argument.value for argument in decorator.args if isinstance(argument, ast.Constant)]
                found.add(str(said[0]) if said else node.name.replace("_", "-"))
    return found


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
