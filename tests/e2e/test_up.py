"""`ratchet up`: everything runs, a product is connected, a second one is refused, kills are survived."""

import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.e2e.running import PATIENCE, PROCESSES, ROOT, Up, deployment, eventually, ratchet

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with deployment(tmp_path_factory.mktemp("up")) as running:
        yield running


def rows(up: Up, database: str, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(f"file:{up.data / database}?mode=ro", uri=True)) as connection:
        return connection.execute(query).fetchall()


def test_every_process_runs_and_says_that_it_is_ready(up: Up) -> None:
    eventually(lambda: all(up.process(name) is not None for name in PROCESSES), "every process runs", within_s=20)
    for name in PROCESSES:
        eventually(lambda name=name: "ready" in (up.data / "logs" / f"{name}.log").read_text(), f"{name} is ready", within_s=60)


def test_a_second_one_on_the_same_folder_is_refused_in_one_sentence(up: Up) -> None:
    second = ratchet("up", "--data", str(up.data), "--config", str(up.data / "ratchet.toml"))
    assert second.returncode == 2
    assert second.stderr.strip().count("\n") == 0
    assert str(up.supervisor.pid) in second.stderr


def test_the_ten_lines_of_the_readme_connect_a_product(up: Up) -> None:
    lines = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert "http://127.0.0.1:8400" in lines
    product = [sys.executable, "-c", lines.replace("http://127.0.0.1:8400", up.url)]
    done = subprocess.run(product, capture_output=True, text=True, timeout=90 * PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    heard = "SELECT name FROM observations WHERE status = 'joined' AND name IN ('edit_persistence', 'follow_up') ORDER BY name"
    eventually(lambda: rows(up, "ratchet.db", heard) == [("edit_persistence",), ("follow_up",)], "its reactions are joined", within_s=30)


def test_kills_of_every_process_lose_no_accepted_event_and_train_on_no_turn_twice(up: Up) -> None:
    ledger = up.data / "accepted"
    people = up.simulate("--concurrency", "3", "--ledger", str(ledger))
    try:
        eventually(lambda: len(up.operations.labels("composer")) >= 20, "people are heard", within_s=60)
        for name in PROCESSES:
            up.kill(name)
            eventually(up.is_well, f"well again after {name}", within_s=60)
        eventually(lambda: any(c.run_id for c in up.operations.cycles("composer")), "a cycle got as far as an update", within_s=90)
    finally:
        people.send_signal(signal.SIGTERM)
        people.wait(timeout=30 * PATIENCE)
    accepted = set(ledger.read_text().split())

    def lost() -> set[str]:
        return accepted - {str(row[0]) for row in rows(up, "ratchet.db", "SELECT id FROM observations")}

    assert len(accepted) > 50
    eventually(lambda: not lost(), "every accepted event is in the database", within_s=60)
    served = rows(up, "inbox.db", "SELECT count(*) FROM inbox WHERE type = 'ratchet.turn.v1'")
    eventually(lambda: rows(up, "ratchet.db", "SELECT count(*) FROM turns") == served, "every served turn is there once", within_s=30)
    trained = rows(up, "ratchet.db", "SELECT count(*), count(DISTINCT inference_id) FROM batch_items")[0]
    assert trained[0] == trained[1]
