"""Which tests run a line, by what `make coverage` measured: those could notice a change of it, and no others could."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import coverage

from tests.bench.mutating.readers import Line

BUDGET_S = 45.0
"""Of tests for one mutant, by what they took when they were measured."""

STATEMENT = 12
"""Lines of a statement, at most: only some of them are said to have run."""


class Covered:
    """The data of `make coverage`; empty where it was never run."""

    def __init__(self, kept: Path) -> None:
        self._data = [_read(path) for path in sorted(kept.glob("*/all"))]
        self._seconds: dict[str, float] = {}
        self._known: dict[str, list[dict[int, list[str]]]] = {}
        for path in kept.glob("*/durations"):
            for line in path.read_text().splitlines():
                test, seconds = json.loads(line)
                self._seconds[test] = self._seconds.get(test, 0.0) + seconds

    def tests_of(self, *lines: Line, near: Sequence[str]) -> list[str]:
        """Tests that ran one of the lines (or the beginning of its statement), as far as the budget goes: those of `near` files first, then
        the quickest; without those that failed when they were measured and those on PostgreSQL."""
        contexts = {test for file, line in lines for test in self._contexts(file, line)}
        ran = {test for test in contexts if test in self._seconds and "[postgres" not in test}
        ordered = sorted(ran, key=lambda test: (test.partition("::")[0] not in near, self._seconds[test]))
        return list(self._within(ordered))

    def _within(self, ordered: Sequence[str]) -> Iterator[str]:
        left = BUDGET_S
        for test in ordered:
            if self._seconds[test] <= left:
                left -= self._seconds[test]
                yield test

    def _contexts(self, file: str, line: int) -> set[str]:
        found: set[str] = set()
        for lines in self._lines(file):
            ran = next((at for at in range(line, max(0, line - STATEMENT), -1) if lines.get(at)), None)
            found.update(lines[ran] if ran is not None else ())
        return found

    def _lines(self, file: str) -> list[dict[int, list[str]]]:
        """Who ran which line of a file, by each part that was measured."""
        if file not in self._known:
            self._known[file] = [
                data.contexts_by_lineno(place) for data in self._data for place in data.measured_files() if place.endswith(f"/{file}")
            ]
        return self._known[file]


def _read(path: Path) -> coverage.CoverageData:
    data = coverage.CoverageData(str(path))
    data.read()
    return data
