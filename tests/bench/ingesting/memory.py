"""Memory of a process that ingests and labels while a million turns are open. Part of `make bench-ingest`."""

import subprocess
import sys
import tempfile
from pathlib import Path

from sqlalchemy import Engine, text

from app.db.engine import open_engine, writing
from app.db.ingestion.streams import SqlEffects
from app.db.migrate import upgrade
from app.db.tables import turns
from app.domain.ids import utc_now, uuid7
from app.domain.telemetry.decoding import sort_out
from app.domain.telemetry.streams import EffectBatch
from app.trajectories.segments import ParquetSegments
from tests.bench.common.driving import ROOT
from tests.bench.ingesting.streams import RULES, about, label_all
from tests.fakes.served import at, delivery_of, event_of, observation


def memory(open_turns: int) -> float:
    """Resident memory (MB) of a process that ingests and labels while so many turns are open."""
    with tempfile.TemporaryDirectory() as name:
        url = f"sqlite:///{name}/state.db"
        upgrade(url)
        _fill(open_engine(url), open_turns)
        command = [sys.executable, "-m", "tests.bench.ingesting.memory", url]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def _fill(engine: Engine, count: int) -> None:
    """Open turns that are due in a year, made by the database itself."""
    columns = [column for column in turns.c if not column.nullable and column.server_default is None]
    due = int(at(365 * 86_400).timestamp() * 1e6)
    values = {"inference_id": "'open-' || i", "episode_id": "'e-' || i", "label_due_at": str(due), "tool_calls": "'[]'", "tags": "'{}'"}
    chosen = ", ".join(
        values.get(column.name, "'x'" if "CHAR" in str(column.type) or "TEXT" in str(column.type) else "1") for column in columns
    )
    names = ", ".join(column.name for column in columns)
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})"
    with writing(engine) as connection:
        connection.execute(text(f"{numbers} INSERT INTO turns ({names}) SELECT {chosen} FROM n"))
    engine.dispose()


def main(url: str) -> None:
    """In a process of its own: ingest and label a while, then print the peak of resident memory in MB."""
    engine = open_engine(url)
    with tempfile.TemporaryDirectory() as folder:
        segments = ParquetSegments(folder)
        store = SqlEffects(engine, rules=lambda: RULES, segments=segments)
        for start in range(0, 10_000, 2_000):
            said = [event_of(observation(uuid7(), of=f"open-{n + 1}")) for n in range(start, start + 1_500)]
            said += [event for n in range(125) for event in about(n)]
            events, _ = sort_out([delivery_of(event, offset=start + n) for n, event in enumerate(said)])
            store.apply(EffectBatch(events=tuple(events)), now=utc_now())
        store.expire_parked(now=utc_now())
        label_all(engine)
    status = Path("/proc/self/status").read_text()  # not ru_maxrss: that begins with the memory of the process that started this one
    print(int(status.partition("VmHWM:")[2].split()[0]) / 1024)


if __name__ == "__main__":
    main(sys.argv[1])
