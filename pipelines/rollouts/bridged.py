"""Tasksets of other make, offered over HTTP by a bridge in an environment of its own (`infra/verifiers/ratchet_bridge.py`).

    tasks      ◀── GET /tasks; where a task has a set-up, what that lays out in a box is what the agent begins with
    the agent      the product's harness in a box, as with any task
    grade      ──▶ fresh box ──▶ set-up again, what the agent changed, what was said ──▶ a reward from 0 to 1

The bridge gives orders (run, read, write) and is told what came of them: its tasks' code is there, and everything that they touch is in our
boxes. A grade that fails is an error of the machinery, never a reward of 0.

Not covered: what a task's own grader pays. It runs beside what the agent wrote, in a box that never saw the agent; whether that can be
cheated is the taskset's business, beyond what `ratchet env check` tries (its solution holds, an empty answer does not).
"""

import base64
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import httpx
import msgspec

from app.domain.errors import BadInput, NotFound, RatchetError, Refused, Unavailable
from app.domain.learning.boxes import WORKSPACE, Box, Boxes, BoxSpec, Ended, checked_path
from pipelines.rollouts.grading import GRADING, MOST_SAID_BYTES, Grade, Grader, Verdict, open_to_all
from pipelines.rollouts.interception import Exchange
from pipelines.rollouts.scratch import scratched
from pipelines.rollouts.service import client_of
from pipelines.rollouts.tasks import EVERYTHING, TaskData, checked

