"""The processes of a deployment, each as `ratchet` starts it, on a folder of their own: what they do, and that they end when told to."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select

from app import wiring
from app.db.engine import reading
from app.db.tables import cycles, labels
from app.domain.errors import BadConfig
from app.domain.ids import utc_now
from app.domain.ports import EngineState
from app.domain.release.gates import GateName
from app.domain.release.releases import ReleaseState
from app.domain.release.versions import Version, VersionKind
from app.policy.tiny import write_tiny
from app.settings import Settings, from_environment, owner_of, read_toml
from pipelines.commands.running.engine_ports import keep_server
from pipelines.commands.running.processes import pruning
from pipelines.config import loop_config
from pipelines.evaluation.config import terms_of
from tests.architecture.sources import ROOT
from tests.e2e.running import free_port
from tests.fakes.gateway import serving
from tests.fakes.releases import answer, deployed
from tests.fakes.served import event_of, observation, turn
from tests.fakes.servers.sglang import FakeSglang
from tests.fakes.servers.vllm import FakeVllm

POLICY = "composer"
CONFIG = f"""
[policies.{POLICY}]
model = "model"
base_name = "tiny"
base_model = "ratchet/tiny-random"
[schedule]
slot_s = 3600
patience_s = 0.0
tick_s = 0.2
[labelling]
poll_s = 0.2
[gates]
interval_s = 0.2
min_power = 0.0
margin_share_max = 0.0
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


def candidate(settings: Settings, folder: Path) -> str:
    """A second version that waits for its canary; its digest."""
    terms = terms_of(loop_config(read_toml(settings.config)).gates, owner=owner_of(settings.config))
    desk, book = wiring.release_desk(settings, terms=terms), wiring.version_book(settings)
    base = book.find(POLICY, desk.pointer(POLICY).digest)
    write_tiny(folder, seed=1)
    digest = wiring.open_weights(settings).publish(folder)
    made = replace(base, digest=digest, name="tiny-s1", kind=VersionKind.RL, parent=base.digest, step=1, created_at=utc_now())
    book.add(made)
    release = desk.start_offline(desk.open(made, initiator="system:loop").id)
    for gate in (GateName.TRAINING_HEALTH, GateName.OFFLINE):
        desk.record(release.id, answer(gate, digest))
    desk.queue(release.id)
    return digest


def test_a_candidate_gets_its_canary_once_an_engine_holds_it_and_an_engine_that_ends_is_gone(
    environment: dict[str, str], tmp_path: Path
) -> None:
    settings = from_environment(environment)
    digest, ledger = candidate(settings, tmp_path / "second"), wiring.release_ledger(settings)
    base = ledger.pointer(POLICY).digest
    port = free_port()
    reads = wiring.http_adapters(settings).reads

    def held() -> set[tuple[str, str]]:
        return {(one["digest"], one["state"]) for entry in reads.engines(POLICY) for one in entry["versions"]}

    with running("watch", environment):
        with running("engine", environment, "--port", str(port), "--rows", "2"):
            eventually(lambda: {(base, EngineState.READY), (digest, EngineState.READY)} <= held(), "the engine holds both versions")
            eventually(lambda: ledger.list(policy=POLICY)[0].state is ReleaseState.CANARY, "it is in its canary")
        assert held() == set(), "who ended holds nothing"


def test_the_loop_says_why_a_slot_passes_without_an_update_and_registers_what_is_live(environment: dict[str, str]) -> None:
    settings = from_environment(environment)
    state = wiring.open_state(settings)
    with running("loop", environment):

        def slots() -> list[tuple[str, str | None]]:
            with reading(state) as connection:
                return [(row.status, row.reason) for row in connection.execute(select(cycles.c.status, cycles.c.reason))]

        eventually(lambda: any(status != "running" for status, _ in slots()), "a slot came to its end")
        [(status, reason)] = slots()
        log = settings.data / "loop.log"
        eventually(lambda: f"projected policy={POLICY} alias champion" in log.read_text(), "the champion is in the registry")
    assert status == "held"
    assert reason is not None
    assert reason.startswith("too_few_labels: 0 turns are eligible")
    state.dispose()


@pytest.mark.parametrize(("make", "server"), [("vllm", FakeVllm), ("sglang", FakeSglang)])
def test_a_server_of_another_make_is_kept_on_the_champion_and_nobody_is_sent_there_when_its_keeper_ended(
    environment: dict[str, str], tiny_model: Path, make: str, server: type[FakeVllm] | type[FakeSglang]
) -> None:
    settings = from_environment(environment)
    base = wiring.release_ledger(settings).pointer(POLICY).digest
    fake = server(base, folder=tiny_model)
    reads = wiring.http_adapters(settings).reads
    with serving(fake.app) as url:
        with running("engine", environment, f"--{make}", url, "--in-place", "champion"):
            eventually(lambda: bool(reads.engines(POLICY)) and reads.engines(POLICY)[0]["versions"] != [], "the keeper reports")
            [entry] = reads.engines(POLICY)
            assert entry["address"] == f"{make}+{url}"
            eventually(lambda: reads.engines(POLICY)[0]["versions"][0]["state"] == EngineState.READY, "the server holds the champion")
            assert fake.version == base, "every token says whose it is"
        assert reads.engines(POLICY) == []


def test_a_server_whose_weights_are_replaced_follows_one_policy_and_two_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(BadConfig, match="serves one policy and 2 are meant: name it with --policy"):
        settings = from_environment(environment)
        control = wiring.server_control(settings, vllm="http://127.0.0.1:9", sglang=None)
        keep_server(settings, control, only=("a", "b"), role="champion", pause="keep", stop=threading.Event())


def test_the_loop_removes_what_is_older_than_a_day_and_needed_by_nobody(environment: dict[str, str], tmp_path: Path) -> None:
    """As it does every hour. Of twelve versions the ten newest are kept for whoever goes back to them, and of the others a young one."""
    settings = from_environment(environment)
    weights, book = wiring.open_weights(settings), wiring.version_book(settings)
    base = wiring.release_ledger(settings).pointer(POLICY).digest
    made = [weights.publish(tmp_path / f"v{n}") for n in range(12) if write_tiny(tmp_path / f"v{n}", seed=n + 1)]
    for number, digest in enumerate(made):
        book.add(
            Version(
                digest=digest, policy=POLICY, name=f"n{number}", kind=VersionKind.RL, parent=base, step=number, run_id=None,
                created_at=utc_now() + timedelta(hours=1 + number), base_model="tiny", licence="Apache-2.0", optimizer_uri=None,
            )
        )  # fmt: skip
    for digest in {base, *made} - {made[1]}:
        os.utime(settings.data / "weights" / digest / "READY", (0, 0))
    pruning(settings)()
    assert [weights.exists(digest) for digest in (base, *made)] == [True, False, *[True] * 11]
