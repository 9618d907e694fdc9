"""What merged segments cost: `make bench-segments` (`--quick` within 55 s). Files on this disk, rows in SQLite.

A day of small segments as ingestion leaves them, of a policy with nine tenths of the traffic and one with the rest, is merged until nothing
is left to merge; before and after it a batch is read and a person of fifteen turns is forgotten. Ends with one line of JSON: {"turns",
"files_before", "files_after", "mb_after", "smallest_mb", "largest_mb", "rests", "merge_mb_per_s", "read_ms_before", "read_ms_after",
"erase_ms_before", "erase_ms_after", "peak_mb"}; exit code 1 where anything is lost, the memory is above its bound, a file is above 512 MB,
or a policy's day has more than one below 128 MB (`rests` counts those; the quick run's are all, and bounded in proportion).
"""

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import Engine, select
from sqlalchemy import func as sql

from app.db.access.erasures import SqlEraser
from app.db.engine import open_engine, reading
from app.db.ingestion.streams import SqlEffects
from app.db.migrate import upgrade
from app.db.tables import turns
from app.db.upkeep.compaction import compact
from app.domain.telemetry.streams import EffectBatch, JoinRules
from app.domain.telemetry.turns import TurnServed
from app.trajectories.segments import ParquetSegments
from tests.fakes.served import START, applied, at, erasure, turn

PER_SEGMENT, BATCH, OF_A_PERSON = 500, 1_024, 15
PEAK_MB = 1_024.0
"""What the process may hold at most, whatever the size of a file."""


def served(number: int, draw: random.Random) -> TurnServed:
    """A turn of a chat: 400 tokens of prompt, 120 of answer, log-probabilities that compress as real ones do, hardly."""
    prompt, answer = [draw.randrange(50_000) for _ in range(400)], [draw.randrange(50_000) for _ in range(120)]
    return turn(
        f"t{number:08}", policy="composer" if number % 10 else "tab", actor=f"person-{number // OF_A_PERSON}",
        prompt_tokens=prompt, completion_tokens=answer, logprobs=[-draw.random() for _ in answer], completion="word " * 100,
    )  # fmt: skip


def fill(engine: Engine, files: ParquetSegments, *, number: int) -> None:
    """Ingest them, a segment for each five hundred."""
    draw, rules = random.Random(1), JoinRules(policies={})
    store = SqlEffects(engine, rules=lambda: rules, segments=files)
    order = draw.sample(range(number), number)  # a person's turns lie in several segments
    for start in range(0, number, PER_SEGMENT):
        events = [applied(served(n, draw), offset=start + k) for k, n in enumerate(order[start : start + PER_SEGMENT])]
        store.apply(EffectBatch(events=tuple(events)), now=at(start))


def places(engine: Engine, ids: list[str] | None = None) -> list[tuple[str, str]]:
    """(segment, turn), of all turns or these."""
    query = select(turns.c.payload_segment, turns.c.inference_id).where(turns.c.payload_segment.is_not(None))
    with reading(engine) as connection:
        found = connection.execute(query if ids is None else query.where(turns.c.inference_id.in_(ids)))
        return [(row.payload_segment, row.inference_id) for row in found]


def timed(act: Callable[[], object]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1_000


def merge_all(engine: Engine, files: ParquetSegments, *, now: datetime, at_most_bytes: int) -> None:
    """As `ratchet loop` does it."""
    while compact(engine, files, now=now, over_for=timedelta(hours=1), at_most_bytes=at_most_bytes) is not None:
        pass


def run(number: int, at_most_bytes: int) -> tuple[dict[str, float], bool]:
    """The figures, and whether nothing was lost."""
    with tempfile.TemporaryDirectory(prefix="ratchet-segments-") as name:
        url = f"sqlite:///{name}/ratchet.db"
        upgrade(url)
        engine, files = open_engine(url), ParquetSegments(f"{name}/segments")
        fill(engine, files, number=number)
        draw = random.Random(2)
        wanted = sorted(draw.sample([id_ for _, id_ in places(engine)], min(BATCH, number)))
        eraser = SqlEraser(engine, engine, segments=files)

        def figures(person: int) -> dict[str, float]:
            return {
                "files": len(files.names()),
                "read_ms": timed(lambda: files.read(places(engine, wanted))),
                "erase_ms": timed(lambda: eraser.erase(erasure(f"person-{person}"), now=at(1e6))),
            }

        before = figures(0)
        mb = sum(file.stat().st_size for file in Path(name, "segments").glob("*.parquet")) / 1e6
        now = START + timedelta(days=3)
        took = timed(lambda: merge_all(engine, files, now=now, at_most_bytes=at_most_bytes))
        after = figures(1)
        with reading(engine) as connection:
            kept = connection.execute(select(sql.count()).where(turns.c.payload_segment.is_not(None))).scalar_one()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        whole = kept == number - 2 * OF_A_PERSON == sum(len(files.turns(name)) for name in files.names())
        engine.dispose()
        sizes = {file.name: file.stat().st_size for file in Path(name, "segments").glob("*.parquet")}
        rests = Counter(file.partition(".")[0] for file, size in sizes.items() if size < at_most_bytes / 2)
        told = {f"{key}_{when}": value for when, found in (("before", before), ("after", after)) for key, value in found.items()}
        spread = {"mb_after": sum(sizes.values()), "smallest_mb": min(sizes.values()), "largest_mb": max(sizes.values())}
        told |= {key: size / 1e6 for key, size in spread.items()}
        merged = max(rests.values(), default=0) <= 1 and max(sizes.values()) <= 2 * at_most_bytes
        found = {"turns": number, "rests": rests.total(), "merge_mb_per_s": mb / took * 1_000, "peak_mb": peak} | told
        return found, whole and merged


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5,000 turns in ten segments")
    parser.add_argument("--turns", type=int, default=150_000)
    given = parser.parse_args()
    found, whole = run(*((5_000, 8 << 20) if given.quick else (given.turns, 256 << 20)))
    if not whole:
        print("turns were lost, or files have other sizes than they should", file=sys.stderr)
    if found["peak_mb"] > PEAK_MB:
        print(f"peak_mb is {found['peak_mb']:.0f}: the bound is {PEAK_MB:.0f}", file=sys.stderr)
    print(json.dumps({name: round(value, 2) for name, value in found.items()}))
    return 0 if whole and found["peak_mb"] <= PEAK_MB else 1


if __name__ == "__main__":
    sys.exit(main())
