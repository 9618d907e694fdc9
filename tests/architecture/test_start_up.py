"""What starting costs: the command answers at once, and the API does not carry the trainer's libraries."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipelines.__main__ import COMMANDS
from pipelines.__main__ import ratchet as command_line
from tests.architecture.sources import ROOT

HELP_BUDGET_S = 0.5


def test_help_answers_within_half_a_second() -> None:
    """The best of five runs, in processor time, which is what an idle machine takes: other tests have the cores meanwhile."""
    ratchet = Path(sys.executable).with_name("ratchet")
    taken_s: list[float] = []
    for _ in range(5):
        before = processor_time_of_children_s()
        output = subprocess.run([ratchet, "--help"], capture_output=True, text=True, check=True).stdout
        taken_s.append(processor_time_of_children_s() - before)
        assert "demo" in output
    assert 0 < min(taken_s) < HELP_BUDGET_S


def processor_time_of_children_s() -> float:
    """User and system time of every child process that has ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("library", ["ray", "mlflow"])
def test_importing_the_api_does_not_import(library: str) -> None:
    code = f"import sys, app.main; sys.exit({library!r} in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr or f"app.main imports {library}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_subcommand_explains_itself(command: str) -> None:
    result = CliRunner().invoke(command_line, [command, "--help"])
    assert result.exit_code == 0, result.exception
    assert result.output.startswith("Usage: ")
