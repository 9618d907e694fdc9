"""A fresh fork of this process for each run of tests, in a tree of its own, and what it told before it ended, however it ended.

A fork starts in milliseconds where a new interpreter takes seconds.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

OPTIONS = (
    "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin", "-p", "pytest_timeout", "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)  # fmt: skip
"""Only the plugins that the tests use: the others take seconds to load."""
SERVER = "postgres_server"
"""The fixture that takes seconds to start."""
PASSED = 0
NO_TESTS = 5


@dataclass(frozen=True, kw_only=True)
class Told:
    """What became of one run, up to its first failure."""

    passed: frozenset[str]
    """Tests that came to their end."""
    failed: str | None
    """The first test that did not; a file that could not be collected."""
    asked: str | None
    """The test that ran when the fork ended without a word."""
    code: int | None
    """The exit code; None where the time was up."""
    text: str
    """The end of what was printed."""
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether everything ran and passed."""
        return self.code in (PASSED, NO_TESTS) and self.failed is None and self.asked is None

    @property
    def suspect(self) -> str | None:
        """The test by which it ended."""
        return None if self.is_good else self.failed or self.asked


class Limits:
    """A plugin of pytest: gives each test its time, and writes down what happens as it happens."""

    def __init__(self, log: Path, limits_s: Mapping[str, float], otherwise_s: float) -> None:
        self._log, self._limits_s, self._otherwise_s = log, limits_s, otherwise_s

    def _tell(self, *words: str) -> None:
        with self._log.open("a") as file:
            file.write(json.dumps(words) + "\n")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """A test that hangs fails, whatever it says of its own time; a server of PostgreSQL is started for a test that was named alone."""
        items[:] = [item for item in items if item.nodeid in self._limits_s or SERVER not in getattr(item, "fixturenames", ())]
        for item in items:
            item.add_marker(pytest.mark.timeout(self._limits_s.get(item.nodeid, self._otherwise_s)), append=False)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read."""
        if report.failed:
            self._tell("failed", report.nodeid.partition("::")[0])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """It begins."""
        self._tell("began", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of it is over; the last one is its end."""
        if report.failed:
            self._tell("failed", report.nodeid)
        elif report.when == "teardown":
            self._tell("passed", report.nodeid)


def run_tests(
    root: Path, tests: Sequence[str], *, but: Iterable[str], limit_s: float, limits_s: Mapping[str, float], otherwise_s: float,
    keeps: Callable[[], bool],
) -> Told:  # fmt: skip
    """Run tests, those of files but some, in a fork in the tree at `root`, until the first failure; `keeps` says there whether the product
    that is loaded is kept."""
    started, log, events = time.monotonic(), root / "run.log", root / "run.jsonl"
    events.unlink(missing_ok=True)
    plugin, left_out = Limits(events, limits_s, otherwise_s), [f"--deselect={test}" for test in but]

    def run() -> int:
        enter(root, keep_product=keeps())
        return int(importlib.import_module("pytest").main([*OPTIONS, *left_out, *tests], plugins=[plugin]))

    code = forked(run, log, until=started + limit_s)
    lines = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    ends = {test for word, test in lines if word != "began"}
    return Told(
        passed=frozenset(test for word, test in lines if word == "passed"),
        failed=next((test for word, test in lines if word == "failed"), None),
        asked=next((test for word, test in reversed(lines) if word == "began" and test not in ends), None),
        code=code, text=log.read_text(errors="replace")[-2000:], seconds=round(time.monotonic() - started, 1),
    )  # fmt: skip


def call(root: Path, module: str, function: str, arguments: Sequence[Any], *, limit_s: float) -> Any:
    """What a function of a module of the tree answers, as JSON. Raises `RuntimeError` where it raises or takes too long."""
    log = root / "call.log"

    def run() -> int:
        enter(root)
        sys.stdout.write("\n" + json.dumps(getattr(importlib.import_module(module), function)(*arguments)))
        return PASSED

    if forked(run, log, until=time.monotonic() + limit_s) != PASSED:
        raise RuntimeError(f"{module}.{function} did not end well: {log.read_text()[-3000:]}")
    return json.loads(log.read_text().splitlines()[-1])


def forked(run: Callable[[], int], log: Path, *, until: float) -> int | None:
    """The exit code of a fork that does this and leaves without cleaning up after its parent; None where it was killed as too late."""
    child = os.fork()
    if child:
        return _wait(child, until)
    code = 3
    try:
        os.setsid()
        _write_to(log)
        code = run()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _write_to(log: Path) -> None:
    """From here on everything that is printed goes there."""
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)


def enter(root: Path, *, keep_product: bool = False) -> None:
    """Work in that tree from here on, with none of our own modules loaded but, if so said, the product's."""
    os.chdir(root)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    sys.path[:] = [str(root), *(place for place in sys.path if "site-packages" in place or "lib/python" in place)]
    left = {"tests", "migrations"} | (set() if keep_product else {"app", "pipelines"})
    for name in [name for name in sys.modules if name.partition(".")[0] in left]:
        del sys.modules[name]


def _wait(child: int, deadline: float) -> int | None:
    """The exit code, or None where the time is up; then the fork and all it started are killed."""
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _kill_group(child)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    _kill_group(child)
    os.waitpid(child, 0)
    return None


def _kill_group(child: int) -> None:
    """What a broken test left running goes as well."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
