"""Change the product on one line at a time and see whether a test notices: `make bench-mutants` (`ARGS="--sample 300"`)

Every file has its turn before any has a second one; the order is decided by `--seed`. For each mutant those tests run that run its line, as
`make coverage` found (run it first: build/coverage), the nearest and the quickest first, until one fails; of a constant, a field or a
default, those in whose own text its name stands, those that run a line that reads it, and those that read all of them. Where they are few,
and without the data, the test files that import its module run, at most `--files` of them. A test that failed is believed if it passes
without the mutant and fails with it again; one that hangs fails at ten times what it takes. At most 90 measured seconds of tests a mutant,
and `--limit` by the clock: what nothing decided by then counts as survived and is told as undecided. Left out are end-to-end and learning
tests, tests of the benches and, where a test runs on both databases, the PostgreSQL half (a server takes seconds to start). So what is
printed is a lower bound of what the whole suite catches.

Who has read a survivor and found that it changes nothing anybody can see writes it down in tests/data/equivalent_mutants.txt, with the
reason. `--resume FILE` appends to a file of JSON lines and passes over what it holds; with `--again` it tries anew what survived there,
the last try counting, and with `--tests FILE…` asks only those that were written since. `--part 1/2` and `--part 2/2` share one file. Ends
with one JSON line, `by_room` being caught and all that is not equivalent of each; exit code 1 below 85 % caught of what is not equivalent.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.mutating.covering import Covered
from tests.bench.mutating.mutants import Mutant, apply, sample
from tests.bench.mutating.reach import Reach
from tests.bench.mutating.readers import named_in_tests, readers_of
from tests.bench.mutating.trying import Copy, Outcome, preload

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "coverage"
EQUIVALENT = ROOT / "tests" / "data" / "equivalent_mutants.txt"
CAUGHT_SHARE = 0.85
FEW = 3
AT_ONCE = {"": "tests/unit/pipelines/test_vetted_defaults.py", "app/db/tables.py": "tests/integration/database/test_migrations.py"}
"""By the beginning of a file's name, who reads all of its settings or columns, and runs no line that reads one of them."""


def main() -> int:
    """Try a sample and print what survived; the last line is JSON."""
    parser = argparse.ArgumentParser(description="Mutations of the product, and the tests that notice them.")
    parser.add_argument("--sample", type=int, default=300, help="mutants in all, those of --resume included")
    parser.add_argument("--room", help="of one room only, such as app/db")
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--files", type=int, default=12, help="test files a mutant, at most")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds a mutant, at most")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this long")
    parser.add_argument("--resume", type=Path, help="a file of JSON lines, appended to")
    parser.add_argument("--again", action="store_true", help="try anew what survived in the file of --resume")
    parser.add_argument("--tests", nargs="+", default=[], help="ask these alone: with --again, those that were written since")
    parser.add_argument("--part", default="1/1", help="every n-th mutant of the sample: 1/2 and 2/2 side by side")
    options = parser.parse_args()
    equivalent = equivalents(EQUIVALENT.read_text())
    known = _held(options.resume)
    if options.again:
        wanted = [_found_again(row) for row in known.values() if _kind(row, equivalent) == "survived"]
    else:
        drawn = zip(sample(ROOT, seed=options.seed, room=options.room), range(options.sample), strict=False)
        wanted = [mutant for mutant, _ in drawn if mutant.name not in known]
    part, parts = map(int, options.part.split("/"))
    known |= {row["name"]: row for row in _try(options, wanted[part - 1 :: parts])}
    tried = list((known | _held(options.resume)).values())
    found = summary(tried, equivalent)
    for row in tried:
        if _kind(row, equivalent) == "survived":
            print(f"# survived {row['file']}:{row['line']}: {row['before']} → {row['after']}", flush=True)
    print(json.dumps(found))
    return 0 if is_enough(found) else 1


def _held(resume: Path | None) -> dict[str, dict[str, Any]]:
    """What a file holds of each mutant, the last try of it, by its name."""
    rows = [json.loads(line) for line in resume.read_text().splitlines()] if resume and resume.exists() else []
    return {row["name"]: row for row in rows}


