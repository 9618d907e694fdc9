"""The door over HTTP: single events on 200 connections and on one, batches of a hundred on 16. Part of `make bench-ingest`."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from sqlalchemy import select

from app import wiring
from app.db.engine import open_engine, reading
from app.db.tables import inbox
from app.domain.access import Scope
from app.settings import from_environment
from tests.bench.common.accounts import Accounts, settle
from tests.bench.common.driving import ROOT, Load, drive, wait_for
from tests.bench.faulty.world import environment
from tests.broker import free_port

CONNECTIONS = 200


@dataclass(frozen=True, kw_only=True)
class DoorFigures:
    """What one run of the door brought."""

    single: Load
    alone: Load
    """Single events on one connection, one after the other."""
    batch100: Load
    accounts: Accounts
    """Over every event of the run, the warm-up's too."""


def measure_door(seconds: float) -> DoorFigures:
    """Load a service of its own; warm-up is left out of the rates and not out of the accounts."""
    with tempfile.TemporaryDirectory() as name:
        with running_api(Path(name)) as (process, port, key):
            one = [process]
            warm_up = drive(one, port, "/v1/events", batch=1, connections=20, seconds=1.0, key=key)
            alone = drive(one, port, "/v1/events", batch=1, connections=1, seconds=min(seconds, 3.0), key=key)
            single = drive(one, port, "/v1/events", batch=1, connections=CONNECTIONS, seconds=seconds, key=key)
            batch = drive(one, port, "/v1/events", batch=100, connections=16, seconds=seconds, key=key)
        acknowledged = [id_ for load in (warm_up, alone, single, batch) for id_ in load.accepted]
        accounts = settle(acknowledged=acknowledged, kept=_kept(f"sqlite:///{name}/inbox.db"))
    return DoorFigures(single=single, alone=alone, batch100=batch, accounts=accounts)


@contextmanager
def running_api(folder: Path) -> Iterator[tuple[psutil.Process, int, str]]:
    """The service with key, schema and durable inbox; its process, port and a key for ingestion."""
    variables = environment(folder, port=free_port())
    settings = from_environment(variables)
    wiring.upgrade_schema(settings)
    _, key = wiring.key_book(settings).create(name="bench", scopes=[Scope.INGEST])
    with (folder / "api.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "app.main"], cwd=ROOT, env=variables, stdout=log, stderr=log)
    try:
        wait_for(f"http://127.0.0.1:{settings.port}/status", folder / "api.log")
        yield psutil.Process(process.pid), settings.port, key
    finally:
        process.terminate()
        process.wait(30)


def _kept(url: str) -> list[str]:
    engine = open_engine(url)
    with reading(engine) as connection:
        found = list(connection.execute(select(inbox.c.event_id)).scalars())
    engine.dispose()
    return found
