"""The parts of `bench-rollouts` that drive whole rollouts: throughput, a straggler, people beside practice, and killed dispatchers."""

import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from app.db.engine import open_engine
from app.db.migrate import upgrade
from app.domain.learning.rollouts import Outcome
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from pipelines.rollouts.permits import Permits
from pipelines.rollouts.service import Service
from tests.architecture.sources import ROOT
from tests.integration.rollouts.practising import LIBRARY, AnsweringEngines, Practice, calls, said_by_tools

TASK = replace(LIBRARY, taskset="bench", deadline_s=120)
STEPS = [
    calls("search", pattern="def double"), calls("read", path="lib/numbers.py"), calls("shell", command="ls"),
    calls("edit", path="lib/numbers.py", old='raise RuntimeError("gone")', new="return 2 * n"), calls("test"),
    calls("read", path="lib/numbers.py"),
]  # fmt: skip


def scripted(request: GenerateRequest) -> str:
    """Six tools, then the end."""
    done = len(said_by_tools(request))
    return STEPS[done] if done < len(STEPS) else "Done."


def practice(folder: Path, name: str, answer: Any = scripted) -> Practice:
    """A service and a book of their own."""
    own = folder / name
    own.mkdir()
    url = f"sqlite:///{own}/ratchet.db"
    upgrade(url)
    return Practice(open_engine(url), own, answer)


def paced(folder: Path, count: int) -> dict[str, float]:
    """Scripted rollouts of six tools a second, grades included."""
    held = practice(folder, "paced")
    dispatch = held.dispatch(TASK, config={"group_size": 8, "slots": 8})
    began = time.monotonic()
    counted = dispatch.run(groups=count // 8)
    took = time.monotonic() - began
    held.close()
    assert counted == {"solved": count}, counted
    return {"rollouts_per_s": round(count / took, 2)}


def straggling(folder: Path, length_s: float) -> dict[str, float]:
    """What one rollout that takes very long costs those beside it, which have as many slots as without it."""
    medians: list[float] = []
    slow = replace(TASK, key="slow", taskset="slow")
    for name, slots in (("without", 2), ("with", 3)):

        def answer(request: GenerateRequest) -> str:
            if str(request.messages[-1]["content"]).endswith("slow."):
                return calls("shell", command=f"sleep {length_s}")
            return scripted(request)

        held = practice(folder, f"straggler-{name}", answer)
        dispatch = held.dispatch(
            TASK, replace(slow, instruction="Be slow.", deadline_s=length_s + 30), config={"group_size": 2, "slots": slots}
        )
        if name == "with":
            held.book.plan(dispatch._group(dispatch.tasks["slow"]["slow"])[:1])
        dispatch.run(groups=max(2, int(length_s / 2)), taskset="bench")
        durations = held.book.durations_s("composer", "bench")
        medians.append(statistics.median(durations))
        held.close()
    return {"straggler_cost": round(medians[1] / medians[0] - 1.0, 3)}


@dataclass
class SharedEngines(AnsweringEngines):
    """Engines that decode together: a first token takes 60 ms alone, and longer the more others are being decoded."""

    running: int = 0
    waits: list[float] = field(default_factory=list[float])

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        self.running += 1
        try:
            await asyncio.sleep(0.06 * (1 + 0.3 * (self.running - 1)))
            async for chunk in super().generate(request):
                yield chunk
        finally:
            self.running -= 1


def live(folder: Path, length_s: float) -> dict[str, float]:
    """How long people wait for a first token with practice beside them, against without; and how soon practice is at zero."""

    def waits(held: Practice, stop_at: float) -> list[float]:
        took: list[float] = []
        with httpx.Client(base_url=held.url, timeout=30) as client:
            while time.monotonic() < stop_at:
                began = time.monotonic()
                client.post("/v1/chat/completions", json={"model": "composer", "messages": [{"role": "user", "content": "hi"}]})
                took.append(time.monotonic() - began)
        return sorted(took)

    alone = practice(folder, "alone", SharedEngines(scripted))
    baseline = waits(alone, time.monotonic() + length_s / 4)
    alone.close()
    beside = practice(folder, "beside", SharedEngines(scripted))
    permits = Permits(
        probe=Service(beside.connect, "composer").pressure, most=8, bound_s=baseline[len(baseline) // 2] * 0.9, most_waiting=0, probe_s=0.2
    )
    dispatch = beside.dispatch(replace(TASK, deadline_s=600), config={"group_size": 8, "slots": 4})
    dispatch.workplace.permit = permits
    thread = threading.Thread(target=lambda: dispatch.run(groups=1000, taskset="bench"), daemon=True)
    thread.start()
    time.sleep(1.5)
    began = time.monotonic()
    zero_at: list[float] = []

    def watch() -> None:
        while not zero_at and time.monotonic() < began + length_s:
            if permits.allowed < 1:
                zero_at.append(time.monotonic() - began)
            time.sleep(0.01)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    together = waits(beside, began + length_s / 2)
    watching.join()
    permits.bound_s, permits.most_waiting = float("inf"), 1000  # nobody comes any more: what was begun may end at once
    dispatch.stop()
    thread.join(60)
    beside.close()
    p95 = [sample[int(0.95 * len(sample))] for sample in (together, baseline)]
    return {"live_ttft_ratio": round(p95[0] / p95[1], 3), "permits_zero_s": round(zero_at[0], 2) if zero_at else 99.0}


def killed(folder: Path, length_s: float) -> dict[str, float]:
    """Dispatchers that are killed again and again, then one that finishes: no episode twice, none lost, and how many were too old."""
    held = practice(folder, "killed")
    planner = held.dispatch(TASK, config={"group_size": 8, "slots": 2})
    planned = [rollout for _ in range(4 if length_s < 20 else 16) for rollout in planner.plan("bench", 1)]
    drawn, until = random.Random(1), time.monotonic() + length_s
    kills = 0
    while time.monotonic() < until:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.rollouts_driving", held.url, str(held.folder)], cwd=ROOT, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        try:
            process.wait(drawn.uniform(2.0, 4.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    time.sleep(2.5)  # the last one's leases
    held.dispatch(TASK, config={"group_size": 8, "slots": 4, "lease_s": 2.0, "heartbeat_s": 0.5}).run(groups=0)
    rows = held.book.history("composer", "bench")
    said = Counter(one.episode_id for one in held.said())
    episodes = [row.episode for row in rows if row.episode is not None]
    doubled = sum(count > 1 for count in said.values()) + len(episodes) - len(set(episodes))
    lost = sum(row.outcome is None or row.episode not in said for row in rows) + len(planned) - len(rows)
    stale = sum(row.outcome is Outcome.STALE for row in rows)
    solved = sum(row.outcome is Outcome.SOLVED for row in rows)
    held.close()
    return {
        "doubled": doubled,
        "lost": lost,
        "stale_share": round(stale / len(rows), 3),
        "kills": kills,
        "solved_share": round(solved / len(rows), 3),
    }


def dispatch_until_killed(url: str, folder: Path) -> None:
    """A dispatcher of its own process, over the same book and service."""
    held = Practice.joining(open_engine(f"sqlite:///{folder}/ratchet.db"), folder, url)
    held.dispatch(TASK, config={"group_size": 8, "slots": 4, "lease_s": 2.0, "heartbeat_s": 0.5}).run(groups=0)


if __name__ == "__main__":
    dispatch_until_killed(sys.argv[1], Path(sys.argv[2]))
