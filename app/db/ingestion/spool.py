"""What was answered while the database is away waits on this machine's disk, and goes into the inbox when it is back.

    append ──▶ inbox ──(away, or silent for PATIENCE_S)──▶ spool: written, fsynced ──▶ accepted
                 ▲                                           │
                 └── its thread, every RETRY_S: a file at a time, then the file goes ◀┘
                                   └──(what the inbox will never take)──▶ dead letters, the rest goes on

Nothing is doubled: an event that reached the inbox after all is known there by its (source, id). A file is locked by whoever writes it; one
whose owner died is sent by the next process with the same folder. Not covered: a machine that is lost with its disk, so a client's own
events are never kept here: their 202 means the database.
"""

import asyncio
import fcntl
import hashlib
import logging
import os
import struct
import threading
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import msgspec

from app.domain.errors import BadRequest, Overloaded, OwnFault, RatchetError, Unavailable
from app.domain.ids import utc_now
from app.domain.ports import Inbox, Receipt
from app.domain.telemetry.events import CloudEvent, envelope
from app.domain.telemetry.streams import DeadLetter
from app.durable import sync
from app.secret_files import private_folder

log = logging.getLogger(__name__)
PATIENCE_S = 2.0
"""How long a commit may take before the database counts as away: people wait for it, once in an outage."""
RETRY_S = 0.5
SENDING_S = 15.0
"""How long the sender waits for a batch: it has nobody who waits for it."""
ORPHANS_EVERY_S = 10.0
MAX_BYTES = 1024**3
"""Some hundred thousand turns; what does not fit is refused as it is without a spool."""
FILE_BYTES = 8 * 1024**2
"""What has more is followed by another file: each is read into memory whole, and fits into what an inbox has in flight."""
BATCH = 200
TRIES = 3
"""In a row, without any success: then what fails in a way nobody expected counts as what the inbox will never take."""
MANY = 5
"""So many events of one type in a row that fail in a way nobody expected, and none that passes: then the fault is ours."""
TOPIC = "spool"
"""Where dead letters lay that come from here."""
_HEAD = struct.Struct("<II")
"""Length and CRC-32 before each event: what a power cut left half-written is no event, and nobody was told that it is kept."""
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(CloudEvent).decode


@dataclass
class _File:
    """Events on the disk; the handle holds the lock that says whose they are."""

    path: Path
    handle: BinaryIO
    bytes: int


class Waiting(NamedTuple):
    """A file, and what is whole in it."""

    path: Path
    events: list[CloudEvent]
    unreadable: list[tuple[bytes, str]]
    """What is no event of this version, and why not."""


class Bury(Protocol):
    """Keeps dead letters, and counts them. Raises `Unavailable`."""

    def __call__(self, dead: Sequence[DeadLetter], *, now: datetime) -> None: ...


class Spool:
    """Files of events in a folder that several processes may share. Safe for threads."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._folder = private_folder(folder)
        self._max_bytes = max_bytes
        self._open: _File | None = None
        self._full: list[_File] = []
        """Written no more, oldest first."""
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes of this process that wait here."""
        return sum(file.bytes for file in [*self._full, self._open] if file is not None)

    def put(self, events: Sequence[CloudEvent]) -> None:
        """Keep the events; they are on the disk when this returns. Raises `Overloaded` where there is no room, `Unavailable`."""
        packed = [_encode(event) for event in events]
        data = b"".join(_HEAD.pack(len(one), zlib.crc32(one)) + one for one in packed)
        with self._lock:
            if self.held_bytes + len(data) > self._max_bytes:
                raise Overloaded(f"{self.held_bytes} bytes wait for the database on this machine's disk already", retry_after_s=5.0)
            try:
                self._write(data)
            except OSError as error:
                self._cut()
                raise Unavailable(f"the database is away and the disk takes nothing ({error}): check both, then send again") from error

    def oldest(self) -> Waiting | None:
        """The oldest file and its events; what is put from now on goes into another one. None where nothing waits."""
        with self._lock:
            if not self._full:
                self._shut()
            path = self._full[0].path if self._full else None
        if path is None:
            return None
        waiting = Waiting(path, [], [])
        for data in _read(path):
            try:
                waiting.events.append(_decode(data))
            except (msgspec.MsgspecError, ValueError) as error:
                waiting.unreadable.append((data, str(error)))
        return waiting

    def done(self, path: Path) -> None:
        """The events of the file are in the inbox: it goes."""
        with self._lock:
            for file in [file for file in self._full if file.path == path]:
                self._full.remove(file)
                _remove(file)
        sync(self._folder)

    def adopt(self) -> None:
        """Take over the files of processes that are gone: those that nobody has locked."""
        with self._lock:
            mine = {file.path for file in [*self._full, self._open] if file is not None}
            for path in sorted(set(self._folder.glob("*.events")) - mine):
                if (handle := _locked(path)) is not None:
                    self._full.append(_File(path, handle, path.stat().st_size))

    def close(self) -> None:
        """Let go of the files; what is in them stays for the next process."""
        with self._lock:
            self._shut()
            for file in self._full:
                file.handle.close()
            self._full.clear()

    def _write(self, data: bytes) -> None:
        if self._open is None:
            path = self._folder / f"{time.time_ns():020d}-{uuid.uuid4().hex}.events"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._open = _File(path, os.fdopen(descriptor, "wb", buffering=0), 0)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            sync(self._folder)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._open.handle.fileno(), rest) :]
        os.fsync(self._open.handle.fileno())
        self._open.bytes += len(data)
        if self._open.bytes >= FILE_BYTES:
            self._shut()

    def _cut(self) -> None:
        """Nobody knows what of the last write is on the disk, so it goes, and nothing is written behind it."""
        file, self._open = self._open, None
        if file is None:
            return
        if file.bytes:
            self._full.append(file)
        with suppress(OSError):  # where even this fails, the checksums tell where the whole events end
            if file.bytes:
                os.ftruncate(file.handle.fileno(), file.bytes)
            else:
                _remove(file)

    def _shut(self) -> None:
        if self._open is not None:
            self._full.append(self._open)
            self._open = None


