"""The eight planted bugs of `facts/ingestion.md`, section 9.2, each in the product's own code, and the accident that must show it.

`python -m tests.bench.planted_bugs` (part of `make bench-faults`). A copy of the tree gets one bug at a time; the same accident happens to
the sound copy, which must come out clean. A bug whose text is no longer in the source is an error, not a pass.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.bench.mutating.trying import Copy

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
NEW_TRANSACTION = '        connection.connection.commit()\n        connection.exec_driver_sql("BEGIN IMMEDIATE")\n'


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One place of the product."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One planted bug."""

    name: str
    accident: str
    """Of `tests.bench.faulty.line`."""
    edits: tuple[Edit, ...]


DEDUPLICATED = "        fresh, counts = _deduplicate(connection, batch.events, now)\n"
BUGS = (
    Bug(
        name="1 ack before the commit",
        accident="the_commit_fails",
        edits=(
            Edit(
                file="app/db/ingestion/inbox.py",
                old="        try:\n            receipts = self._write([row for rows, _, _ in group for row in rows])\n",
                new="        self._answer(group, [Receipt.ACCEPTED for rows, _, _ in group for _ in rows], None)\n"
                "        group = [(rows, 0, lambda _: None) for rows, _, _ in group]\n"
                "        try:\n            receipts = self._write([row for rows, _, _ in group for row in rows])\n",
            ),
        ),
    ),
    Bug(  # langfuse/langfuse#16017
        name="2 dedupe row in a separate transaction",
        accident="the_consumer_dies",
        edits=(Edit(file="app/db/ingestion/streams.py", old=DEDUPLICATED, new=DEDUPLICATED + NEW_TRANSACTION),),
    ),
    Bug(
        name="3 offset before the effect",
        accident="the_consumer_dies",
        edits=(
            Edit(
                file="app/db/ingestion/streams.py",
                old=DEDUPLICATED,
                new="        save_offsets(connection, batch, now=now)\n" + NEW_TRANSACTION + DEDUPLICATED,
            ),
        ),
    ),
    Bug(
        name="4 no reconciler",
        accident="the_broker_restarts_empty",
        edits=(
            Edit(
                file="pipelines/ingestion/relay.py",
                old="        now = self.relay.clock()\n        self.journey.arrived(",
                new="        return 0\n        now = self.relay.clock()\n        self.journey.arrived(",
            ),
        ),
    ),
    Bug(
        name="5 two relays",
        accident="a_paused_relay_wakes_up",
        edits=(
            Edit(
                file="app/db/leases.py",
                old="    if connection.execute(statement).scalar() != lease.token:\n",
                new="    if connection.execute(statement).scalar() is None:\n",
            ),
        ),
    ),
    Bug(  # langfuse/langfuse#13592
        name="6 drop on a null parent",
        accident="feedback_comes_first",
        edits=(
            Edit(
                file="app/db/ingestion/observations.py",
                old="        status = status_of(observation.source, observation.occurred_at, event.received_at, known, rules)\n",
                new="        if not known:\n            continue\n"
                "        status = status_of(observation.source, observation.occurred_at, event.received_at, known, rules)\n",
            ),
        ),
    ),
    Bug(  # bytewax/bytewax#138
        name="7 timers in memory only",
        accident="everything_is_restarted",
        edits=(
            Edit(
                file="app/db/ingestion/turns.py",
                old="    return inserted\n",
                new="    ARMED.update(inserted)\n    return inserted\n\n\nARMED: set[str] = set()\n",
            ),
            Edit(
                file="app/db/learning/labels.py",
                old="        waited = mine.where(turns.c.labelled_at.is_(None), ",
                new="        from app.db.ingestion.turns import ARMED\n\n"
                "        waited = mine.where(turns.c.labelled_at.is_(None), turns.c.inference_id.in_(sorted(ARMED)), ",
            ),
        ),
    ),
    Bug(
        name="8 a late outcome overwrites",
        accident="an_outcome_comes_too_late",
        edits=(
            Edit(
                file="app/db/ingestion/observations.py",
                old=" <= last.label_due_at + rules.lateness(last.policy) else LATE\n",
                new=" <= last.label_due_at + rules.lateness(last.policy) else JOINED\n",
            ),
        ),
    ),
)

Found = dict[str, tuple[Counter[str], Counter[str]]]
"""By bug, the checker's counts without it (must be empty) and with it (must not be)."""


def hunt(template: Path) -> Found:
    """Plant every bug, in a process of its own that has nothing of the product loaded. `template`: an empty, migrated SQLite file."""
    command = [sys.executable, "-m", "tests.bench.planted_bugs", str(template)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the planted bugs could not be tried:\n{done.stdout}{done.stderr}")
    return {name: (Counter(sound), Counter(broken)) for name, (sound, broken) in json.loads(done.stdout.splitlines()[-1]).items()}


def caught(found: Found) -> int:
    """Bugs that the checker sees, and does not see where they are not."""
    return sum(bool(broken) and not sound for sound, broken in found.values())


def main(template: str) -> int:
    """Try every bug; the last line is JSON, exit code 1 where one is not caught."""
    with tempfile.TemporaryDirectory(prefix="ratchet-bugs-") as folder:
        copy = Copy(Path(folder))
        copy.fill(ROOT)
        wanted = copy.call("tests.bench.faulty.line", "rewards", [template], limit_s=LIMIT_S)
        sound = {
            name: copy.call("tests.bench.faulty.line", "meet", [name, template, wanted], limit_s=LIMIT_S)
            for name in sorted({bug.accident for bug in BUGS})
        }
        found = {bug.name: (sound[bug.accident], _with(copy, bug, template, wanted)) for bug in BUGS}
    print(json.dumps(found))
    return 0


def _with(copy: Copy, bug: Bug, template: str, wanted: dict[str, float]) -> dict[str, int]:
    originals = {edit.file: (copy.root / edit.file).read_text() for edit in bug.edits}
    try:
        for edit in bug.edits:
            plant(copy.root / edit.file, edit, bug.name)
        counts: dict[str, int] = copy.call("tests.bench.faulty.line", "meet", [bug.accident, template, wanted], limit_s=LIMIT_S)
        return counts
    finally:
        for file, text in originals.items():
            (copy.root / file).write_text(text)


def plant(path: Path, edit: Edit, name: str) -> None:
    """Put an edit into a file. Raises `ValueError` where its text is not there exactly once."""
    text = path.read_text()
    if text.count(edit.old) != 1:
        raise ValueError(f"bug {name!r} no longer fits {edit.file}: write it for the new text")
    path.write_text(text.replace(edit.old, edit.new))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
