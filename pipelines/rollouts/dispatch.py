"""Who does which rollout when. One process; any number of them beside each other.

| loop      | consumes                           | waits for                               | unblocked by                |
|-----------|------------------------------------|-----------------------------------------|-----------------------------|
| planner   | the book's history, by the bandit  | no open rollout that a slot could take  | a rollout is closed         |
| slots     | open rollouts, the oldest first    | a free slot, admission, a rest's end    | a rollout is closed, clock  |
| each turn | a request of a harness             | a permit                                | no pressure from people     |
| heartbeat | leases of what is at work          | a quarter of the lease                  | the clock                   |

A rollout that began is never thrown away for being slow: whoever is old is taken first, and one that may not begin now (its turns would
be too old to learn from before it is over) waits, it is not put back behind others. Tries of a group are independent of each other.
"""

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import cycle
from pathlib import Path

import numpy as np

from app.domain.errors import LeaseLost, Refused, Unavailable
from app.domain.ids import uuid7
from app.domain.learning.rollouts import Closed, Outcome, Rollout, RolloutBook
from pipelines.rollouts.bandit import Learnability
from pipelines.rollouts.config import RolloutsConfig
from pipelines.rollouts.episode import Workplace, forget
from pipelines.rollouts.interception import FileJournal, Journal
from pipelines.rollouts.service import Session
from pipelines.rollouts.suspicion import suspicious
from pipelines.rollouts.tasks import Harness, TaskData

log = logging.getLogger(__name__)
POLL_S = 0.2
MOST_REST_S = 60.0
NOTHING_S = 5.0
"""Until a taskset whose tasks are all held is looked at again."""
NEWEST = 20_000
"""Tries that the bandit is told of: of each task it remembers some ten."""
FEWEST_DURATIONS = 5
"""Before so many are known, nothing is held back for being expected to take long."""


@dataclass
class Kept:
    """What has to outlive the process for a rollout to go on: its journal, and the key of its episode, for our eyes alone."""

    folder: Path

    def journal(self, rollout: Rollout) -> Journal:
        return FileJournal(self.folder / f"{rollout.id}.jsonl")

    def session(self, rollout: Rollout) -> Session | None:
        file = self.folder / f"{rollout.id}.key"
        return Session(**json.loads(file.read_text())) if file.is_file() else None

    def keep(self, rollout: Rollout, session: Session) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = self.folder / f"{rollout.id}.key"
        fresh = file.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(json.dumps({"episode": session.episode, "key": session.key}))
        fresh.replace(file)


