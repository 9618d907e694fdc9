"""Which tests run a line, by what `make coverage` measured: those could notice a change of it, and no others could."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import coverage

from tests.bench.mutating.readers import Line

BUDGET_S = 90.0
"""Of tests for one mutant, by what they took when they were measured."""
FILE_S = 0.3
"""To read a test file."""
SERVER_S = 6.0
"""To start PostgreSQL, for the tests of one file."""
FAR = 4.0
"""Times its length: how much later a test comes that is not near what is changed."""

STATEMENT = 12
"""Lines of a statement, at most: only some of them are said to have run."""


class Covered:
    """The data of `make coverage`; empty where it was never run."""

    def __init__(self, kept: Path) -> None:
        self._data = [_read(path) for path in sorted(kept.glob("*/all"))]
        self._seconds = defaultdict[str, float](float)
        self._known: dict[str, list[dict[int, list[str]]]] = {}
        for path in kept.glob("*/durations"):
            for line in path.read_text().splitlines():
                test, seconds = json.loads(line)
                self._seconds[test] += seconds

    @property
    def seconds(self) -> Mapping[str, float]:
        """What each test took, with what it had to set up."""
        return self._seconds

    def tests_of(self, *lines: Line, near: Sequence[str]) -> list[str]:
        """Tests that ran one of the lines (or the beginning of its statement), as far as the budget goes: the quickest first, those of
        `near` files sooner; without those that failed when they were measured, and on PostgreSQL only what does not run on SQLite too."""
        return self._within({test for file, line in lines for test in self._contexts(file, line)}, near)

    def tests_in(self, files: Sequence[str]) -> list[str]:
        """Tests of these files, as far as the budget goes, the quickest first; a file itself where none of it was measured."""
        wanted = set(files)
        measured = [test for test in self._seconds if test.partition("::")[0] in wanted]
        return self._within(measured, near=files) + sorted(wanted - {test.partition("::")[0] for test in measured}, key=files.index)

    def tests_named(self, names: Sequence[str]) -> list[str]:
        """Tests of these names (file, or file::function with whatever parameters), as far as the budget goes, the quickest first."""
        wanted = set(names)
        return self._within((test for test in self._seconds if {test.partition("[")[0], test.partition("::")[0]} & wanted), near=())

    def _within(self, tests: Iterable[str], near: Sequence[str]) -> list[str]:
        ran = {test for test in tests if test in self._seconds}
        alone = [test for test in ran if test.replace("[postgres", "[sqlite") not in ran - {test}]
        ordered = sorted(alone, key=lambda test: (self._cost(test) * (1.0 if test.partition("::")[0] in near else FAR), test))
        return list(self._affordable(ordered))

    def _cost(self, test: str) -> float:
        return self._seconds[test] + FILE_S + SERVER_S * ("[postgres" in test)

    def _affordable(self, ordered: Sequence[str]) -> Iterator[str]:
        left, files = BUDGET_S, set[str]()
        for test in ordered:
            file = test.partition("::")[0]
            cost = self._cost(test) - FILE_S * (file in files)
            if cost <= left:
                left -= cost
                files.add(file)
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
