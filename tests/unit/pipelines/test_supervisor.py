"""Processes are started, restarted and ended; one supervisor per folder."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.domain.errors import AlreadyRunning
from pipelines.supervisor import FIRST_WAIT_S, GRACE_S, Crash, Program, Supervisor, owning

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


def program(name: str, *command: str, once: bool = False) -> Program:
    return Program(name=name, command=command, environment=dict(os.environ), once=once)


@pytest.fixture
def ended() -> Iterator[list[Supervisor]]:
    supervisors: list[Supervisor] = []
    yield supervisors
    for supervisor in supervisors:
        supervisor.stop()


def wait_for_crash(supervisor: Supervisor) -> Crash:
    for _ in range(200):
        if crashes := supervisor.check():
            return crashes[0]
        time.sleep(0.02)
    raise AssertionError("nothing crashed")


def test_a_killed_process_is_told_and_started_again_after_a_wait(tmp_path: Path, ended: list[Supervisor]) -> None:
    now = [0.0]
    supervisor = Supervisor([program("one", *SLEEP)], logs=tmp_path, monotonic=lambda: now[0])
    ended.append(supervisor)
    supervisor.start_all()
    first = supervisor.pid("one")
    assert first is not None
    os.kill(first, signal.SIGKILL)
    crash = wait_for_crash(supervisor)
    assert (crash.name, crash.code) == ("one", -signal.SIGKILL)
    assert "SIGKILL" in str(crash)
    assert supervisor.pid("one") is None
    now[0] = FIRST_WAIT_S
    supervisor.check()
    assert supervisor.pid("one") not in (None, first)


def test_the_wait_doubles_up_to_ten_seconds_and_a_minute_alive_begins_anew(tmp_path: Path, ended: list[Supervisor]) -> None:
    now = [0.0]
    supervisor = Supervisor([program("bad", "/bin/sh", "-c", "exit 3")], logs=tmp_path, monotonic=lambda: now[0])
    ended.append(supervisor)
    supervisor.start_all()
    waits: list[float] = []
    for alive_s in (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 60.0, 60.5):
        now[0] += alive_s
        crash = wait_for_crash(supervisor)
        assert crash.code == 3
        waits.append(crash.wait_s)
        now[0] += crash.wait_s
        supervisor.check()
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 0.5]


STOPS = "trap 'sleep 0.3; echo well > ended; exit 0' TERM; echo > ready; while :; do sleep 0.02; done"
REFUSES = "trap '' TERM; echo > ready; while :; do sleep 0.02; done"


def test_whoever_needs_a_moment_ends_well_and_whoever_does_not_listen_is_killed(tmp_path: Path) -> None:
    for name, script in (("stops", STOPS), ("refuses", REFUSES)):
        (tmp_path / name).mkdir()
        command = f"cd {tmp_path / name}; {script}"
        supervisor = Supervisor([program(name, "/bin/sh", "-c", command)], logs=tmp_path, grace_s=0.2 if name == "refuses" else GRACE_S)
        supervisor.start_all()
        while not (tmp_path / name / "ready").exists():
            time.sleep(0.01)
        pid = supervisor.pid(name)
        assert pid is not None
        supervisor.stop()
        assert not psutil.pid_exists(pid)
    assert (tmp_path / "stops" / "ended").read_text() == "well\n"
    assert 2.0 < GRACE_S < 10.0, "every process takes up to 2 s, and a container's stop kills after 10 s"


def test_a_program_that_runs_once_and_ends_well_is_no_crash(tmp_path: Path, ended: list[Supervisor]) -> None:
    supervisor = Supervisor([program("work", sys.executable, "-c", "pass", once=True)], logs=tmp_path)
    ended.append(supervisor)
    supervisor.start_all()
    pid = supervisor.pid("work")
    assert pid is not None
    psutil.Process(pid).wait(timeout=10) if psutil.pid_exists(pid) else None
    for _ in range(100):
        assert supervisor.check() == []
        if supervisor.pid("work") is None:
            return
        time.sleep(0.05)
    raise AssertionError("it never ended")


def test_stopping_ends_grandchildren_as_well(tmp_path: Path) -> None:
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {SLEEP[2]!r}]); time.sleep(60)"
    supervisor = Supervisor([program("parent", sys.executable, "-c", code)], logs=tmp_path)
    supervisor.start_all()
    pid = supervisor.pid("parent")
    assert pid is not None
    parent = psutil.Process(pid)
    children: list[psutil.Process] = []
    for _ in range(200):
        if children := parent.children(recursive=True):
            break
        time.sleep(0.02)
    supervisor.stop()
    assert children
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_output_goes_to_a_log_of_its_own(tmp_path: Path, ended: list[Supervisor]) -> None:
    supervisor = Supervisor([program("teller", sys.executable, "-c", "print('ready')", once=True)], logs=tmp_path)
    ended.append(supervisor)
    supervisor.start_all()
    for _ in range(200):
        supervisor.check()
        if supervisor.pid("teller") is None:
            break
        time.sleep(0.02)
    assert (tmp_path / "teller.log").read_text() == "ready\n"


def test_a_second_owner_of_a_folder_is_refused_and_told_who_owns_it(tmp_path: Path) -> None:
    with owning(tmp_path), pytest.raises(AlreadyRunning, match=str(os.getpid())), owning(tmp_path):
        pass


def test_a_folder_is_free_again_after_its_owner(tmp_path: Path) -> None:
    with owning(tmp_path):
        pass
    with owning(tmp_path):
        pass


def test_who_crashed_is_down_until_it_has_been_alive_for_a_minute(tmp_path: Path, ended: list[Supervisor]) -> None:
    now = [0.0]
    programs = [program("one", *SLEEP), program("never started", *SLEEP), program("done", "/bin/true", once=True), program("other", *SLEEP)]
    supervisor = Supervisor(programs, logs=tmp_path, monotonic=lambda: now[0])
    ended.append(supervisor)
    for name in ("one", "done", "other"):
        supervisor.start(name)
    pid = supervisor.pid("one")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for_crash(supervisor)
    assert supervisor.down() == ["one"]
    now[0] = 1.0
    supervisor.check()
    assert supervisor.down() == ["one"], "it may die again at once"
    now[0] = 60.9
    assert supervisor.down() == ["one"]
    now[0] = 61.0
    assert supervisor.down() == []


@pytest.mark.parametrize(
    ("code", "wait_s", "said"),
    [
        (-9, 0.5, "engine ended (SIGKILL); it is started again in 0.5 s"),
        (0, 10.0, "engine ended (exit code 0); it is started again in 10 s"),
        (3, 1.0, "engine ended (exit code 3); it is started again in 1 s"),
    ],
)
def test_a_crash_is_told_in_a_sentence(code: int, wait_s: float, said: str) -> None:
    assert str(Crash(name="engine", code=code, wait_s=wait_s)) == said
