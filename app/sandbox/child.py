"""One started program: reads and writes against a deadline and a bound, and an end that takes everything it started along.

Nothing waits for the end of a pipe: a process that was left in the background may hold it for ever. What ends a program is its own exit,
seen through its pidfd, its deadline, or the bound on what it says.
"""

import os
import select
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

from app.domain.learning.boxes import Ended, Executed, TalkEnded

CHUNK_BYTES = 1 << 16
GRACE_S = 5.0
"""How long the killed may take to be gone before we go on without them."""


class Child:
    """A process with three pipes. `kill` ends its whole tree, and is called once, when the process has not ended by itself too."""

    def __init__(self, process: subprocess.Popen[bytes], *, kill: Callable[[], None]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.process = process
        self._kill = kill
        self._stdin, self._stdout, self._stderr = process.stdin.fileno(), process.stdout.fileno(), process.stderr.fileno()
        for pipe in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(pipe, False)
        self._pidfd = os.pidfd_open(process.pid)
        self._unread = bytearray()
        self._ended = False

    def run(self, stdin: bytes, *, deadline_s: float, most_output_bytes: int) -> Executed:
        """Feed it, hear it out, to its exit, its deadline or the bound."""
        deadline, said, told = time.monotonic() + deadline_s, {self._stdout: bytearray(), self._stderr: bytearray()}, memoryview(stdin)
        poll, ended = select.poll(), None
        for pipe in (self._stdout, self._stderr, self._pidfd):
            poll.register(pipe, select.POLLIN)
        poll.register(self._stdin, select.POLLOUT)
        while ended is None:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                ended = Ended.TIMEOUT
            for pipe, _ in ready:
                if pipe == self._stdin:
                    told = told[self._write(told) :]
                    if not told:
                        poll.unregister(self._stdin)
                        self._close_stdin()
                elif pipe != self._pidfd and not _drain(pipe, said[pipe], most_output_bytes):
                    poll.unregister(pipe)
            if sum(map(len, said.values())) > most_output_bytes:
                ended = Ended.OUTPUT_LIMIT
            elif any(pipe == self._pidfd for pipe, _ in ready):
                ended = Ended.EXITED
        self._end()
        for pipe in said:
            _drain(pipe, said[pipe], most_output_bytes)
        self._close()
        code = self.process.returncode if ended is Ended.EXITED else None
        return Executed(
            ended=ended, code=128 - code if code is not None and code < 0 else code,
            stdout=bytes(said[self._stdout][:most_output_bytes]), stderr=bytes(said[self._stderr][:most_output_bytes]),
        )  # fmt: skip

    def send(self, line: bytes, *, deadline: float) -> None:
        """Write one line. Raises `TalkEnded`."""
        left = memoryview(line + b"\n")
        while left:
            self._await(self._stdin, select.POLLOUT, deadline)
            try:
                left = left[os.write(self._stdin, left[:CHUNK_BYTES]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise TalkEnded(Ended.EXITED, "it ended") from error

    def receive(self, *, deadline: float, most_bytes: int) -> bytes:
        """Read one line. Raises `TalkEnded`."""
        while (end := self._unread.find(b"\n")) < 0:
            if len(self._unread) > most_bytes:
                raise TalkEnded(Ended.OUTPUT_LIMIT, f"it said more than {most_bytes} bytes at once")
            self._await(self._stdout, select.POLLIN, deadline)
            going = _drain(self._stdout, self._unread, most_bytes)
            if not going and b"\n" not in self._unread:  # its last words may come together with its end
                raise TalkEnded(Ended.EXITED, "it ended")
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return line

    def heard(self) -> bytes:
        """What it has said to standard error and nobody read."""
        said = bytearray()
        _drain(self._stderr, said, CHUNK_BYTES)
        return bytes(said)

    def stop(self) -> None:
        """End it with everything it started, see it gone, let go of its pipes."""
        self._end()
        self._close()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)

    def _close(self) -> None:
        self._close_stdin()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _await(self, pipe: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TalkEnded(Ended.TIMEOUT, "it was still running at its deadline")

    def _write(self, told: memoryview) -> int:
        try:
            return os.write(self._stdin, told[:CHUNK_BYTES]) if told else 0
        except BlockingIOError:
            return 0
        except OSError:  # it does not listen: its own business
            return len(told)

    def _close_stdin(self) -> None:
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()


def _drain(pipe: int, into: bytearray, most_bytes: int) -> bool:
    """Take what is there, and one byte more than is allowed at most; False where the pipe has ended."""
    while len(into) <= most_bytes:
        try:
            chunk = os.read(pipe, CHUNK_BYTES)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        into += chunk
    return True
