"""A box with a workspace, seen from outside: one namespace that stays, with a keeper as its first process (`keeper.py`).

Programs run one after the other in what is left of the one before: the files, never the processes. What the keeper says is believed about
a program (nothing in the box can reach it), and checked against a clock of ours all the same: a keeper that does not answer is a lost box.
"""

import base64
import json
import marshal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.domain.errors import BadInput, Refused
from app.domain.learning.boxes import BoxSpec, Ended, Executed, Patch, Talk, TalkEnded, checked_path
from app.sandbox.limits import limited
from app.sandbox.workspaces import Workspace

GRACE_S = 3.0
"""How long after a deadline the keeper has to say that it was one."""
LOOK_EVERY_S = 0.25
"""How often the weight of the workspace is looked at while a program runs."""
PING_S = 2.0


class Keeping(Talk, Protocol):
    """The running keeper."""

    def ran_out_of_memory(self) -> bool:
        """Whether anything in the box was killed for want of memory."""
        ...

    def abort(self) -> None:
        """Kill the box from any thread; whoever waits for it sees its end."""
        ...


@dataclass
class LiveBox:
    """See the module."""

    spec: BoxSpec
    keeping: Keeping
    workspace: Workspace
    stopped: Callable[[], None]
    """What else goes with the box."""
    ends_at: float = float("inf")
    _lost: bool = False
    _removed: bool = False
    _timer: threading.Timer | None = field(default=None)

    def __post_init__(self) -> None:
        if self.spec.lifetime_s is not None:
            self.ends_at = time.monotonic() + self.spec.lifetime_s
            self._timer = threading.Timer(self.spec.lifetime_s, self.keeping.abort)
            self._timer.daemon = True
            self._timer.start()

    def exec(self, argv: Sequence[str], *, stdin: bytes = b"", deadline_s: float, most_output_bytes: int) -> Executed:
        if self._lost:
            return _ended(Ended.BOX_LOST)
        command = limited(argv, self.spec.limits)
        asked = {"op": "exec", "argv": command, "stdin": stdin, "deadline_s": deadline_s, "most": most_output_bytes}
        try:
            said = self._ask(asked, deadline_s + GRACE_S, most_bytes=3 * most_output_bytes + (1 << 16))
        except TalkEnded as ended:
            return _ended(self._fate(ended))
        if said is None:
            return _ended(Ended.OUTPUT_LIMIT)
        out_of_memory = self.keeping.ran_out_of_memory()
        ended = Ended.OOM if out_of_memory else Ended(said["ended"].decode())
        if out_of_memory:  # what the kernel kills next may be the keeper
            self._end()
        code = int(said["code"]) if ended is Ended.EXITED else None
        return Executed(ended=ended, code=code, stdout=said["stdout"], stderr=said["stderr"])

    def put(self, path: str, data: bytes) -> None:
        asked = {"op": "put", "path": checked_path(path), "data": data}
        try:
            said = self._ask(asked, 30.0, most_bytes=1 << 16)
        except TalkEnded as ended:
            self._lost = True
            raise Refused(f"the box is gone ({self._fate(ended).value}): open another") from ended
        if said is not None and "refused" in said:
            raise BadInput(f"{path} cannot be written in the box: {said['refused'].decode()}")

    def patch(self) -> Patch:
        return self.workspace.patch()

    def alive(self) -> bool:
        if self._lost or time.monotonic() >= self.ends_at:
            return False
        try:
            self._ask({"op": "ping"}, PING_S, most_bytes=1 << 12)
        except TalkEnded:
            self._lost = True
        return not self._lost

    def talk(self, argv: Sequence[str]) -> Talk:
        raise Refused("a box with a workspace runs programs one after the other: open one without to speak to a program")

    def stop(self) -> None:
        self._end()
        if not self._removed:
            self._removed = True
            try:
                self.workspace.remove()
            finally:
                self.stopped()

    def _end(self) -> None:
        """End everything in the box; its files stay, for `patch`, until it is stopped."""
        self._lost = True
        if self._timer is not None:
            self._timer.cancel()
        self.keeping.stop()

    def _fate(self, ended: TalkEnded) -> Ended:
        """Why the box is gone; whatever its programs did not do is our fault."""
        self._lost = True
        return Ended.OOM if ended.ended is Ended.OOM or self.keeping.ran_out_of_memory() else Ended.BOX_LOST

    def _ask(self, asked: dict[str, Any], within_s: float, *, most_bytes: int) -> dict[str, bytes] | None:
        """The keeper's answer; None where the box was ended because its workspace became too heavy. Raises `TalkEnded`."""
        until = min(time.monotonic() + within_s, self.ends_at + GRACE_S)
        self.keeping.send(base64.b64encode(marshal.dumps(asked)), deadline=until)
        while True:
            try:
                said = self.keeping.receive(deadline=min(until, time.monotonic() + LOOK_EVERY_S), most_bytes=most_bytes)
                return {name: base64.b64decode(text) for name, text in json.loads(said).items()}
            except TalkEnded as ended:
                if ended.ended is not Ended.TIMEOUT or time.monotonic() >= until:
                    with suppress(OSError):
                        self.keeping.abort()
                    raise
            if self.workspace.added_bytes() > self.spec.limits.workspace_bytes:
                self._end()
                return None


def _ended(how: Ended) -> Executed:
    return Executed(ended=how, code=None, stdout=b"", stderr=b"")
