"""Which statements the fast tests run, by room: `make coverage` (`ARGS="--part 1/8"` for an eighth of the test files, `ARGS=--report`)

Unit, port and integration tests; left out are end-to-end, learning and architecture tests, tests of the benches, and what needs a server
of other make. What a test starts as a process of its own counts too, unless it is killed. Data, and which test ran which line, stay in
build/coverage, where `make bench-mutants` reads them. Ends with one JSON line; exit code 1 where a test failed or a room is below 95 %.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import coverage

from tests.bench.mutating.contexts import DURATIONS

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "coverage"
MEASURED = ("tests/unit", "tests/ports", "tests/integration")
BENCHES = ROOT / "tests" / "integration" / "bench"
"""Tests of benches: minutes each, and most of what they run of the product is a copy of it, which is not measured."""
ENOUGH = 0.95
SQLITE = ("-k", "not postgres")
"""Without the PostgreSQL half of the tests that run on both databases, as `make bench-mutants` goes about it."""
CONFIG = """[run]
source = app,pipelines
parallel = true
data_file = {folder}/data
sigterm = true
patch = subprocess, _exit, fork, execv
disable_warnings = no-data-collected,module-not-imported,module-not-measured,trace-changed,dynamic-conflict
[report]
exclude_also =
    if TYPE_CHECKING:
    ^\\s*\\.\\.\\.$
    @overload
"""


def main() -> int:
    """Run what is asked for, then count what is there."""
    parser = argparse.ArgumentParser(description="Statements that the fast tests run, by room.")
    parser.add_argument("--part", help="one part of the test files only, such as 1/8, and no count")
    parser.add_argument("--sqlite", action="store_true", help="leave out what asks for PostgreSQL: sooner, and a lower bound")
    parser.add_argument("--report", action="store_true", help="run nothing, count what earlier runs left")
    parser.add_argument("--missing", metavar="PREFIX", help="print lines that nothing runs, of files that begin so")
    options = parser.parse_args()
    codes = [0] if options.report else [_measure(options.part or "1/1", [*SQLITE] if options.sqlite else [])]
    if options.part:
        return max(codes)
    counts = _counts(options.missing)
    rooms = by_room(counts)
    print("| room | statements | run | share |\n|---|---|---|---|")
    for room, (run, there) in rooms.items():
        print(f"| {room} | {there} | {run} | {run / there:.1%} |")
    low = {file: round(run / there, 3) for file, (run, there) in counts.items() if there and run < 0.8 * there}
    print(
        json.dumps({"share": _share(rooms), "by_room": {room: round(run / there, 3) for room, (run, there) in rooms.items()}, "low": low})
    )
    return max(codes) or int(any(run < ENOUGH * there for run, there in rooms.values()))


def _measure(part: str, chosen: Sequence[str]) -> int:
    """Run a part of the test files under coverage, those of their tests that are `chosen`; the exit code of pytest."""
    number, parts = map(int, part.split("/"))
    folder = KEPT / part.replace("/", "-of-")
    shutil.rmtree(folder if parts > 1 else KEPT, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "rc").write_text(CONFIG.format(folder=folder))
    files = sorted(
        path.relative_to(ROOT).as_posix() for place in MEASURED for path in (ROOT / place).rglob("test_*.py") if path.parent != BENCHES
    )
    command = ["-m", "coverage", "run", f"--rcfile={folder / 'rc'}", "-m", "pytest", "-q", "-p", "tests.bench.mutating.contexts"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), DURATIONS: str(folder / "durations")}
    ran = subprocess.run([sys.executable, *command, *chosen, *files[number - 1 :: parts]], cwd=ROOT, env=environment, check=False)
    merged = coverage.CoverageData(str(folder / "all"))
    for path in sorted(folder.glob("data.*")):
        other = coverage.CoverageData(str(path))
        other.read()
        merged.update(other)
        path.unlink()
    merged.write()
    return ran.returncode


def _counts(missing: str | None) -> dict[str, tuple[int, int]]:
    """Statements that ran, and all, of each file."""
    measured = coverage.Coverage(data_file=str(KEPT / "everything"), config_file=str(next(KEPT.glob("*/rc"))))
    measured.erase()
    measured.combine([str(path) for path in KEPT.glob("*/all")], keep=True)
    found: dict[str, tuple[int, int]] = {}
    for place in ("app", "pipelines"):
        for path in sorted((ROOT / place).rglob("*.py")):
            _, statements, _, absent, text = measured.analysis2(str(path))
            file = path.relative_to(ROOT).as_posix()
            found[file] = (len(statements) - len(absent), len(statements))
            if absent and missing is not None and file.startswith(missing):
                print(f"# {file} {found[file][0]}/{found[file][1]}: {text}")
    return found


def by_room(counts: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Files of a room together; those beside the rooms belong to `app` and `pipelines`."""
    rooms: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for file, pair in counts.items():
        parts = file.split("/")
        rooms["/".join(parts[:2]) if len(parts) > 2 else parts[0]].append(pair)
    return {room: (sum(run for run, _ in pairs), sum(there for _, there in pairs)) for room, pairs in sorted(rooms.items())}


def _share(rooms: Mapping[str, tuple[int, int]]) -> float:
    return round(sum(run for run, _ in rooms.values()) / sum(there for _, there in rooms.values()), 4)


if __name__ == "__main__":
    sys.exit(main())
