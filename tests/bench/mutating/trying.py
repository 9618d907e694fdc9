"""Tries a change of the product in a copy of the tree: which of the tests that it is asked notices it.

Each run is a fork of a process that has the large libraries loaded already. Where the copy was told to `load`, the product is loaded before
it too, and what is changed is swapped in the fork; its file is changed as well, for the processes that tests start.

    asked in rounds          the first is short, because most changes are noticed by the first few tests
    a test fails             it is asked once more without the change, where it has to pass, and once more with it, where it has to fail
    it fails without, too    it is unfit and asked no more; the tests that were not asked yet go on
    a test hangs             it fails at its limit, which is ten times what it takes, and is believed as any other that fails
    the time is up           nothing is decided, which is said and counts as survived
"""

import importlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import cache_from_source
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.bench.mutating.forks import OPTIONS, Told, call, enter, forked, run_tests
from tests.bench.mutating.swapping import Loaded

PRELOADED = (
    "pytest", "numpy", "torch", "transformers", "sqlalchemy", "fastapi", "fastapi.testclient", "uvicorn", "httpx", "pyarrow.parquet",
    "kafka", "psycopg", "alembic.command", "sklearn.linear_model", "msgspec", "rich.table", "phonenumbers", "hypothesis",
)  # fmt: skip
COPIED = ("app", "pipelines", "tests", "migrations", "infra", "docs")
LEFT_UNREAD = ("--ignore=tests/e2e", "--ignore=tests/learning", "--ignore=tests/real")
ROUND_S = (6.0, 30.0, 60.0)
"""Of tests in one run, by what they took when they were measured; the last goes on until all were asked."""
FILE_S = 0.4
"""To read a test file."""
SLOWER = 10.0
"""Times what a test took when it was measured: then it hangs."""
UNKNOWN_S = 60.0
"""The limit of a test that was never measured."""
START_S = 60.0
"""To start and to read files, at most."""
ALONE_S = 600.0
"""A single test without a change, at most."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a change."""

    failed: str | None = None
    """The test that noticed it."""
    undecided: str | None = None
    """Why nothing is known, where no test noticed it and not all could be asked."""
    seconds: float


@dataclass
class Copy:
    """A tree that may be broken."""

    root: Path
    loaded: Loaded | None = None
    least_s: float = 20.0
    """No test hangs sooner: a machine with other work stops for seconds."""
    proven: dict[str, float] = field(default_factory=dict[str, float])
    """Tests that pass without a change, and what they took."""
    unfit: set[str] = field(default_factory=set[str])
    """Tests that fail without one, here and now."""

    def fill(self, source: Path) -> None:
        """Copy what tests need."""
        for part in COPIED:
            shutil.copytree(source / part, self.root / part, ignore=shutil.ignore_patterns("__pycache__"))
        for path in source.iterdir():
            if path.is_file() and not path.name.startswith("."):
                shutil.copy(path, self.root)
        for name in (".venv", ".cache"):
            (self.root / name).symlink_to((source / name).resolve())

    def load(self) -> None:
        """Import the product once, for all forks to come, and let pytest write down how it reads the test files."""
        self.loaded = Loaded(self.root)

        def read() -> int:
            enter(self.root, keep_product=True)
            sys.dont_write_bytecode = False
            return int(importlib.import_module("pytest").main([*OPTIONS, "--collect-only", *LEFT_UNREAD, "tests"]))

        forked(read, self.root / "read.log", until=time.monotonic() + ALONE_S)

    def call(self, module: str, function: str, arguments: Sequence[Any], *, limit_s: float) -> Any:
        """What a function of a module of the copy answers, as JSON. Raises `RuntimeError` where it raises or takes too long."""
        return call(self.root, module, function, arguments, limit_s=limit_s)

    def attempt(
        self, file: str, change: Callable[[str], str], tests: Sequence[str], *, limit_s: float,
        lasting: Mapping[str, float] = MappingProxyType({}),
    ) -> Outcome:  # fmt: skip
        """Ask the tests, in this order, about the file as it is changed; `lasting`: what they took when they were measured."""
        started = time.monotonic()
        trial = _Trial(self, self.root / file, change, lasting, until=started + limit_s)
        failed, undecided = trial.ask(tests)
        return Outcome(failed=failed, undecided=undecided, seconds=round(time.monotonic() - started, 1))

    def keeps(self, changed: tuple[Path, str] | None) -> bool:
        """Whether the product that is loaded is the product as it is now."""
        if self.loaded is None or changed is None:
            return self.loaded is not None
        path, sound = changed
        name = ".".join(path.relative_to(self.root).with_suffix("").parts)
        return name not in sys.modules or self.loaded.swap(path, sound, path.read_text())


