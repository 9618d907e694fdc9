"""`ratchet up`, a deployment for each test: a cycle that was killed goes on, Ctrl-C leaves nothing behind."""

import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.running import PATIENCE, PROCESSES, deployment, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def test_a_cycle_whose_process_is_killed_is_resumed_by_the_next_one(tmp_path: Path) -> None:
    # A deployment of its own: in a used one a release may be on its way, and then no cycle starts.
    with deployment(tmp_path) as up:
        people = up.simulate("--concurrency", "4", "--seed", "7")
        try:
            eventually(
                lambda: any(c.batch_id and c.status == "running" for c in up.operations.cycles("composer")), "an update runs", within_s=150
            )
            slot = next(c.slot for c in up.operations.cycles("composer") if c.status == "running")
            up.kill("loop")
        finally:
            people.kill()  # what the cycle needs it has: the machine is for its heir
            people.wait()

        def ended() -> bool:
            cycle = next(c for c in up.operations.cycles("composer") if c.slot == slot)
            return cycle.status != "running" and cycle.attempt == 2

        eventually(ended, "the cycle was taken over and ended", within_s=120)


def test_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    with deployment(tmp_path) as running:
        family = running.family()
        assert len(family) > len(PROCESSES)
        running.supervisor.send_signal(signal.SIGINT)
        assert running.supervisor.wait(timeout=20 * PATIENCE) == 0
        _, alive = psutil.wait_procs(family, timeout=5 * PATIENCE)
        assert not alive, [member.cmdline() for member in alive]
