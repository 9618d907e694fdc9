"""The processes of a deployment, each as `ratchet` starts it, on a folder of their own: what they do, and that they end when told to."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import select

from app import wiring
from app.db.engine import reading
from app.db.tables import labels
from app.domain.ids import utc_now
from app.settings import from_environment
from tests.architecture.sources import ROOT
from tests.fakes.releases import deployed
from tests.fakes.served import event_of, observation, turn

POLICY = "composer"
CONFIG = f"""
[policies.{POLICY}]
model = "model"
base_name = "tiny"
base_model = "ratchet/tiny-random"
[schedule]
slot_s = 3600
tick_s = 0.2
[labelling]
poll_s = 0.2
[gates]
interval_s = 0.2
approval = {{ n = 1, n_in_doubt = 1 }}
"""
PATIENCE_S = 300.0
"""How long anything may take on a machine that is busy with other things."""


@pytest.fixture
def environment(tmp_path: Path, sqlite_template: Path, tiny_model: Path) -> dict[str, str]:
    """Of a deployment whose first version is live."""
    (tmp_path / "model").symlink_to(tiny_model)
    (tmp_path / "ratchet.toml").write_text(CONFIG)
    state, inbox = (f"sqlite:///{tmp_path}/{name}.db" for name in ("ratchet", "inbox"))
    for name in ("ratchet", "inbox"):
        (tmp_path / f"{name}.db").write_bytes(sqlite_template.read_bytes())
    given = {"RATCHET_DATA": str(tmp_path / "data"), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml")}
    given |= {"RATCHET_DATABASE_URL": state, "RATCHET_INBOX_URL": inbox}
    deployed(from_environment(given), tiny_model)
    return given


@contextmanager
def running(name: str, environment: dict[str, str], *options: str) -> Iterator["subprocess.Popen[str]"]:
    """`ratchet NAME`; at the end it is told to end, and does."""
    command, log = [sys.executable, "-m", "pipelines", name, *options], Path(environment["RATCHET_DATA"]) / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT, text=True)
    try:
        eventually(lambda: process.poll() is not None or f"{name} ready" in log.read_text(), f"{name} is ready")
        assert process.poll() is None, log.read_text()
        yield process
        assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def eventually(claim: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not claim():
        assert time.monotonic() < deadline, f"not in {PATIENCE_S:g} s: {what}"
        time.sleep(0.1)


def test_what_the_door_accepted_is_sent_applied_and_labelled_by_processes_that_end_when_told_to(environment: dict[str, str]) -> None:
    settings = from_environment(environment)
    inbox = wiring.inbox_writer(settings)
    inbox.append_blocking([event_of(turn("t", policy=POLICY)), event_of(observation("o", of="t", name="rating", value=1.0))])
    inbox.close()
    state = wiring.open_state(settings)

    def labelled() -> list[tuple[str, bool]]:
        with reading(state) as connection:
            return [(row.inference_id, row.current) for row in connection.execute(select(labels.c.inference_id, labels.c.current))]

    with ExitStack() as processes:
        for name in ("broker", "relay", "ingest", "label"):
            processes.enter_context(running(name, environment))
        eventually(lambda: labelled() == [("t", True)], "the turn is labelled")
        assert wiring.backlog(settings).complete_until(now=utc_now()) is not None
    state.dispose()