class _Trial:
    """One change on its way through the tests."""

    def __init__(self, copy: Copy, path: Path, change: Callable[[str], str], lasting: Mapping[str, float], *, until: float) -> None:
        self._copy, self._path, self._lasting, self._until = copy, path, lasting, until
        self._sound = path.read_text()
        self._changed = change(self._sound)
        self._disbelieved = set[str]()
        """Tests that failed and would have without the change, or did not fail again."""

    def ask(self, tests: Sequence[str]) -> tuple[str | None, str | None]:
        """The test that noticed, or why it is not known whether one would."""
        for chosen in _rounds(tests, self._lasting):
            left = list(self._askable(chosen))
            while left:
                if time.monotonic() > self._until:
                    return None, f"the time is up; {len(left)} tests of this round were not asked"
                told = self._run(left, with_it=True)
                if told.is_good:
                    break
                suspect = told.suspect or left[0]  # nothing began at all: not even pytest's own files can be read with it
                if self._is_believed(suspect):
                    return suspect, None
                self._disbelieved.add(suspect)
                left = [test for test in self._askable(left) if test not in told.passed]
        return None, None

    def _askable(self, tests: Sequence[str]) -> Iterator[str]:
        never = self._copy.unfit | self._disbelieved
        return (test for test in tests if test not in never and test.partition("::")[0] not in never)

    def _is_believed(self, test: str) -> bool:
        """Whether the test passes without the change, and fails with it once more where its limit follows from how long it just took."""
        if test not in self._copy.proven:
            alone = self._run([test], with_it=False)
            if not alone.is_good:
                self._copy.unfit.add(test)
                return False
            self._copy.proven[test] = alone.seconds
        return not self._run([test], with_it=True).is_good

    def _run(self, tests: Sequence[str], *, with_it: bool) -> Told:
        limits_s = {test: self._limit_s(test) for test in tests}
        limit_s = START_S + (sum(limits_s.values()) if len(tests) == 1 else 3 * sum(self._lasting.get(test, 10.0) for test in tests))
        self._put(self._changed if with_it else self._sound)
        changed = (self._path, self._sound) if with_it else None
        try:
            return run_tests(
                self._copy.root, tests, but=(self._copy.unfit | self._disbelieved) - {*tests}, limit_s=min(limit_s, ALONE_S),
                limits_s=limits_s, otherwise_s=UNKNOWN_S, keeps=lambda: self._copy.keeps(changed),
            )  # fmt: skip
        finally:
            self._put(self._sound)

    def _put(self, text: str) -> None:
        """The file says this from now on; bytecode of what it said before would count as of this, where second and length agree."""
        self._path.write_text(text)
        Path(cache_from_source(str(self._path))).unlink(missing_ok=True)

    def _limit_s(self, test: str) -> float:
        known = max(self._lasting.get(test, 0.0), self._copy.proven.get(test, 0.0))
        return max(self._copy.least_s, SLOWER * known) if known else UNKNOWN_S


def _rounds(tests: Sequence[str], lasting: Mapping[str, float]) -> Iterator[list[str]]:
    """The tests in pieces, a short one first."""
    lengths = iter((*ROUND_S, *[ROUND_S[-1]] * len(tests)))
    chosen, files, left = list[str](), set[str](), next(lengths)
    for test in tests:
        file = test.partition("::")[0]
        cost = lasting.get(test, FILE_S) + FILE_S * (file not in files)
        if chosen and cost > left:
            yield chosen
            chosen, files, left = [], set(), next(lengths)
        chosen.append(test)
        files.add(file)
        left -= cost
    if chosen:
        yield chosen


def preload() -> None:
    """Load what is large and not ours."""
    for name in PRELOADED:
        importlib.import_module(name)
