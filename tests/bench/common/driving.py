"""Loads an HTTP endpoint from another process, and reads the server's CPU time beside it."""

import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.bench.common.accounts import Rate

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a load brought."""

    rate: Rate
    events: int
    """Accepted, each by its own answer."""
    refused: int
    p50_ms: float
    p99_ms: float
    accepted: tuple[str, ...]
    """The ids that the server said it had taken."""


def wait_for(url: str, log: Path, timeout_s: float = 60.0) -> None:
    """Until somebody answers there."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=2).close()
        except urllib.error.HTTPError:  # it answers
            return
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(f"{url} does not answer: {log.read_text(errors='replace')[-2000:]}")


def drive(
    processes: Sequence[psutil.Process],
    port: int,
    path: str,
    *,
    batch: int,
    connections: int,
    seconds: float,
    key: str = "",
    form: str = "ratchet",
) -> Load:
    """Load an endpoint; `processes` are the server's, whose CPU time counts."""
    before = cpu_s(processes)
    with tempfile.NamedTemporaryFile("r") as ids:
        command = [
            sys.executable, "-m", "tests.bench.common.load", "--port", str(port), "--path", path, "--batch", str(batch), "--connections",
            str(connections), "--seconds", str(seconds), "--authorization", key, "--form", form, "--ids", ids.name,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        accepted = tuple(ids.read().split())
    report, used = json.loads(done.stdout), cpu_s(processes) - before
    events = report["events"]
    rate = Rate(per_cpu_s=events / used if used else float("nan"), per_s=events / report["wall_s"])
    return Load(rate=rate, events=events, refused=report["refused"], p50_ms=report["p50_ms"], p99_ms=report["p99_ms"], accepted=accepted)


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Seconds of CPU that these have used so far."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))
