"""When keys were used: noted as requests come in, written beside them, at most once a minute for each key."""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

from app.domain.access import USED_EVERY, ApiKey
from app.domain.errors import RatchetError
from app.domain.ports import Clock, Keys

log = logging.getLogger("ratchet.api")


class Uses:
    """What one process knows of them; others write theirs, and each sees with the keys what was written."""

    def __init__(self, keys: Keys, *, clock: Clock, thread: ThreadPoolExecutor) -> None:
        self._keys = keys
        self._clock = clock
        self._thread = thread
        self._used_at: dict[str, datetime] = {}
        """By a key's id, the last use that any process noted."""
        self._unwritten: dict[str, datetime] = {}
        self._writing: asyncio.Task[None] | None = None

    def note(self, key: ApiKey) -> None:
        """Once in `USED_EVERY` have it written that a key was used, with nobody waiting."""
        now, noted = self._clock(), self._used_at.get(key.id)
        if noted is not None and now - noted < USED_EVERY:
            return
        self._used_at[key.id] = self._unwritten[key.id] = now
        self.write_soon()

    def know(self, keys: Sequence[ApiKey]) -> None:
        """Take over what was written; keys that have ended are forgotten."""
        noted = {key.id: [at for at in (key.last_used_at, self._used_at.get(key.id)) if at is not None] for key in keys}
        self._used_at = {key_id: max(times) for key_id, times in noted.items() if times}

    def write_soon(self) -> None:
        """Begin to write what is not written yet."""
        if self._unwritten and (self._writing is None or self._writing.done()):
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        """Until nothing is left; what cannot be written is tried again when the keys are read."""
        while used := dict(self._unwritten):
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._keys.note_used, used)
            except RatchetError as error:
                log.warning("uses_of_keys_not_written error=%s", error)
                return
            self._unwritten = {key_id: at for key_id, at in self._unwritten.items() if used.get(key_id) != at}