PREFIX = "bridge:"
SCRATCH = ("/tests", "/logs")
"""Where Harbor's verifiers lay their tests and their verdict."""
SETUP_S, SCORING_S, AGENT_S, ANSWER_S = 120.0, 120.0, 300.0, 60.0
CODES = {Ended.TIMEOUT: 124, Ended.OUTPUT_LIMIT: 125, Ended.OOM: 137}
"""What the shell would say of a program that did not end by itself."""
Order = dict[str, Any]
Patch = Mapping[str, str | None]


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """One task, as a bridge lists it."""

    key: str
    hash: str
    prompt: str
    has_setup: bool
    agent_s: float | None = None
    scoring_s: float | None = None


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What a bridge offers."""

    taskset: str
    tasks: list[Offered]


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A bridge's side of a conversation: an order, or an end."""

    id: int = 0
    do: Order | None = None
    done: dict[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Bridge:
    """One bridge."""

    url: str
    transport: httpx.BaseTransport | None = None

    def listing(self) -> Listing:
        """Its tasks. Raises `Unavailable`, `BadInput`."""
        try:
            return msgspec.json.decode(self._ask("GET", "/tasks", None), type=Listing)
        except msgspec.DecodeError as error:
            raise BadInput(f"what answers at {self.url} is no bridge ({error}): start infra/verifiers/ratchet_bridge.py there") from error

    def converse(self, act: str, task: str, given: object, *, do: Callable[[Order], dict[str, Any]]) -> dict[str, Any]:
        """To the end of what is asked for; `do` does what is ordered meanwhile. Raises `Unavailable`, `Refused` with the task's words."""
        path, body = f"/tasks/{task}/{act}", given
        while True:
            said = msgspec.json.decode(self._ask("POST", path, body), type=Said)
            if said.error is not None:
                raise Refused(f"{task}: {act}: {said.error}")
            if said.do is None:
                return said.done or {}
            path, body = f"/conversations/{said.id}", do(said.do)

    def _ask(self, method: str, path: str, body: object) -> bytes:
        try:
            with client_of(self.url, {}, transport=self.transport, timeout_s=ANSWER_S) as client:
                answered = client.request(method, path, content=None if body is None else msgspec.json.encode(body))
        except httpx.HTTPError as error:
            raise Unavailable(f"the bridge at {self.url} does not answer ({error!r}): start it, or take its taskset out") from error
        if answered.status_code >= 400:
            kind = NotFound if answered.status_code == 404 else Unavailable
            raise kind(f"the bridge refused {path} with {answered.status_code}: {answered.text[:300]}")
        return answered.content


@dataclass
class Hands:
    """Does in a box what a bridge orders."""

    box: Box
    until: float
    """`time.monotonic()`: of all of it together."""
    apply: Callable[[Box], None] | None = None
    """Lays the agent's changes in, when the bridge says that the set-up is done."""

    def do(self, order: Order) -> dict[str, Any]:
        """One order. Raises `Refused` for one that there is not, `Unavailable` where the box is gone or the time is over."""
        (name, given), *_ = order.items()
        match name:
            case "run":
                return self._run(given["argv"], given.get("env") or {})
            case "read":
                return self._read(given["path"], given.get("most"))
            case "write":
                return self._write(given["path"], base64.b64decode(given["data"]))
            case "apply" if self.apply is not None:
                self.apply(self.box)
                return {}
            case _:
                raise Refused(f"the bridge orders {name!r}, which is not to be done here: it and this program are of different versions")

    def _run(self, argv: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
        words = ["/usr/bin/env", *(f"{name}={value}" for name, value in env.items()), *argv]
        code, out, err = self._exec(words)
        return {"code": code, "stdout": out.decode(errors="replace"), "stderr": err.decode(errors="replace")}

    def _read(self, path: str, most: int | None) -> dict[str, Any]:
        limit = MOST_SAID_BYTES if most is None else min(most, MOST_SAID_BYTES)
        code, out, err = self._exec(["/bin/sh", "-c", 'head -c "$1" -- "$2"', "sh", str(limit), path])
        return {"data": base64.b64encode(out).decode()} if code == 0 else {"missing": err.decode(errors="replace").strip()[-300:]}

    def _write(self, path: str, data: bytes) -> dict[str, Any]:
        inside = path.removeprefix(f"{WORKSPACE}/")
        if not PurePosixPath(inside).is_absolute():
            self.box.put(checked_path(str(PurePosixPath(inside))), data)
            return {}
        code, _, err = self._exec(["/bin/sh", "-c", 'mkdir -p "$(dirname "$1")" && cat > "$1"', "sh", path], data)
        if code != 0:
            raise Refused(
                f"{path} cannot be written in a box ({err.decode(errors='replace').strip()[-200:]}): only {', '.join(SCRATCH)} and /tmp can"
            )
        return {}

    def _exec(self, argv: Sequence[str], stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        left = self.until - time.monotonic()
        if left <= 0:
            raise Unavailable("the time for it is over")
        done = self.box.exec(argv, stdin=stdin, deadline_s=left, most_output_bytes=MOST_SAID_BYTES)
        if done.ended is Ended.BOX_LOST:
            raise Unavailable("the box was lost")
        return done.code if done.code is not None else CODES[done.ended], done.stdout, done.stderr


@dataclass(frozen=True, kw_only=True)
class BridgedTaskset:
    """What a bridge offers, as a taskset like any other."""

    bridge: Bridge
    boxes: Boxes

    @property
    def name(self) -> str:
        """As the bridge says."""
        return self.bridge.listing().taskset

    def load(self) -> Sequence[TaskData]:
        """Every task, with what its set-up lays out. Raises `BadInput`."""
        listing = self.bridge.listing()
        return checked([self._task(listing.taskset, one) for one in listing.tasks])

    def _task(self, taskset: str, one: Offered) -> TaskData:
        return TaskData(
            taskset=taskset, key=one.key, instruction=one.prompt, files=self._files(one) if one.has_setup else {}, editable=(EVERYTHING,),
            tests={}, expected=(), gold={}, graded_by=self.bridge.url, judge_hash=one.hash, deadline_s=one.agent_s or AGENT_S,
            grading_s=one.scoring_s or SCORING_S,
        )  # fmt: skip

    def _files(self, one: Offered) -> dict[str, str]:
        with scratched("bridge") as made:
            box = _opened(self.boxes, made, SETUP_S)
            try:
                self.bridge.converse("setup", one.key, {}, do=Hands(box, time.monotonic() + SETUP_S).do)
                return {path: (content or b"").decode() for path, content in box.patch().files.items()}
            except RatchetError as error:
                raise BadInput(f"the set-up of task {one.key} cannot be done in a box: {error}") from error
            finally:
                box.stop()


@dataclass(frozen=True, kw_only=True)
class Graders(Grader):
    """Grades every task by whoever grades it: its own tests here, or the bridge that it came over."""

    transport: httpx.BaseTransport | None = None

    def grade(self, task: TaskData, files: Patch, *, seed: int, exchanges: Sequence[Exchange] = ()) -> Grade:
        """The verdict."""
        if not task.graded_by:
            return super().grade(task, files, seed=seed)
        said = [{"request": one.request, "answer": one.answer} for one in exchanges]
        try:
            return paid(self._conversed("score", task, {"exchanges": said}, files))
        except RatchetError as error:
            return Grade(verdict=Verdict.ERROR, reason=str(error))

    def proven(self, task: TaskData) -> str | None:
        """Why a task's own solution cannot be trusted; a bridged one is asked of its taskset, which may have no check without a model."""
        if not task.graded_by:
            return super().proven(task)
        try:
            valid = self._conversed("validate", task, {}, None).get("valid")
        except RatchetError as error:
            return f"its own check could not be made: {error}"
        return "its own check says that its solution does not hold" if valid is False else None

    def _conversed(self, act: str, task: TaskData, given: object, files: Patch | None) -> dict[str, Any]:
        """`files`: what the agent changed, where there was one."""

        def apply(box: Box) -> None:
            assert files is not None
            if {path: content.encode() for path, content in task.files.items()} != dict(box.patch().files):
                raise Refused("its set-up does not lay out the same twice, so what the agent changed cannot be laid over it")
            for path, content in files.items():
                if content is None or any(gone.startswith(f"{path}/") for gone in task.files):  # or a folder that is a file now
                    box.exec(["/bin/rm", "-rf", "--", path], deadline_s=ANSWER_S, most_output_bytes=1 << 12)
                if content is not None:
                    box.put(path, content.encode())

        with scratched("bridge") as made:
            box = _opened(self.boxes, made, task.grading_s)
            try:
                hands = Hands(box, time.monotonic() + task.grading_s, None if files is None else apply)
                return Bridge(task.graded_by, self.transport).converse(act, task.key, given, do=hands.do)
            finally:
                box.stop()


def paid(done: Mapping[str, Any]) -> Grade:
    """What a bridge's reward comes to; one beyond 0 to 1 cannot be compared with anything."""
    reward = done.get("reward")
    if not isinstance(reward, int | float) or math.isnan(reward) or not 0.0 <= reward <= 1.0:
        return Grade(
            verdict=Verdict.ERROR, reason=f"the taskset's reward is {reward!r}: weigh its rewards so that they are from 0 to 1 together"
        )
    verdict = Verdict.PASSED if reward >= 1.0 else Verdict.FAILED
    return Grade(verdict=verdict, reason=f"reward {reward:g} of {done.get('rewards')}", reward=float(reward))


def _opened(boxes: Boxes, made: Path, within_s: float) -> Box:
    """A box with an empty workspace, and room for a verifier's own files."""
    folder = made / "work"
    folder.mkdir()
    open_to_all(folder)
    return boxes.open(BoxSpec(limits=GRADING, workspace=folder, lifetime_s=within_s + 30, scratch=SCRATCH))
