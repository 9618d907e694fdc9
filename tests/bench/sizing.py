"""What one turn costs on disk: `make bench-sizing`. The unit costs of docs/SIZING.md that no other bench measures.

Turns with random token ids and log-probabilities (they compress worse than language: the figures are upper bounds) and two observations
each, applied as ingestion does, on SQLite and on PostgreSQL; files and relations are then looked at. One line of JSON.
"""

import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from sqlalchemy import text

from app import wiring
from app.db.engine import open_engine, reading
from app.domain.ids import utc_now, uuid7
from app.domain.telemetry.streams import EffectBatch, JoinRules
from app.domain.telemetry.turns import Usage
from app.settings import from_environment
from tests.fakes.served import applied, observation, turn
from tests.postgres import running_postgres

WORD = "recursion list return value string "


def apply_turns(environment: dict[str, str], *, count: int, prompt: int, completion: int) -> int:
    """Apply so many turns, 200 to a segment, each with two observations; returns the bytes of the segments."""
    settings = from_environment(environment)
    Path(environment["RATCHET_DATA"]).mkdir(parents=True, exist_ok=True)
    wiring.upgrade_schema(settings)
    store = wiring.effect_store(settings, rules=JoinRules(policies={}, label_wait_s=60.0, lateness_s=60.0))
    draw, now = random.Random(7), utc_now()
    for start in range(0, count, 200):
        events = []
        for _ in range(start, min(start + 200, count)):
            ids = [draw.randrange(49_152) for _ in range(prompt + completion)]
            served = turn(
                uuid7(), actor=f"person-{draw.randrange(500)}", version="f" * 64, started_at=now, finished_at=now,
                messages=[{"role": "user", "content": WORD * (prompt // 6)}], completion=WORD * (completion // 6),
                prompt_tokens=ids[:prompt], completion_tokens=ids[prompt:], logprobs=[-draw.expovariate(2.0) for _ in range(completion)],
                usage=Usage(prompt_tokens=prompt, completion_tokens=completion),
            )  # fmt: skip
            said = [observation(uuid7(), of=served.inference_id, occurred_at=now) for _ in range(2)]
            events += [applied(effect, offset=start) for effect in (served, *said)]
        store.apply(EffectBatch(events=tuple(events)), now=now)
    return sum(file.stat().st_size for file in Path(settings.segments).rglob("*.parquet"))


def sqlite_bytes(folder: Path) -> int:
    """The state database as it lies on the disk, after its log was emptied."""
    engine = open_engine(f"sqlite:///{folder}/ratchet.db")
    raw = engine.raw_connection()
    raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
    raw.close()
    engine.dispose()
    return (folder / "ratchet.db").stat().st_size


def postgres_bytes(url: str) -> int:
    """All tables and indexes of ours."""
    engine = open_engine(url)
    with reading(engine) as connection:
        query = "SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
        size = int(connection.execute(text(query)).scalar_one())
    engine.dispose()
    return size


def measure(folder: Path, *, count: int, prompt: int, completion: int) -> dict[str, Any]:
    """Bytes a turn: segments, SQLite, PostgreSQL; empty databases taken off."""
    sizes = {"count": count, "prompt": prompt, "completion": completion}
    environment = {"RATCHET_DATA": str(folder / "lite"), "RATCHET_ACTOR_SALT": "s" * 40}
    apply_turns(environment, **(sizes | {"count": 0}))
    empty = sqlite_bytes(folder / "lite")
    segments = apply_turns(environment, **sizes)
    with running_postgres() as server:
        url = server.format("postgres")
        served = {**environment, "RATCHET_DATA": str(folder / "server"), "RATCHET_DATABASE_URL": url, "RATCHET_WEBHOOK_KEYS": "w" * 40}
        apply_turns(served, **(sizes | {"count": 0}))
        bare = postgres_bytes(url)
        apply_turns(served, **sizes)
        rows = postgres_bytes(url) - bare
    found = {"segment_bytes": segments, "sqlite_bytes": sqlite_bytes(folder / "lite") - empty, "postgres_bytes": rows}
    return {f"{name}_per_turn": round(value / count) for name, value in found.items()} | sizes


@click.command()
@click.option("--turns", default=4_000, show_default=True)
@click.option("--prompt", default=600, show_default=True, help="Tokens.")
@click.option("--completion", default=300, show_default=True, help="Tokens.")
def main(turns: int, prompt: int, completion: int) -> None:
    """Measure it."""
    folder = Path(tempfile.mkdtemp(prefix="ratchet-sizing-"))
    try:
        print(json.dumps(measure(folder, count=turns, prompt=prompt, completion=completion)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
