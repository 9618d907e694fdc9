"""The program that runs, in a box, the tests that a model may see."""

import subprocess
import sys
from pathlib import Path

from pipelines.rollouts.boxed import seen_tests
from pipelines.rollouts.harness import RUNNER

assert Path(seen_tests.__file__) == RUNNER, "what is laid into a box is the program that is asked here"

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


def ran(folder: Path) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, "-I", "-S", "-B", RUNNER], cwd=folder, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.splitlines()


def test_all_that_may_be_seen_is_run_in_order_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "lib.py").write_text("VALUE = 7\n")
    (tmp_path / "json.py").write_text("MINE = True\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    asks = "import json\nfrom lib import VALUE\ndef test_value():\n    assert VALUE == 7 and json.MINE\n"
    (tmp_path / "seen_test_it.py").write_text(asks + "def test_wants(fixture):\n    raise RuntimeError\ntest_number = 3\n")
    (tmp_path / "sub" / "test_b.py").write_text("def test_b():\n    raise OSError('b')\ndef test_a():\n    raise OSError('a')\n")
    for name in (".hidden/test_x.py", "test_x.txt", "it_test.py"):
        (tmp_path / name).write_text("raise SystemExit(9)\n")
    code, lines = ran(tmp_path)
    assert code == 1
    assert lines[-1] == "1 passed, 2 failed, 0 files want packages that are not here"
    assert [line for line in lines if line.startswith("./")] == ["./sub/test_b.py::test_a", "./sub/test_b.py::test_b"]
    assert lines.count("Traceback (most recent call last):") == 2
    assert [line for line in lines if "File" in line] == [
        '  File "./sub/test_b.py", line 4, in test_a',
        '  File "./sub/test_b.py", line 2, in test_b',
    ]


def test_where_nothing_failed_it_ends_with_0_and_two_files_that_want_a_package_are_counted(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"test_{name}.py").write_text("import a_package_that_nobody_has\n")
    (tmp_path / "test_c.py").write_text("def test_one():\n    pass\ndef test_two():\n    pass\n")
    assert ran(tmp_path) == (0, ["", "2 passed, 0 failed, 2 files want packages that are not here"])
