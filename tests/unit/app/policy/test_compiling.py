"""What becomes of compiled loops: kept for other processes where that can be, made anew where what was kept is damaged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOPS = """
from app.policy.compiling import compiled

@compiled
def squared(number):
    return number * number

@compiled
def product(number):
    product = 1
    for factor in range(1, number + 1):
        product *= factor
    return product

@compiled
def squares(number):
    total = 0
    for each in range(1, number + 1):
        total += squared(each)
    return total
"""
PROGRAM = """
import resource, sys
import loops
from app.policy.compiling import prepared
assert "numba" not in sys.modules  # what only knows of loops goes without
if sys.argv[1] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file takes a byte
both = (loops.product, loops.squares)
for loop in both:
    prepared(loop, 4)
assert [loop(4) for loop in both] == [24, 30]
print(*(len(loop.dispatcher.signatures) for loop in both), *(sum(loop.dispatcher.stats.cache_hits.values()) for loop in both))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The folder of a program with small loops of its own: to compile those of the codec takes five seconds each time."""
    (tmp_path / "loops.py").write_text(LOOPS)
    return tmp_path


def prepared_elsewhere(program: Path, disk: str, **environment: str) -> list[int]:
    """Kinds of numbers that a new process has each of the two loops for, and how many of them it found."""
    command = [sys.executable, "-c", PROGRAM, disk]
    known = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    paths = {"PYTHONPATH": f"{Path.cwd()}{os.pathsep}{program}"}
    ran = subprocess.run(command, env=known | environment | paths, capture_output=True, text=True, timeout=120, check=True)
    return [int(number) for number in ran.stdout.split()]


def test_where_nothing_can_be_kept_loops_are_compiled_for_one_process(program: Path) -> None:
    """Numba refuses to keep what it compiled where it finds no folder for it, and we go on without."""
    assert prepared_elsewhere(program, "fine", NUMBA_CACHE_LOCATOR_CLASSES="UserProvidedCacheLocator") == [1, 1, 0, 0]


def test_what_was_kept_is_found_again_and_made_anew_where_it_is_damaged(program: Path) -> None:
    """A file that ends early is what a machine leaves that lost its power; and a full disk is no reason not to change weights."""
    folder = str(program / "kept")
    assert prepared_elsewhere(program, "full", NUMBA_CACHE_DIR=folder) == [1, 1, 0, 0]
    assert prepared_elsewhere(program, "fine", NUMBA_CACHE_DIR=folder) == [1, 1, 0, 0]
    kept = sorted(program.rglob("*.nb?"))
    assert [file.suffix for file in kept] == 3 * [".nbc", ".nbi"], "of each loop, and of what one of them calls"
    for file in kept:
        if file.suffix == (".nbc" if "squares" in file.name else ".nbi"):
            os.truncate(file, file.stat().st_size // 2)
    assert prepared_elsewhere(program, "fine", NUMBA_CACHE_DIR=folder)[:2] == [1, 1]
    assert prepared_elsewhere(program, "fine", NUMBA_CACHE_DIR=folder) == [1, 1, 1, 1]


def test_what_was_kept_of_other_sources_is_not_found(program: Path) -> None:
    """Their bytes count, not their age: a checkout of the same is as good, and one that keeps its time is not."""
    folder, loops = str(program / "kept"), program / "loops.py"
    assert prepared_elsewhere(program, "fine", NUMBA_CACHE_DIR=folder) == [1, 1, 0, 0]
    written = loops.stat()
    os.utime(loops, ns=(written.st_atime_ns + 10**10, written.st_mtime_ns + 10**10))
    assert prepared_elsewhere(program, "fine", NUMBA_CACHE_DIR=folder) == [1, 1, 1, 1]
    loops.write_text(LOOPS.replace("return number * number", "return number ** 2  "))
    os.utime(loops, ns=(written.st_atime_ns, written.st_mtime_ns))
    assert prepared_elsewhere(program, "fine", NUMBA_CACHE_DIR=folder) == [1, 1, 0, 0]
