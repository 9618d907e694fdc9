"""One rollout, from its session to its grade:

    session ─▶ box ─▶ harness works, every turn journalled ─▶ patch ─▶ the box dies ─▶ grade in another ─▶ said to the gateway ─▶ closed

What is said of the model is said of what it did; where a part of ours fails the rollout is closed under that part's name, and nobody learns
from it. All of it can be done again after a crash: the journal gives the model's answers, the observation's id is the rollout's.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import httpx

from app.domain.errors import BadInput, LeaseLost, RatchetError
from app.domain.learning.boxes import GATEWAY, Box, Boxes, Ended, Executed, Limits
from app.domain.learning.rollouts import Closed, Outcome, Rollout
from pipelines.rollouts.audit import audited
from pipelines.rollouts.grading import Grade, Grader, Verdict, text_of
from pipelines.rollouts.interception import Always, Bounds, Exchange, Interception, Journal, Permit
from pipelines.rollouts.searching import Search
from pipelines.rollouts.seats import Seats
from pipelines.rollouts.service import Session
from pipelines.rollouts.tasks import Harness, TaskData

log = logging.getLogger(__name__)
MOST_SAID_BYTES = 1 << 20
AGENT = Limits(cpu_s=600, memory_bytes=512 << 20, file_bytes=8 << 20, processes=32, workspace_bytes=64 << 20)
OF_A_PROGRAM = {Ended.TIMEOUT: Outcome.AGENT_TIMEOUT, Ended.OOM: Outcome.TOOL_ABUSE, Ended.OUTPUT_LIMIT: Outcome.TOOL_ABUSE}


class Gateway(Protocol):
    """What an episode needs of the service."""

    policy: str

    def begin(self, rollout: Rollout) -> Session: ...
    def sampling(self, session: Session) -> httpx.Client: ...
    def report(self, rollout: Rollout, episode: str, closed: Closed) -> None: ...
    def report_component(self, rollout: Rollout, episode: str, policy: str, reward: float) -> None: ...


@dataclass
class Worked:
    """What the agent left."""

    outcome: Outcome | None
    """None where it came to an end by itself."""
    files: dict[str, str | None]
    exchanges: list[Exchange]
    detail: str = ""


@dataclass(kw_only=True)
class Workplace:
    """Everything that one try needs."""

    boxes: Boxes
    grader: Grader
    service: Gateway
    harness: Harness
    journal_of: Callable[[Rollout], Journal]
    session_of: Callable[[Rollout], Session | None]
    """The session of a rollout that was begun before."""
    keep_session: Callable[[Rollout, Session], None]
    champion: Callable[[], str] = lambda: ""
    """Digest of the version that serves now."""
    lag: Callable[[str, str], int] = lambda old, new: 0
    """How many promotions lie between two versions."""
    staleness: int = 1
    permit: Permit = field(default_factory=Always)
    limits: Limits = AGENT
    search: Search | None = None
    """The step of the harness that another policy does, where one does."""
    ahead: int = 1
    """Boxes that are opened before a try wants them."""

    @cached_property
    def seats(self) -> Seats:
        """Where agents work."""
        return Seats(self.boxes, self.limits, self.ahead)

    def prepare(self, task: TaskData) -> None:
        """Another try at this task is to come: have a box open for it."""
        self.seats.prepare(task)

    def close(self) -> None:
        """End the boxes that nobody took."""
        self.seats.close()

    def attempt(self, rollout: Rollout, task: TaskData, *, begun: Callable[[str], None], holds: Callable[[], None]) -> Closed:
        """Work on it to its end. `begun` binds it to its episode, `holds` raises `LeaseLost` where somebody else has it now."""
        started = time.monotonic()
        try:
            session = self.session_of(rollout)
            if session is None:
                session = self.service.begin(rollout)
                self.keep_session(rollout, session)
            begun(session.episode)
        except LeaseLost:
            raise
        except RatchetError as error:
            log.warning("rollout_not_begun rollout=%s error=%s", rollout.id, error)
            return Closed(outcome=Outcome.GATEWAY_FAILED, reward=None, duration_s=time.monotonic() - started, turns=0)
        worked = self._work(rollout, task, session)
        holds()
        closed = self._judged(rollout, task, worked, time.monotonic() - started)
        holds()
        self.service.report(rollout, session.episode, closed)
        self._pay_search(rollout, task, session, worked, closed)
        log.info(
            "rollout_closed rollout=%s task=%s/%s episode=%s outcome=%s reward=%s turns=%d detail=%s", rollout.id, task.taskset, task.key,
            session.episode, closed.outcome.value, closed.reward, closed.turns, worked.detail,
        )  # fmt: skip
        return closed

    def _pay_search(self, rollout: Rollout, task: TaskData, session: Session, worked: Worked, closed: Closed) -> None:
        """Say what the searches of the episode were worth, where the machinery did not fail it and there were any."""
        if self.search is None or not closed.outcome.is_of_the_model:
            return
        reward = self.search.reward(worked.exchanges, task, worked.files, solved=closed.outcome is Outcome.SOLVED)
        if reward is not None:
            self.service.report_component(rollout, session.episode, self.search.policy, reward)
            log.info("rollout_search rollout=%s policy=%s reward=%.3f", rollout.id, self.search.policy, reward)

    def _work(self, rollout: Rollout, task: TaskData, session: Session) -> Worked:
        """The harness in its box."""
        bounds = Bounds(most_turns=task.most_turns, most_tokens=task.most_tokens, deadline=time.monotonic() + task.deadline_s)
        tags = {"task": task.key, "group": rollout.group, "attempt": str(rollout.attempt), "harness_hash": rollout.harness_hash}
        with self.service.sampling(session) as client:
            service = Interception(
                gateway=client, policy=self.service.policy, tags=tags, bounds=bounds, journal=self.journal_of(rollout), permit=self.permit,
                components=frozenset() if self.search is None else frozenset({self.search.policy}),
            )  # fmt: skip
            try:
                seat = self.seats.take(task)
                try:
                    seat.socket.service = service
                    return self._run(seat.box, task, session, service)
                finally:
                    seat.leave()
            except RatchetError as error:
                return Worked(Outcome.SETUP_FAILED, {}, service.exchanges, str(error))
            except Exception as error:  # the journal would bring the next dispatcher to the same place, and the one after it
                log.exception("bug rollout=%s", rollout.id)
                return Worked(Outcome.SETUP_FAILED, {}, service.exchanges, repr(error))

    def _run(self, box: Box, task: TaskData, session: Session, service: Interception) -> Worked:
        launch = self.harness.launch(GATEWAY, session.key, task, model=self.service.policy, python=self.boxes.python)
        for path, content in launch.files.items():
            box.put(path, content)
        done = box.exec(launch.argv, stdin=launch.stdin, deadline_s=task.deadline_s, most_output_bytes=MOST_SAID_BYTES)
        outcome, detail = outcome_of(done, service, task)
        if outcome is not None and not outcome.is_of_the_model:
            return Worked(outcome, {}, service.exchanges, detail)
        try:
            return Worked(outcome, text_of(box.patch()), service.exchanges, detail)
        except BadInput as error:
            return Worked(Outcome.TOOL_ABUSE, {}, service.exchanges, str(error))

    def _judged(self, rollout: Rollout, task: TaskData, worked: Worked, duration_s: float) -> Closed:
        flags, turns = audited(worked.exchanges), len(worked.exchanges)

        def closed(outcome: Outcome, reward: float | None) -> Closed:
            return Closed(outcome=outcome, reward=reward, duration_s=duration_s, turns=turns, flags=flags)

        if worked.outcome is not None and not worked.outcome.is_of_the_model:
            return closed(worked.outcome, None)
        own = [exchange for exchange in worked.exchanges if exchange.policy in ("", self.service.policy)]
        versions = [exchange.version for exchange in own if exchange.version]
        if versions and self.lag(versions[0], self.champion() or versions[-1]) > self.staleness:
            return closed(Outcome.STALE, None)
        if worked.outcome is Outcome.TOOL_ABUSE:
            return closed(Outcome.TOOL_ABUSE, 0.0)
        try:
            grade = self.grader.grade(task, worked.files, seed=int(rollout.id.replace("-", "")[-8:], 16), exchanges=own)
        except Exception as error:  # as at work: it would break there again
            log.exception("bug rollout=%s", rollout.id)
            grade = Grade(verdict=Verdict.ERROR, reason=repr(error))
        worked.detail = worked.detail or grade.reason
        if grade.verdict is Verdict.ERROR:
            return closed(Outcome.GRADER_FAILED, None)
        solved = grade.verdict is Verdict.PASSED
        ended = Outcome.SOLVED if solved else Outcome.FAILED
        reward = float(solved) if grade.reward is None else grade.reward
        return closed(ended if worked.outcome is None or solved else worked.outcome, reward)


def outcome_of(done: Executed, service: Interception, task: TaskData) -> tuple[Outcome | None, str]:
    """How the harness ended, by what it and the service behind it did; None where by itself."""
    if service.ended is not None and not service.ended.is_of_the_model:
        return service.ended, "the service of the episode gave up"
    if done.ended is Ended.BOX_LOST:
        return Outcome.BOX_LOST, "the box was lost"
    if done.ended in OF_A_PROGRAM:
        return OF_A_PROGRAM[done.ended], done.ended.value
    if not service.turns:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-300:]
        return Outcome.SETUP_FAILED, f"the harness ended with code {done.code} and asked for no completion: {said}"
    if service.ended is not None:
        return service.ended, ""
    if len(service.turns) >= task.most_turns and done.code == 3:
        return Outcome.TURN_LIMIT, ""
    return None, ""


def forget(folder: Path, rollout: Rollout) -> None:
    """Remove what was kept for going on with it."""
    for name in (f"{rollout.id}.jsonl", f"{rollout.id}.key"):
        with suppress(FileNotFoundError):
            (folder / name).unlink()
