"""What a process of a deployment is told, called and reached by, and what it does when its database goes away or it is told to end."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.domain.errors import BadConfig
from app.domain.learning.cycles import CycleStatus
from app.listening.errors import HttpError
from app.settings import Settings, from_environment
from app.telemetry.instruments import Instruments
from pipelines.commands.running.deployment import QUICKSTART, Deployment, environment, ratchet, with_own_metrics
from pipelines.commands.running.engine_ports import engine_barrier, engine_id, engine_key, keep_server
from pipelines.commands.running.processes import children_memory, ended_cycles, owner, shown
from pipelines.commands.running.repeating import outlast, repeat
from tests.unit.pipelines.commands.test_demonstration import cycle


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return from_environment({"RATCHET_DATA": str(tmp_path)})


# --- over a database that is away --------------------------------------------------------------------------------------------------


class Away(Exception):
    """The database went away."""


class Hasty(threading.Event):
    """Waits for nothing, and keeps how long it should have."""

    def __init__(self, *, stops_after: int = 10) -> None:
        super().__init__()
        self.waited: list[float | None] = []
        self._stops_after = stops_after

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout)
        if len(self.waited) >= self._stops_after:
            self.set()
        return self.is_set()


def test_work_is_begun_again_a_second_after_its_database_went_away_until_it_ends_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    stop, left = Hasty(), [Away("one\n  line" + "x" * 400), Away("two")]

    def work() -> None:
        if left:
            raise left.pop(0)

    with caplog.at_level(logging.WARNING):
        outlast("watch", work, stop, away=(Away,))
    assert (left, stop.waited) == ([], [1.0, 1.0])
    first, second = (record.message for record in caplog.records)
    assert first == "event=database_away what=watch error=" + ("one line" + "x" * 400)[:300]
    assert second == "event=database_away what=watch error=two"


def test_work_that_is_told_to_stop_is_not_begun_and_a_bug_is_not_outlasted() -> None:
    begun: list[int] = []
    stop = threading.Event()
    stop.set()
    outlast("watch", lambda: begun.append(1), stop, away=(Away,))
    assert begun == []

    def breaks() -> None:
        begun.append(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        outlast("watch", breaks, threading.Event(), away=(Away,))
    assert begun == [1]


@pytest.mark.parametrize(("at_once", "waited"), [(False, [60.0] * 3), (True, [0.0, 60.0, 60.0])])
def test_rounds_come_so_long_after_one_another_and_the_first_at_once_where_that_is_said(at_once: bool, waited: list[float]) -> None:
    stop, done = Hasty(stops_after=3), list[int]()
    thread = repeat("prune", lambda: done.append(1), stop, every_s=60.0, at_once=at_once)
    thread.join(20)
    assert (stop.waited, done, thread.name, thread.daemon) == (waited, [1, 1], "prune", True)


# --- an engine's door ------------------------------------------------------------------------------------------------------------


def passes(settings: Settings, host: str, name: str) -> bool:
    try:
        engine_barrier(settings, host).check("GET", {b"host": name.encode()})
    except HttpError:
        return False
    return True


def test_an_engine_answers_to_its_address_and_to_the_names_by_which_gateways_know_engines(settings: Settings) -> None:
    known = replace(settings, engines=("http://gpu-1:8401", "vllm+http://gpu-2:8000"), hosts=frozenset({"mine"}))
    assert [passes(known, "0.0.0.0", name) for name in ("gpu-1:8401", "mine", "localhost", "evil.example")] == [True, True, True, False]
    assert (passes(known, "127.0.0.1", "10.0.0.7"), passes(known, "10.0.0.7", "10.0.0.7")) == (False, True)


def test_an_engine_is_called_by_its_region_where_it_has_one(settings: Settings) -> None:
    assert (engine_id(settings, "gpu-1:8401"), engine_id(replace(settings, region="eu"), "gpu-1:8401")) == ("gpu-1:8401", "eu/gpu-1:8401")


@pytest.mark.parametrize(
    ("host", "key", "warned"), [("127.0.0.1", None, False), ("0.0.0.0", None, True), ("0.0.0.0", "secret", False), ("gpu-1", None, True)]
)
def test_an_engine_that_others_reach_and_that_asks_nobody_says_so(
    settings: Settings, caplog: pytest.LogCaptureFixture, host: str, key: str | None, warned: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        assert engine_key(replace(settings, engine_key=key), host) == key
    assert ("cure=set RATCHET_ENGINE_KEY" in caplog.text) is warned


@pytest.mark.parametrize(("only", "refused"), [((), True), (("a", "b"), True)])
def test_weights_are_replaced_in_place_for_one_policy_alone(settings: Settings, only: tuple[str, ...], refused: bool) -> None:
    control: Any = SimpleNamespace(url="http://gpu:8000", scheme="vllm+", name="vLLM")
    with pytest.raises(BadConfig, match=f"serves one policy and {len(only)} are meant"):
        keep_server(settings, control, only=only, role="champion", pause="keep", stop=threading.Event())
    assert refused


# --- what processes are told -----------------------------------------------------------------------------------------------------


def test_the_quickstart_is_read_where_no_configuration_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RATCHET_DATA", "/elsewhere")
    monkeypatch.setenv("PYTHONUNBUFFERED", "0")
    for given in ({}, {"RATCHET_CONFIG": ""}):
        monkeypatch.delenv("RATCHET_CONFIG", raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        assert environment()["RATCHET_CONFIG"] == str(QUICKSTART)
    monkeypatch.setenv("RATCHET_CONFIG", "mine.toml")
    told = environment()
    assert (told["RATCHET_CONFIG"], told["RATCHET_DATA"], told["PYTHONUNBUFFERED"]) == ("mine.toml", "/elsewhere", "1")
    monkeypatch.chdir(tmp_path)
    named = environment(data=Path("data"), config=Path("other.toml"))
    assert (named["RATCHET_CONFIG"], named["RATCHET_DATA"]) == (f"{tmp_path}/other.toml", f"{tmp_path}/data")


def test_each_process_shows_its_metrics_at_a_port_of_its_own() -> None:
    for said, place, found in (
        ("0.0.0.0:9100", 0, "0.0.0.0:9100"), ("0.0.0.0:9100", 3, "0.0.0.0:9103"), ("", 3, ""), (":9100", 3, ":9100"), ("host:", 3, "host:"),
        ("host:x", 3, "host:x"),
    ):  # fmt: skip
        told = {"RATCHET_METRICS": said, "other": "1"}
        assert with_own_metrics(told, place) == told | {"RATCHET_METRICS": found}
    assert with_own_metrics({}, 3) == {}


def test_processes_start_in_their_order_the_broker_first_where_there_is_no_cluster(settings: Settings) -> None:
    told = {"RATCHET_METRICS": "127.0.0.1:9100"}
    one = Deployment(settings=settings, environment=told, engine_port=1234)
    programs = {program.name: program for program in one.programs()}
    assert [*programs] == ["broker", "api", "engine", "relay", "ingest", "label", "loop", "watch"]
    assert programs["engine"].command == ratchet("engine", "--port", "1234", "--rows", "64")
    assert programs["api"].command == (sys.executable, "-m", "pipelines", "api")
    assert [program.environment["RATCHET_METRICS"].rpartition(":")[2] for program in programs.values()] == [
        str(port) for port in range(9100, 9108)
    ]  # fmt: skip
    beside = Deployment(settings=replace(settings, kafka_bootstrap="kafka:9092"), environment=told, engine_port=1234)
    assert [program.name for program in beside.programs()] == [name for name in programs if name != "broker"]
    assert (one.url, one.logs) == (f"http://{settings.host}:{settings.port}", settings.data / "logs")


def test_ports_are_given_back_with_the_deployment(settings: Settings) -> None:
    closed: list[str] = []

    def claimed(name: str) -> Any:
        return SimpleNamespace(number=1, claim=SimpleNamespace(close=lambda: closed.append(name)))

    Deployment(settings=settings, environment={}, engine_port=1, ports=(claimed("main"), claimed("engine"))).close()
    assert closed == ["main", "engine"]


# --- what a process says of itself -------------------------------------------------------------------------------------------------


def test_a_process_is_called_by_its_machine_and_its_number() -> None:
    assert owner() == f"{socket.gethostname()}:{os.getpid()}"


def test_a_process_shows_how_far_its_clock_is_off(settings: Settings) -> None:
    own = shown(settings, "loop", cast("Any", SimpleNamespace(skew_s=lambda: 0.25)))
    assert "ratchet_clock_skew_seconds 0.25" in own.text().decode()


def test_a_cycle_that_ended_is_counted_with_the_seconds_of_its_own_steps() -> None:
    own = Instruments("loop")
    last = replace(cycle(CycleStatus.HELD, "train"), timings={"batch": 0.1, "train": 4.0})
    book = cast("Any", SimpleNamespace(find=lambda policy, slot: last if (policy, slot) == ("composer", 60) else None))
    ended_cycles(own, book)(replace(last, timings={"batch": 0.1}))
    lines = own.text().decode().splitlines()
    assert 'ratchet_loop_cycles_ended_total{policy="composer",status="held"} 1.0' in lines
    assert 'ratchet_loop_step_seconds_sum{policy="composer",step="train"} 4.0' in lines
    assert not any('step="batch"' in line for line in lines), "an earlier owner's"


def test_the_memory_of_a_child_is_counted_and_our_own_is_not() -> None:
    before = children_memory()
    with subprocess.Popen([sys.executable, "-S", "-c", "x = bytearray(64 << 20); print(1, flush=True); input()"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as child:  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        assert 60 << 20 < children_memory() - before < 200 << 20
        child.communicate(b"\n")


ENDS = (
    "import threading, time\nfrom pipelines.commands.running.processes import end_within\nstop = threading.Event()\n"
    "end_within(stop, 0.2)\nprint('waits', flush=True)\ninput()\nstop.set()\nprint('told', flush=True)\ntime.sleep(60)\n"
)


def test_a_process_that_hangs_ends_so_long_after_it_was_told_to_and_not_before() -> None:
    with subprocess.Popen([sys.executable, "-c", ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        time.sleep(0.3)
        assert process.poll() is None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "told\n"
        told = time.monotonic()
        assert process.wait(20) == 0
        assert time.monotonic() - told < 20
