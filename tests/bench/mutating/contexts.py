"""A plugin of pytest (`-p tests.bench.mutating.contexts`): tells coverage which test runs, and writes down how long each took.

Fixtures count to the test that asks for them first, and so do processes that it starts or forks (by the configuration that they are given
to measure themselves by), where they live on into the next test as well.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

PROCESSES = "COVERAGE_PROCESS_CONFIG"
"""What coverage reads in a process that was started."""
DURATIONS = "COVERED_DURATIONS"
"""Names the file of JSON lines that durations are appended to."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What runs from here on runs for this test."""
    measuring = coverage.Coverage.current()
    if measuring is not None:
        measuring.switch_context(item.nodeid)
        measuring.config.context = item.nodeid
        os.environ[PROCESSES] = measuring.config.serialize()
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One line for each phase of a test that passed."""
    if report.passed:
        with Path(os.environ[DURATIONS]).open("a") as file:
            file.write(json.dumps([report.nodeid, round(report.duration, 3)]) + "\n")