def _remove(file: _File) -> None:
    """Under its lock: whoever locks it next sees that it is gone."""
    try:
        file.path.unlink(missing_ok=True)
    finally:
        file.handle.close()


def _locked(path: Path) -> BinaryIO | None:
    """The file, locked; None where somebody lives who has it, or where it is gone."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    if not path.exists():  # sent and removed by another one between both
        file.close()
        return None
    return file


def _read(path: Path) -> Iterator[bytes]:
    """The whole events of a file, up to the first that is not whole."""
    with path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, checksum = _HEAD.unpack(head)
            data = file.read(length)
            if len(data) != length or zlib.crc32(data) != checksum:
                log.warning("event=spool_cut file=%s at=%d", path.name, file.tell())
                return
            yield data


def _dead(event: CloudEvent, error: Exception, now: datetime) -> DeadLetter:
    reason = str(error) if isinstance(error, BadRequest) else f"{type(error).__name__}: {error}"
    return _letter(_encode(event), envelope(event, now), event.data, reason)


def _letter(packed: bytes, headers: Mapping[str, str], payload: bytes, reason: str) -> DeadLetter:
    """Its offset is 48 bits that say which event it was: put aside again, it is the same letter, whatever file it lay in."""
    offset = int.from_bytes(hashlib.blake2b(packed, digest_size=6).digest())
    return DeadLetter(topic=TOPIC, partition=0, offset=offset, headers=headers, payload=payload, reason=reason)


class SpooledInbox:
    """The Inbox port for answers: the inbox, or this machine's disk while it is away. One per process."""

    def __init__(
        self, inbox: Inbox, spool: Spool, *, bury: Bury, patience_s: float = PATIENCE_S, retry_s: float = RETRY_S,
        sending_s: float = SENDING_S,
    ) -> None:  # fmt: skip
        self._inbox = inbox
        self._spool = spool
        self._bury = bury
        self._unexpected: Counter[str] = Counter()
        """Failures in a row that nobody expected, by type of event."""
        self._patience_s, self._retry_s, self._sending_s = patience_s, retry_s, sending_s
        self._away = False
        self._writing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spool")
        """Its own: what waits for the database may have all other threads."""
        self._stop = threading.Event()
        self._sending = threading.Thread(target=self._send_forever, name="spool-sender", daemon=True)
        self._sending.start()

    @property
    def held_bytes(self) -> int:
        """Bytes that wait on the disk."""
        return self._spool.held_bytes

    async def append(self, events: Sequence[CloudEvent]) -> list[Receipt]:
        """Commit the events to the inbox, or keep them here for it. Raises `Overloaded` where either is full, `Unavailable`."""
        if not self._away or not self._spool.held_bytes:  # with nothing to send, nobody but us finds out that it is back
            try:
                async with asyncio.timeout(self._patience_s):
                    return await self._inbox.append(events)
            except Overloaded:
                raise  # it is there and says no
            except (Unavailable, TimeoutError) as error:
                log.warning("event=spooling error=%s", error or f"no commit within {self._patience_s:g} s")
                self._away = True
        await asyncio.get_running_loop().run_in_executor(self._writing, self._spool.put, events)
        return [Receipt.ACCEPTED] * len(events)

    def close(self, *, patience_s: float = 0.0) -> None:
        """Send what waits, for so long at most; the rest stays for the next process."""
        ends = time.monotonic() + patience_s
        while self._spool.held_bytes and time.monotonic() < ends:
            time.sleep(0.05)
        self._stop.set()
        self._sending.join(self._retry_s + self._sending_s)
        self._writing.shutdown()
        self._spool.close()

    def _send_forever(self) -> None:
        looked_at = float("-inf")
        with asyncio.Runner() as runner:  # one for all tries: a commit that is late answers a loop that is still there
            while not self._stop.is_set():
                if time.monotonic() - looked_at > ORPHANS_EVERY_S:
                    looked_at = time.monotonic()
                    self._quietly(self._spool.adopt)
                if self._spool.held_bytes:
                    self._quietly(lambda: self._send(runner))
                self._stop.wait(self._retry_s)

    def _quietly(self, work: Callable[[], None]) -> None:
        """One try; whatever it fails with, there is a next one, and the events stay where they are."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a disk or a database that fails now may not in a moment
            log.warning("event=spool_waits error=%s: %s", type(error).__name__, error)

    def _send(self, runner: asyncio.Runner) -> None:
        """Every file into the inbox. Raises `Unavailable`, `TimeoutError` while it is away still, `OwnFault`."""
        while (waiting := self._spool.oldest()) is not None:
            path, events, unreadable = waiting
            self._put_aside([_letter(data, {}, data, reason) for data, reason in unreadable])
            for start in range(0, len(events), BATCH):
                self._send_some(runner, events[start : start + BATCH])
            self._spool.done(path)
            self._away = False  # what comes now goes there by itself, and the rest of what waited beside it
            log.info("event=spool_sent count=%d", len(events))

    def _send_some(self, runner: asyncio.Runner, events: Sequence[CloudEvent]) -> None:
        """Into the inbox; what it will never take goes among the dead letters, as what ingestion cannot apply does."""
        refused, tries = self._refused(runner, events), 1
        while tries < TRIES and any(not isinstance(error, BadRequest) for _, error in refused):
            self._stop.wait(self._retry_s)
            again = self._refused(runner, [event for event, _ in refused])
            refused, tries = again, tries + 1 if len(again) == len(refused) else 1
        unexpected = self._judged(events, refused)
        now = utc_now()
        self._put_aside([_dead(event, error, now) for event, error in refused])
        self._unexpected = unexpected

    def _put_aside(self, letters: Sequence[DeadLetter]) -> None:
        if letters:
            self._bury(letters, now=utc_now())
        for letter in letters:
            log.warning("event=dead_letter topic=%s partition=%d offset=%d reason=%s", TOPIC, 0, letter.offset, letter.reason)

    def _refused(self, runner: asyncio.Runner, events: Sequence[CloudEvent]) -> list[tuple[CloudEvent, Exception]]:
        """Send them; those that the inbox will never take, found by halving, each with the reason. Raises what may pass."""
        why, half = self._refusal(runner, events), len(events) // 2
        if why is None:
            return []
        return self._refused(runner, events[:half]) + self._refused(runner, events[half:]) if half else [(events[0], why)]

    def _refusal(self, runner: asyncio.Runner, events: Sequence[CloudEvent]) -> Exception | None:
        """Send them; why the inbox does not take them, where that is for ever, or nobody knows. Raises what may pass."""
        try:
            runner.run(self._reach(events))
        except BadRequest as error:
            return error
        except (RatchetError, OSError, MemoryError):  # a TimeoutError is an OSError
            raise
        except Exception as error:
            if self._stop.is_set():  # in a process that ends anything may fail
                raise
            return error
        return None

    def _judged(self, events: Sequence[CloudEvent], refused: Sequence[tuple[CloudEvent, Exception]]) -> Counter[str]:
        """Failures in a row when these are put aside. Raises `OwnFault` where they are too many to be the events' fault."""
        passed = Counter(event.type for event in events) - Counter(event.type for event, _ in refused)
        failed = Counter(event.type for event, error in refused if not isinstance(error, BadRequest))
        unexpected = Counter({kind: count for kind, count in (self._unexpected + failed).items() if kind not in passed})
        for kind, count in unexpected.items():
            if failed[kind] and count > MANY:
                raise OwnFault(
                    f"{count} events of type {kind} in a row cannot be taken ({refused[-1][1]!r}): this is no fault of the events, so "
                    "nothing more is put aside; mend the cause, everything waits"
                )
        return unexpected

    async def _reach(self, events: Sequence[CloudEvent]) -> None:
        async with asyncio.timeout(self._sending_s):
            await self._inbox.append(events)
