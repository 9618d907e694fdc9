"""The program that runs, in a box, the tests that a model may see."""

import subprocess
import sys
from pathlib import Path

from pipelines.rollouts.harness import RUNNER

TESTS = """
def test_right():
    assert __name__ == "test_it"

def test_wrong():
    assert 1 + 1 == 3
"""


def test_it_names_what_failed_and_counts_the_rest(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "test_it.py").write_text(TESTS)
    (tmp_path / "test_more.py").write_text("import a_package_that_nobody_has\n")
    done = subprocess.run([sys.executable, "-I", "-S", "-B", RUNNER], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    failed, *_, counted = done.stdout.splitlines()
    assert (done.returncode, failed) == (1, "./pkg/test_it.py::test_wrong")
    assert counted == "1 passed, 1 failed, 1 files want packages that are not here"
