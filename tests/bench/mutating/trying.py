"""Runs tests in a copy of the tree, each time in a fresh fork of a process that has the large libraries loaded already.

A fork starts in milliseconds where a new interpreter takes seconds. Where the copy was told to `load`, the product is loaded before it too,
and what is changed is swapped in the fork; its file is changed as well, for the processes that tests start.
"""

import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.mutating.swapping import Loaded

PRELOADED = (
    "pytest", "numpy", "torch", "transformers", "sqlalchemy", "fastapi", "fastapi.testclient", "uvicorn", "httpx", "pyarrow.parquet",
    "kafka", "psycopg", "alembic.command", "sklearn.linear_model", "msgspec", "rich.table", "phonenumbers", "hypothesis",
)  # fmt: skip
COPIED = ("app", "pipelines", "tests", "migrations", "infra", "docs")
OPTIONS = (
    "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin", "-p", "pytest_timeout", "-W",
    "ignore::pytest.PytestAssertRewriteWarning", "-k", "not postgres",
)  # fmt: skip
"""Only the plugins that the tests use: the others take seconds to load. And SQLite alone: a server takes seconds to start, every time."""
PASSED = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one run of tests."""

    failed: str | None = None
    """The first failing test, `timeout`, or why the tests could not even be collected; None where all passed."""
    seconds: float


@dataclass
class Copy:
    """A tree that may be broken."""

    root: Path
    loaded: Loaded | None = None
    proven: set[str] = field(default_factory=set[str])
    """Tests that pass without a mutant."""

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
        """Import the product once, for all forks to come."""
        self.loaded = Loaded(self.root)

    def attempt(self, file: str, change: Callable[[str], str], tests: Sequence[str], *, limit_s: float) -> Outcome:
        """Run the tests with the file changed; a test counts as having noticed it when it passes without."""
        if not tests:
            return Outcome(seconds=0.0)
        path = self.root / file
        sound = path.read_text()
        path.write_text(change(sound))
        try:
            found = self.run(tests, limit_s=limit_s, changed=(path, sound))
        finally:
            path.write_text(sound)
        if found.failed is None or found.failed in self.proven:
            return found
        if found.failed == "timeout":
            return found
        named = found.failed.startswith("tests/")
        again = self.run([found.failed] if named else tests, limit_s=limit_s)
        if again.failed:
            return Outcome(failed=f"BROKEN without the mutant too: {again.failed}", seconds=found.seconds)
        self.proven |= {found.failed} if named else set()
        return found

    def call(self, module: str, function: str, arguments: Sequence[Any], *, limit_s: float) -> Any:
        """What a function of a module of the copy answers, as JSON. Raises `RuntimeError` where it raises or takes too long."""
        log = self.root / "call.log"
        child = os.fork()
        if child == 0:
            _call(self.root, module, function, arguments, log)
        if _wait(child, time.monotonic() + limit_s) != PASSED:
            raise RuntimeError(f"{module}.{function} did not end well: {log.read_text()[-3000:]}")
        return json.loads(log.read_text().splitlines()[-1])

    def run(self, tests: Sequence[str], *, limit_s: float, changed: tuple[Path, str] | None = None) -> Outcome:
        """Run tests until the first failure; `changed` is a file with its sound text, which is another one by now."""
        started = time.monotonic()
        log = self.root / "run.log"
        child = os.fork()
        if child == 0:
            _run_tests(self.root, tests, log, keeps=lambda: self._keeps(changed))
        status = _wait(child, started + limit_s)
        seconds = round(time.monotonic() - started, 1)
        if status is None:
            return Outcome(failed="timeout", seconds=seconds)
        if status == PASSED:
            return Outcome(seconds=seconds)
        text = log.read_text(errors="replace")
        told = [line for line in text.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
        names = [line.partition(" ")[2].partition(" - ")[0] for line in told]
        return Outcome(failed=names[0] if names else f"exit {status}: {text[-300:]}", seconds=seconds)

    def _keeps(self, changed: tuple[Path, str] | None) -> bool:
        """Whether the product that is loaded is the product as it is now."""
        if self.loaded is None or changed is None:
            return self.loaded is not None
        path, sound = changed
        name = ".".join(path.relative_to(self.root).with_suffix("").parts)
        return name not in sys.modules or self.loaded.swap(path, sound, path.read_text())


def preload() -> None:
    """Load what is large and not ours."""
    for name in PRELOADED:
        importlib.import_module(name)


def _run_tests(root: Path, tests: Sequence[str], log: Path, *, keeps: Callable[[], bool]) -> None:
    """In the fork: forget our own modules, run, and leave without cleaning up after the parent."""
    code = 3
    try:
        os.setsid()
        _write_to(log)
        _enter(root, keep_product=keeps())
        code = int(importlib.import_module("pytest").main([*OPTIONS, *tests]))
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _call(root: Path, module: str, function: str, arguments: Sequence[Any], log: Path) -> None:
    code = 3
    try:
        os.setsid()
        _write_to(log)
        _enter(root)
        sys.stdout.write("\n" + json.dumps(getattr(importlib.import_module(module), function)(*arguments)))
        code = PASSED
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        os._exit(code)


def _write_to(log: Path) -> None:
    """From here on everything that is printed goes there."""
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)


def _enter(root: Path, *, keep_product: bool = False) -> None:
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
        time.sleep(0.05)
    _kill_group(child)
    os.waitpid(child, 0)
    return None


def _kill_group(child: int) -> None:
    """What a broken test left running goes as well."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
