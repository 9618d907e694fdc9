"""Lets each version in memory draft with the newest head there is for it: its own, or its nearest ancestor's until it has one.

A head may come while the version serves (`ratchet model draft` after a promotion), so the store is asked again and again. One that cannot
be used costs a line in the log and a sentence in `GET /v1/engines`, and the version serves on without it.
"""

import logging
import time
from typing import Any

from app.domain.errors import RatchetError
from app.domain.ports import Beside
from app.policy.decoding.draft_head import HeadDrafter
from app.policy.storage.heads import HeadRecord, nearest_record, read_head, read_record
from app.serving.worker import Worker

log = logging.getLogger(__name__)

EVERY_S = 30.0
"""How often the store is asked for a version's head again."""


class Heads:
    """The heads of one engine's versions. For one thread, residency's."""

    def __init__(self, worker: Worker, weights: Beside, *, every_s: float = EVERY_S) -> None:
        self._worker, self._weights, self._every_s = worker, weights, every_s
        self._asked_at: dict[str, float] = {}
        self._records: dict[str, HeadRecord] = {}
        self._faults: dict[str, str] = {}

    def look(self, digest: str) -> None:
        """Take up the head of a version that is ready, where there is another than it has."""
        now = time.monotonic()
        is_first = digest not in self._asked_at
        if not is_first and now - self._asked_at[digest] < self._every_s:
            return
        self._asked_at[digest] = now
        try:
            # ancestors are asked once: they serve no more, and each costs a request to the storage
            record = (nearest_record if is_first else read_record)(self._weights, digest)
            if record is not None and record != self._records.get(digest):
                self._take(digest, record)
            self._faults.pop(digest, None)
        except (RatchetError, OSError, RuntimeError, ValueError) as error:
            if self._faults.get(digest) != str(error):
                log.warning("draft head not used digest=%s: %s", digest, error)
            self._faults[digest] = str(error)

    def forget(self, digest: str) -> None:
        """The version is dropped; with it went its head."""
        for known in (self._asked_at, self._records, self._faults):
            known.pop(digest, None)

    def said(self) -> dict[str, dict[str, Any]]:
        """By version and drafter: what was drafted and drawn, which head it is, and what is wrong with it."""
        found = self._worker.drafters
        for digest, record in list(self._records.items()):
            if record.kept and "head" in found.get(digest, {}):
                found[digest]["head"]["trained_for"] = record.trained_for
        for digest, fault in list(self._faults.items()):
            found.setdefault(digest, {}).setdefault("head", {})["fault"] = fault
        return found

    def _take(self, digest: str, record: HeadRecord) -> None:
        head = HeadDrafter(read_head(self._weights, record), self._worker.policy(digest)) if record.kept else None
        self._worker.equip(digest, head)
        self._records[digest] = record
        log.info("draft head %s digest=%s trained_for=%s", "taken up" if record.kept else "refused", digest, record.trained_for)