@dataclass(kw_only=True)
class Dispatch:
    """The loops."""

    policy: str
    book: RolloutBook
    tasks: Mapping[str, Mapping[str, TaskData]]
    """By taskset and key."""
    workplace: Workplace
    config: RolloutsConfig
    kept: Kept
    owner: str = field(default_factory=lambda: f"dispatcher-{os.getpid()}-{uuid7()[-12:]}")
    held: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """Tasks that are not practised, by taskset and key, with the reason."""
    looked_at: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """By taskset and task, the id from which on tries may speak against it: a person looked at those of before."""
    hold: Callable[[str, Mapping[str, str]], None] = lambda taskset, found: None
    """Writes down that tasks are held, and why."""
    until_promotion_s: Callable[[], float | None] = lambda: None
    """How long until turns that begin now are one promotion older; None where nobody knows of one."""
    running: dict[str, Rollout] = field(default_factory=dict[str, Rollout])
    _stop: threading.Event = field(default_factory=threading.Event)
    _faults: int = 0
    """Of ours, one after the other."""
    _rests_until: float = 0.0
    """`time.monotonic()`."""

    def stop(self) -> None:
        """Begin nothing more, and end when what is at work has ended."""
        self._stop.set()

    def plan(self, taskset: str, groups: int) -> list[Rollout]:
        """Write down this many groups of K tries."""
        tasks = self.tasks[taskset]
        history = self.book.history(self.policy, taskset, newest=NEWEST)
        bandit = Learnability(sorted(tasks), seed=history[-1].id if history else "")
        for rollout in history:
            if rollout.outcome is not None and rollout.outcome.is_of_the_model and rollout.task in tasks:
                bandit.learn(rollout.task, rollout.outcome is Outcome.SOLVED)
        held = {**self.held.get(taskset, {}), **self._suspicious(taskset, history)}
        if "*" in held:
            raise Refused(f"the taskset {taskset} is held ({held['*']}): mend it and run `ratchet env check {taskset}`")
        planned = [rollout for key in bandit.draw(groups, held=held) for rollout in self._group(tasks[key])]
        self.book.plan(planned)
        return planned

    def _suspicious(self, taskset: str, history: Sequence[Rollout]) -> dict[str, str]:
        """Tasks that are held from now on, for what their own tries were."""
        found = suspicious(
            history, since=self.looked_at.get(taskset, {}), most_flagged=self.config.most_flagged_share,
            most_faults=self.config.most_fault_share,
        )  # fmt: skip
        fresh = {task: why for task, why in found.items() if task not in self.held.get(taskset, {})}
        for task, why in fresh.items():
            log.warning("task_held taskset=%s task=%s reason=%s", taskset, task, why)
        if fresh:
            self.held = {**self.held, taskset: {**self.held.get(taskset, {}), **fresh}}
            self.hold(taskset, fresh)
        return fresh

    def _group(self, task: TaskData) -> list[Rollout]:
        return group_of(task, policy=self.policy, harness=self.workplace.harness, size=self.config.group_size)

    def run(self, *, groups: int | None = None, taskset: str | None = None) -> dict[str, int]:
        """Practise: this many groups and then an end, or on and on. Returns how many rollouts ended how."""
        beating = threading.Thread(target=self._beat, name="rollout-heartbeat", daemon=True)
        beating.start()
        try:
            return self._practise(self._turns(taskset), groups)
        finally:
            self.workplace.close()
            self._stop.set()
            beating.join()

    def _turns(self, taskset: str | None) -> Iterator[str]:
        """The tasksets, one after the other; those that are held only where there is no other, so that `plan` says why."""
        named = [taskset] if taskset else sorted(self.tasks)
        return cycle([name for name in named if "*" not in self.held.get(name, {})] or named)

    def _practise(self, tasksets: Iterator[str], left: int | None) -> dict[str, int]:
        counted, working = Counter[str](), set[Future[Closed | None]]()
        with ThreadPoolExecutor(self.config.slots, thread_name_prefix="rollout") as pool:
            while True:
                free, may_begin = self.config.slots - len(working), self._may_begin()
                taken = self._take(free) if free and may_begin else []
                working |= {pool.submit(self._attempt, rollout) for rollout in taken}
                self._prepare(taken)
                if free and may_begin and not taken and left != 0:
                    left = None if left is None else left - 1
                    if self.plan(next(tasksets), 1):
                        continue
                    self._rests_until = time.monotonic() + NOTHING_S
                if not working and (self._stop.is_set() or (left == 0 and may_begin)):
                    return dict(counted)
                if not working:
                    self._stop.wait(POLL_S)
                    continue
                done, working = wait(working, timeout=POLL_S, return_when=FIRST_COMPLETED)
                counted.update(self._named(future.result()) for future in done)

    def _prepare(self, taken: Sequence[Rollout]) -> None:
        """The next try is at the task of the last one, as long as its group goes on."""
        task = None if not taken else self.tasks.get(taken[-1].taskset, {}).get(taken[-1].task)
        if task is not None and taken[-1].attempt + 1 < self.config.group_size:
            self.workplace.prepare(task)

    def _may_begin(self) -> bool:
        return not self._stop.is_set() and time.monotonic() >= self._rests_until and self._admits()

    def _named(self, closed: Closed | None) -> str:
        """How it ended, in a word. After faults of ours there is a rest, twice as long after each: what is away fails thousands an hour."""
        if closed is None:
            return "lost"
        self._faults = 0 if closed.outcome.is_of_the_model or closed.outcome is Outcome.STALE else self._faults + 1
        self._rests_until = time.monotonic() + min(POLL_S * 2**self._faults, MOST_REST_S) if self._faults else 0.0
        return closed.outcome.value

    def _take(self, at_most: int) -> list[Rollout]:
        ttl = timedelta(seconds=self.config.lease_s)
        return self.book.take(self.policy, owner=self.owner, ttl=ttl, at_most=at_most)

    def _admits(self) -> bool:
        """Whether what begins now is over, as far as the past tells, before its first turns are too old."""
        left_s = self.until_promotion_s()
        if left_s is None:
            return True
        durations = [seconds for taskset in self.tasks for seconds in self.book.durations_s(self.policy, taskset)]
        if len(durations) < FEWEST_DURATIONS:
            return True
        return float(np.quantile(durations, self.config.admission_quantile)) <= left_s

    def _attempt(self, rollout: Rollout) -> Closed | None:
        """One rollout; None where somebody else holds it now."""
        task = self.tasks.get(rollout.taskset, {}).get(rollout.task)
        self.running[rollout.id] = rollout
        try:
            if task is None or task.hash != rollout.task_hash or rollout.harness_hash != self.workplace.harness.hash:
                closed = Closed(outcome=Outcome.SETUP_FAILED, reward=None, duration_s=0.0, turns=0, flags=("another task or harness",))
            else:
                closed = self.workplace.attempt(
                    rollout, task, begun=lambda episode: self.book.begin(rollout, episode), holds=lambda: self._renew(rollout)
                )
            self.book.close(rollout, closed)
            forget(self.kept.folder, rollout)
            return closed
        except LeaseLost:
            log.warning("rollout_taken_over rollout=%s owner=%s", rollout.id, self.owner)
            return None
        except Unavailable as error:
            log.warning("rollout_left rollout=%s error=%s: it is gone on with when its lease is over", rollout.id, error)
            return None
        finally:
            self.running.pop(rollout.id, None)

    def _renew(self, rollout: Rollout) -> None:
        self.book.renew(rollout, ttl=timedelta(seconds=self.config.lease_s))

    def _beat(self) -> None:
        while self.running or not self._stop.is_set():
            for rollout in list(self.running.values()):
                try:
                    self._renew(rollout)
                except LeaseLost:
                    continue  # who works on it finds out at its next write
                except Exception as error:  # noqa: BLE001 - a database that is away may be back at the next beat; the token decides
                    log.warning("rollout_not_renewed rollout=%s error=%r", rollout.id, error)
            if self._stop.wait(self.config.heartbeat_s) and not self.running:
                return
            if self._stop.is_set():
                time.sleep(POLL_S)


def group_of(task: TaskData, *, policy: str, harness: Harness, size: int) -> list[Rollout]:
    """That many tries at one task, to be compared with each other."""
    group = uuid7()
    return [
        Rollout(
            id=uuid7(), policy=policy, taskset=task.taskset, task=task.key, task_hash=task.hash, group=group, attempt=attempt,
            harness_hash=harness.hash,
        )
        for attempt in range(size)
    ]  # fmt: skip


def by_key(tasks: Sequence[TaskData]) -> dict[str, TaskData]:
    """Tasks as `Dispatch` wants them."""
    return {task.key: task for task in tasks}