def _found_again(row: Mapping[str, Any]) -> Mutant:
    """The mutant of a row in today's source. Raises `ValueError` where its line is gone."""
    lines = [line.strip() for line in (ROOT / row["file"]).read_text().splitlines()]
    places = [number for number, line in enumerate(lines, start=1) if line == row["before"]]
    if not places:
        raise ValueError(f"{row['before']!r} is no longer in {row['file']}: take its row out of the file")
    line = min(places, key=lambda place: abs(place - row["line"]))
    return Mutant(file=row["file"], line=line, before=row["before"], after=row["after"])


def _try(options: argparse.Namespace, wanted: Iterable[Mutant]) -> list[dict[str, Any]]:
    until, rows = time.monotonic() + options.minutes * 60, list[dict[str, Any]]()
    preload()
    reach, covered = Reach(ROOT), Covered(KEPT)
    with tempfile.TemporaryDirectory(prefix="ratchet-mutants-") as folder:
        copy = Copy(Path(folder))
        copy.fill(ROOT)
        copy.load()
        for mutant in wanted:
            if time.monotonic() > until:
                break
            near = reach.tests_of(mutant.file, at_most=options.files)
            tests = list(options.tests) or _tests_of(mutant, covered, near)
            found = copy.attempt(mutant.file, partial(apply, mutant), tests, limit_s=options.limit, lasting=covered.seconds)
            rows.append(_row(mutant, found, len(tests)))
            print(f"# {found.failed or found.undecided or 'survived'} | {mutant.name} ({found.seconds} s)", flush=True)
            if options.resume:
                with options.resume.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    return rows


def _tests_of(mutant: Mutant, covered: Covered, near: Sequence[str]) -> list[str]:
    """Those that run its line; what runs at import, those that read what it sets, and those that read everything. Where they are few,
    whatever imports its module."""
    at_import, readers = readers_of(ROOT, mutant.file, mutant.line)
    tests = covered.tests_of(*(readers if at_import else [(mutant.file, mutant.line)]), near=near)
    if len(tests) < FEW:
        tests += covered.tests_in(near)
    at_once = [test for place, test in AT_ONCE.items() if at_import and mutant.file.startswith(place)]
    named = covered.tests_named(named_in_tests(ROOT, mutant.file, mutant.line)) if at_import else []
    return list(dict.fromkeys([*covered.tests_in(at_once), *named, *tests]))


def _row(mutant: Mutant, outcome: Outcome, asked: int) -> dict[str, Any]:
    return {
        "name": mutant.name, "room": mutant.room, "file": mutant.file, "line": mutant.line, "before": mutant.before, "after": mutant.after,
        "by": outcome.failed, "undecided": outcome.undecided, "tests": asked, "seconds": outcome.seconds,
    }  # fmt: skip


def equivalents(text: str) -> Mapping[str, str]:
    """Names of mutants that change nothing, with the reason: two lines each, a blank one between."""
    blocks = [block.strip().splitlines() for block in text.split("\n\n") if block.strip() and not block.startswith("#")]
    return {block[0]: block[1] for block in blocks}


def summary(tried: Iterable[Mapping[str, Any]], equivalent: Mapping[str, str]) -> dict[str, Any]:
    """Counts, altogether and by room. What nothing decided counts as survived, and how many those are is said."""
    tried = list(tried)
    rooms: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in tried:
        rooms[row["room"]][_kind(row, equivalent)] += 1
    total = sum(rooms.values(), Counter[str]())
    by_room = {room: [counts["caught"], counts["caught"] + counts["survived"]] for room, counts in sorted(rooms.items())}
    undecided = sum(_kind(row, equivalent) == "survived" and row["undecided"] is not None for row in tried)
    return {
        "mutants": total.total(), "caught": total["caught"], "survived": total["survived"], "equivalent": total["equivalent"],
        "undecided": undecided, "by_room": by_room,
    }  # fmt: skip


def _kind(row: Mapping[str, Any], equivalent: Mapping[str, str]) -> str:
    if row["by"] is not None:
        return "caught"
    return "equivalent" if row["name"] in equivalent else "survived"


def is_enough(found: Mapping[str, Any]) -> bool:
    """Whether the share of caught ones, of what is not equivalent, is reached."""
    decided = found["caught"] + found["survived"]
    return decided > 0 and found["caught"] >= CAUGHT_SHARE * decided


if __name__ == "__main__":
    sys.exit(main())
