"""Where agents sit: a task's folder, laid out once for all its tries; for each try a socket and a box; and boxes that are open in advance.

    prepare(task) ──▶ a seat is opened beside the tries at work ──▶ take(task) ──▶ work ──▶ leave()

A box that was opened in advance may have died, or have waited too long, before anybody wants it: it is asked whether it lives, and one that
does not is thrown away and another opened. At most `ahead` are kept; the oldest goes first. All end with `close`, and with this process.
A box ends with the thread that opened it, as the kernel counts parents; so one thread opens those of the future, and stays.
"""

import shutil
import threading
import time
from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue

from app.domain.errors import RatchetError
from app.domain.learning.boxes import Box, Boxes, BoxSpec, Limits
from pipelines.rollouts.grading import open_to_all
from pipelines.rollouts.interception import Socket
from pipelines.rollouts.scratch import scratch
from pipelines.rollouts.tasks import TaskData

IDLE_S = 60.0
"""How long a box may wait for somebody. It lives so much longer than its task takes."""
GRACE_S = 60.0
"""Beyond the task's deadline: the harness's own end, and the patch."""
MOST_FOLDERS = 64


@dataclass
class Folders:
    """Workspaces that tries begin with, by the hash of their task; whoever uses one holds it."""

    root: Path = field(default_factory=lambda: scratch("tasks"))
    _laid_out: OrderedDict[str, Path] = field(default_factory=OrderedDict[str, Path])
    _held: Counter[str] = field(default_factory=Counter[str])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, task: TaskData) -> Path:
        """The task's folder, which nobody changes any more."""
        with self._lock:
            self._held[task.hash] += 1
            if task.hash not in self._laid_out:
                folder = self.root / task.hash / "work"
                folder.mkdir(parents=True)
                task.lay_out(folder)
                open_to_all(folder)
                self._laid_out[task.hash] = folder
            self._laid_out.move_to_end(task.hash)
            self._forget()
            return self._laid_out[task.hash]

    def release(self, task: TaskData) -> None:
        """One user less."""
        with self._lock:
            self._held[task.hash] -= 1

    def _forget(self) -> None:
        idle = [name for name in self._laid_out if self._held[name] <= 0]
        for name in idle[: max(0, len(self._laid_out) - MOST_FOLDERS)]:
            shutil.rmtree(self._laid_out.pop(name).parent, ignore_errors=True)

    def remove(self) -> None:
        """All of them."""
        shutil.rmtree(self.root, ignore_errors=True)


@dataclass
class Seat:
    """A box with its socket."""

    task: TaskData
    socket: Socket
    box: Box
    folders: Folders
    opened_at: float = field(default_factory=time.monotonic)

    def is_good(self) -> bool:
        """Whether somebody may begin in it."""
        return time.monotonic() - self.opened_at <= IDLE_S and self.box.alive()

    def leave(self) -> None:
        """End the box, and what answers it."""
        try:
            with suppress(RatchetError):  # a box that cannot be ended any more is gone
                self.box.stop()
        finally:
            self.socket.close()
            self.folders.release(self.task)


@dataclass
class Seats:
    """Opens them."""

    boxes: Boxes
    limits: Limits
    ahead: int = 1
    folders: Folders = field(default_factory=Folders)
    _waiting: list[Seat] = field(default_factory=list[Seat])
    _wanted: "Queue[TaskData | None]" = field(default_factory=lambda: Queue[TaskData | None]())
    _opener: threading.Thread | None = None
    _closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, task: TaskData) -> Seat:
        """One for this task. Raises what opening a box raises."""
        while True:
            with self._lock:
                seat = next((seat for seat in self._waiting if seat.task.hash == task.hash), None)
                if seat is not None:
                    self._waiting.remove(seat)
            if seat is None:
                return self._opened(task)
            if seat.is_good():
                return seat
            seat.leave()

    def prepare(self, task: TaskData) -> None:
        """Open one in advance, beside everything else; what cannot be opened now is opened, or refused, when it is taken."""
        with self._lock:
            if self._closed or self._wanted.unfinished_tasks >= self.ahead:
                return
            if self._opener is None:
                self._opener = threading.Thread(target=self._open_in_advance, name="rollout-seats", daemon=True)
                self._opener.start()
            self._wanted.put(task)

    def close(self) -> None:
        """End those that nobody took; later ones are opened when they are taken."""
        with self._lock:
            self._closed = True
        if self._opener is not None:
            self._wanted.put(None)
            self._opener.join()
        for seat in self._waiting:
            seat.leave()
        self._waiting.clear()

    def _open_in_advance(self) -> None:
        while (task := self._wanted.get()) is not None:
            self._prepare(task)
            self._wanted.task_done()

    def _prepare(self, task: TaskData) -> None:
        try:
            seat = self._opened(task)
        except RatchetError:
            return
        with self._lock:
            self._waiting.append(seat)
            too_many = [self._waiting.pop(0) for _ in range(len(self._waiting) - self.ahead)]
        for old in too_many:
            old.leave()

    def _opened(self, task: TaskData) -> Seat:
        folder, socket = self.folders.hold(task), Socket()
        try:
            lifetime_s = task.deadline_s + GRACE_S + IDLE_S
            box = self.boxes.open(BoxSpec(limits=self.limits, workspace=folder, gateway=socket.path, lifetime_s=lifetime_s))
        except BaseException:
            socket.close()
            self.folders.release(task)
            raise
        return Seat(task, socket, box, self.folders)
