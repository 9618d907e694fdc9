"""`make bench-mutations`: V10 of the gates sheet. Break the gates on purpose; at least one test must turn red each time.

Works on a copy in a temporary folder. A mutation whose text is no longer in the source is an error, not a pass. Exit
status 1 if a mutation survives, or if the untouched copy is not green (then red proves nothing).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

STATISTICS = "pipelines/evaluation/statistics"
TESTS = "tests/unit/pipelines/evaluation"


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One planted mistake."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """The tests that have to notice, as files; naming them keeps the check quick."""


MUTATIONS = (
    Mutation(
        name="flip the sign",
        file=f"{STATISTICS}/units.py",
        old="np.where(units.treated, 1.0 / pi, -1.0 / (1.0 - pi))",
        new="np.where(units.treated, -1.0 / pi, 1.0 / (1.0 - pi))",
        tests=(f"{TESTS}/statistics/test_units.py", f"{TESTS}/statistics/test_betting.py"),
    ),
    Mutation(
        name="drop 1/pi",
        file=f"{STATISTICS}/units.py",
        old="np.where(units.treated, 1.0 / pi, -1.0 / (1.0 - pi))",
        new="np.where(units.treated, 1.0, -1.0)",
        tests=(f"{TESTS}/statistics/test_units.py", f"{TESTS}/statistics/test_betting.py"),
    ),
    Mutation(
        name="Wald variance",
        file=f"{STATISTICS}/group_sequential.py",
        old="    spread = rate_t * (1.0 - rate_t) / nt + rate_c * (1.0 - rate_c) / nc\n",
        new="    rate_t, rate_c = totals.sum_treated / nt, totals.sum_control / nc\n"
        "    spread = rate_t * (1.0 - rate_t) / nt + rate_c * (1.0 - rate_c) / nc\n",
        tests=(f"{TESTS}/statistics/test_group_sequential.py",),
    ),
    Mutation(
        name="sessions instead of units",
        file=f"{STATISTICS}/units.py",
        old="    closing = np.full(len(first), np.iinfo(np.int64).min)\n",
        new="    first = inverse = np.arange(n)\n    closing = np.full(len(first), np.iinfo(np.int64).min)\n",
        tests=(f"{TESTS}/statistics/test_units.py", f"{TESTS}/statistics/test_betting.py"),
    ),
    Mutation(
        name="ship on timeout",
        file="pipelines/evaluation/live/decide.py",
        old='            return act.INCONCLUSIVE, "deadline",',
        new='            return act.READY, "deadline",',
        tests=(f"{TESTS}/test_deadline.py",),
    ),
)


def main() -> int:
    """Run the untouched copy, then each mutation; print a table and one line of JSON."""
    with tempfile.TemporaryDirectory(prefix="ratchet-mutations-") as folder:
        copy = Path(folder)
        _copy(copy)
        everything = sorted({test for mutation in MUTATIONS for test in mutation.tests})
        if (failed := _failures(copy, everything)) != []:
            print("the untouched copy is not green:", *failed, sep="\n  ")
            return 1
        killers = {mutation.name: _killed_by(copy, mutation) for mutation in MUTATIONS}
    print("| mutation | tests that turned red |\n|---|---|")
    for name, tests in killers.items():
        print(f"| {name} | {len(tests)}: {', '.join(tests[:3]) or 'NONE, it survived'} |")
    print(json.dumps({"mutations": len(killers), "killed": sum(bool(tests) for tests in killers.values())}))
    return 0 if all(killers.values()) else 1


def _copy(target: Path) -> None:
    for part in ("app", "pipelines", "tests"):
        shutil.copytree(part, target / part, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    shutil.copy("pyproject.toml", target)


def _killed_by(copy: Path, mutation: Mutation) -> list[str]:
    """Names of the tests that fail under the mutation; the copy is put right afterwards."""
    source = copy / mutation.file
    original = source.read_text()
    if original.count(mutation.old) != 1:
        raise ValueError(f"mutation {mutation.name!r} no longer fits {mutation.file}; write it for the new text")
    source.write_text(original.replace(mutation.old, mutation.new))
    try:
        return _failures(copy, mutation.tests)
    finally:
        source.write_text(original)


def _failures(copy: Path, tests: list[str] | tuple[str, ...]) -> list[str]:
    """Run pytest in the copy; names of failed tests, or what went wrong if it could not even collect."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run in the copy:\n{done.stdout}{done.stderr}")
    return re.findall(r"^FAILED \S+::(\w+)", done.stdout, flags=re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
