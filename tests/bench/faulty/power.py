"""Writes what production has to keep, as fast as it can, and says after each what it was told is kept; then the power goes.

`python -m tests.bench.faulty.power FOLDER` writes until it is killed: events into the inbox, answers into the spool, payloads of turns as
segments, versions of weights. `surviving` says of a folder that a disk brought back what is there and whole.
"""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch
from safetensors.torch import load_file
from sqlalchemy import select

from app.db.engine import open_engine, reading
from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.spool import Spool
from app.db.migrate import upgrade
from app.db.tables import inbox
from app.domain.ids import utc_now
from app.domain.learning.batches import payload_of
from app.policy.storage.snapshot import READY, WEIGHTS, verify_snapshot, write_snapshot
from app.policy.storage.store import LocalWeights
from app.policy.tiny import write_tiny
from app.trajectories.segments import ParquetSegments
from tests.fakes.served import event_of, turn

VERSION_EVERY = 25


def write(folder: Path) -> None:
    """Until it is killed."""
    url, segments, spool = f"sqlite:///{folder}/ratchet.db", ParquetSegments(str(folder / "segments")), Spool(folder / "spool")
    upgrade(url)
    door = SqlInbox(open_engine(url), free_bytes=lambda: 1 << 40)
    weights = LocalWeights(folder / "weights")
    write_tiny(folder / "base")
    kept("weights", weights.publish(folder / "base"))
    number = 0
    while True:
        told = turn(f"t{number}", completion="x" * (number % 2_000))
        door.append_blocking([event_of(told)])
        kept("inbox", f"turn-{told.inference_id}")
        spool.put([event_of(told)])
        kept("spool", f"turn-{told.inference_id}")
        kept("segment", f"{segments.deposit(payload_of(told)).segment}/{told.inference_id}")
        if number % VERSION_EVERY == 0:
            segments.note_erasure(f"actor-{number}", utc_now())
            kept("erasure", f"actor-{number}")
            kept("weights", weights.publish(_next_version(folder, number)))
        number += 1


def kept(kind: str, name: str) -> None:
    """Whoever asked was told so."""
    sys.stdout.write(f"{kind} {name}\n")
    sys.stdout.flush()


def _next_version(folder: Path, number: int) -> Path:
    tensors = load_file(folder / "base" / WEIGHTS)
    name = sorted(tensors)[0]
    tensors[name] = torch.full_like(tensors[name], number / 1024)
    write_snapshot(folder / "candidate", tensors, like=folder / "base")
    return folder / "candidate"


def surviving(folder: Path) -> Iterator[str]:
    """What is there and whole, in the words of `kept`. Raises where something that calls itself whole is not."""
    database = open_engine(f"sqlite:///{folder}/ratchet.db")
    with reading(database) as connection:
        yield from (f"inbox {id_}" for id_ in connection.execute(select(inbox.c.event_id)).scalars())
    database.dispose()
    spool = Spool(folder / "spool")
    spool.adopt()
    while (waiting := spool.oldest()) is not None:
        assert not waiting.unreadable, waiting.unreadable
        yield from (f"spool {event.id}" for event in waiting.events)
        spool.done(waiting.path)
    spool.close()
    segments = ParquetSegments(str(folder / "segments"))
    yield from (f"erasure {actor}" for actor in segments.noted_erasures())
    for name in [*segments.names(), *segments.claims(datetime.max.replace(tzinfo=UTC))]:
        ids = segments.turns(name)
        yield from (f"segment {name}/{id_}" for id_ in segments.read([(name, id_) for id_ in ids]))  # every byte of them
    for ready in sorted((folder / "weights").glob(f"*/{READY}")):
        yield f"weights {verify_snapshot(ready.parent)}"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
