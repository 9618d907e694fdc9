"""Batches in memory: the port `BatchStore` over a list of labelled turns."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from threading import Lock

from app.domain.errors import Refused
from app.domain.learning.batches import BatchManifest, LabelledTurn, LabelsMade, Voice, group_of


@dataclass
class MemoryBatchStore:
    """Labels and versions are filled in by the test; one transaction at a time, whatever the policy."""

    labels: list[LabelledTurn] = field(default_factory=list[LabelledTurn])
    parents: dict[str, str | None] = field(default_factory=dict[str, str | None])
    """Each known version's parent."""
    batches: list[BatchManifest] = field(default_factory=list[BatchManifest])
    ended: set[int] = field(default_factory=set[int])
    """Slots whose cycle was held or failed before a candidate was judged."""
    returned: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """(slot, inference id) of labels that were given back."""
    heard: dict[str, list[Voice]] = field(default_factory=dict[str, "list[Voice]"])
    """Whose word decided each turn; where nobody is here, whoever asked."""
    lock: Lock = field(default_factory=Lock)

    @contextmanager
    def cutting(self, policy: str) -> Iterator["MemoryCutSession"]:
        with self.lock:
            before, returned = list(self.batches), list(self.returned)
            try:
                yield MemoryCutSession(self, policy)
            except BaseException:
                self.batches, self.returned = before, returned
                raise


@dataclass
class MemoryCutSession:
    """See the port."""

    store: MemoryBatchStore
    policy: str

    def existing(self, slot: int) -> BatchManifest | None:
        return next((batch for batch in self._own() if batch.slot == slot), None)

    def give_back(self) -> int:
        done = {slot for slot, _ in self.store.returned}
        freed = [(batch.slot, item.inference_id) for batch in self._own() if batch.slot in self.store.ended - done for item in batch.items]
        self.store.returned = [*self.store.returned, *freed]
        return len(freed)

    def lineage(self, champion: str, versions_back: int) -> tuple[str, ...]:
        found = [champion]
        while len(found) <= versions_back and (parent := self.store.parents.get(found[-1])) is not None:
            found.append(parent)
        return tuple(found)

    def known_versions(self) -> frozenset[str]:
        return frozenset(self.store.parents)

    def last_window_end(self) -> datetime | None:
        return max((batch.window_to for batch in self._own()), default=None)

    def unused_labels(
        self, *, versions: Sequence[str], since: datetime | None, until: datetime, slot: int = 0, at_most: int | None = None
    ) -> list[LabelledTurn]:
        used = self._used()
        tries = Counter(inference_id for _, inference_id in self.store.returned)
        fresh = [
            replace(turn, tries=tries[turn.inference_id]) if tries[turn.inference_id] != turn.tries else turn
            for turn in self.store.labels
            if turn.inference_id not in used and turn.labelled_at <= until
            and (turn.version in versions or since is None or turn.labelled_at > since)
        ]  # fmt: skip
        return sorted(fresh, key=lambda turn: turn.inference_id)

    def voices(self, turns: Sequence[LabelledTurn], *, before: datetime) -> Mapping[str, Sequence[Voice]]:
        return self.store.heard

    def made(self, *, since: datetime | None, until: datetime) -> LabelsMade:
        used = self._used()
        found = [t for t in self.store.labels if t.inference_id not in used and (since is None or t.labelled_at > since)]
        inside = [turn for turn in found if turn.labelled_at <= until]
        return LabelsMade(groups=Counter(map(group_of, inside)), first_at=min((turn.labelled_at for turn in inside), default=None))

    def save(self, manifest: BatchManifest) -> None:
        if self._used() & {item.inference_id for item in manifest.items}:
            raise Refused("a turn is in another batch already")
        self.store.batches = [*self.store.batches, manifest]

    def _own(self) -> list[BatchManifest]:
        return [batch for batch in self.store.batches if batch.policy == self.policy]

    def _used(self) -> set[str]:
        done = {slot for slot, _ in self.store.returned}
        return {item.inference_id for batch in self.store.batches if batch.slot not in done for item in batch.items}
