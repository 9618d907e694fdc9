"""Which tests run a line, by what `make coverage` measured: those could notice a change of it, and no others could."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import coverage

BUDGET_S = 45.0
"""Of tests for one mutant, by what they took when they were measured."""

STATEMENT = 12
"""Lines of a statement, at most: only some of them are said to have run."""


class Covered:
    """The data of `make coverage`; empty where it was never run."""

    def __init__(self, kept: Path) -> None:
        self._data = [_read(path) for path in sorted(kept.glob("*/all"))]
        self._seconds: dict[str, float] = {}
        for path in kept.glob("*/durations"):
            for line in path.read_text().splitlines():
                test, seconds = json.loads(line)
                self._seconds[test] = self._seconds.get(test, 0.0) + seconds

    def tests_of(self, file: str, line: int, *, near: Sequence[str]) -> list[str]:
        """Tests that ran the line (or the beginning of its statement), as far as the budget goes: those in the files that are `near` first,
        then the quickest; without those that failed when they were measured and those on PostgreSQL."""
        ran = {test for test in self._contexts(file, line) if test in self._seconds and "[postgres" not in test}
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
        for data in self._data:
            for measured in data.measured_files():
                if measured.endswith(f"/{file}"):
                    lines = data.contexts_by_lineno(measured)
                    ran = next((at for at in range(line, max(0, line - STATEMENT), -1) if lines.get(at)), None)
                    found.update(lines[ran] if ran is not None else ())
        return found


def _read(path: Path) -> coverage.CoverageData:
    data = coverage.CoverageData(str(path))
    data.read()
    return data
