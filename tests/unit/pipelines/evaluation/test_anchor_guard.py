"""The ratchet guard: one detector over every era since the anchor was renewed, however long ago that was."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta

import pytest

from app.domain.release.releases import Pointer
from app.domain.release.sessions import Era, Session
from pipelines.evaluation.live.guards import AnchorWatch
from tests.fakes.sessions import AT, session
from tests.fakes.watching import small_gates

DAY = timedelta(days=1)
CONFIG = small_gates(units_per_look=50, anchor_run_length_slots=200)


@dataclass(kw_only=True)
class EraBook:
    """The part of the evidence book that the guard reads: eras with their sessions."""

    sessions: dict[int, list[Session]] = field(default_factory=dict[int, list[Session]])
    known: list[Era] = field(default_factory=list[Era])
    reads: list[int] = field(default_factory=list[int])

    def era(self, generation: int, *, days_ago: float, champion: str, success: float, anchor: str = "v1", people: int = 300) -> None:
        """An era of a day: champion against the anchor at equal shares; the anchor succeeds 9 times in 10."""
        start = AT - days_ago * DAY
        self.known.append(
            Era(
                generation=generation, since=start, until=start + DAY, champion=champion, reference=anchor, holdback=0.5, anchor=anchor,
                action="promote", release_id=f"r{generation}",
            )
        )  # fmt: skip
        made: list[Session] = []
        for n in range(people):
            mine = n % 2 == 0
            good = (n // 2) % 10 < (success if mine else 0.9) * 10
            made.append(
                session(
                    generation * 10_000 + n, arm="champion" if mine else "previous", holdback=0.5, share=0.0,
                    digest=champion if mine else anchor, exposed_at=start + timedelta(seconds=n), signals={"task_success": good},
                )
            )  # fmt: skip
        self.sessions[generation] = made

    def eras(self, policy: str) -> list[Era]:
        return sorted(self.known, key=lambda era: era.generation)

    def era_sessions(self, policy: str, era: Era, *, since: datetime | None = None) -> list[Session]:
        self.reads.append(era.generation)
        return [s for s in self.sessions[era.generation] if since is None or s.exposed_at >= since]

    def label_wait_s(self, policy: str) -> float:
        return 0.0

    def units_in(self, policy: str, *, window: timedelta, since: datetime, now: datetime) -> float:
        return 100.0


def _pointer(anchor: str = "v1") -> Pointer:
    return Pointer(
        policy="tab", digest="v9", generation=99, previous=None, anchor=anchor, holdback=0.03, release_id="r", changed_at=AT
    )  # fmt: skip


def _ask(book: EraBook, *, anchor: str = "v1") -> str | None:
    return AnchorWatch("tab", CONFIG, book).ask(_pointer(anchor), now=AT)  # type: ignore[arg-type] - what the guard reads of it


def test_steps_of_a_month_ago_count_as_long_as_the_anchor_was_not_renewed() -> None:
    book = EraBook()
    for generation, days_ago in enumerate((40.0, 35.0, 30.0), start=1):
        book.era(generation, days_ago=days_ago, champion=f"v{generation + 1}", success=0.5)
    found = _ask(book)
    assert found is not None
    assert "worse than the anchor on task_success" in found


def test_champions_as_good_as_the_anchor_raise_no_alarm() -> None:
    book = EraBook()
    for generation in range(1, 6):
        book.era(generation, days_ago=50.0 - 5 * generation, champion=f"v{generation + 1}", success=0.9)
    assert _ask(book) is None


@pytest.mark.parametrize("anchor", ["v5", "v1"])
def test_what_was_before_the_renewal_is_over_even_where_the_same_version_is_anchor_again(anchor: str) -> None:
    book = EraBook()
    for generation in (1, 2, 3):
        book.era(generation, days_ago=30.0 - generation, champion=f"v{generation + 1}", success=0.3)
    book.era(4, days_ago=20.0, champion="v6", success=0.9, anchor="v5")
    if anchor == "v1":
        book.era(5, days_ago=10.0, champion="v7", success=0.9, anchor="v1")
    assert _ask(book, anchor=anchor) is None


def test_an_era_that_is_over_is_read_once() -> None:
    book = EraBook()
    book.era(1, days_ago=30.0, champion="v2", success=0.9)
    book.era(2, days_ago=0.5, champion="v3", success=0.9)
    watch = AnchorWatch("tab", CONFIG, book)  # type: ignore[arg-type] - what the guard reads of it
    for minute in range(3):
        watch.ask(_pointer(), now=AT + timedelta(minutes=minute))
    assert book.reads == [1, 2, 2, 2]


def test_an_era_is_complete_an_hour_and_a_window_after_its_end() -> None:
    """The window of these gates takes half an hour; what is complete is read once more."""
    book = EraBook()
    book.era(1, days_ago=1.0, champion="v2", success=0.9)  # ends at AT
    watch = AnchorWatch("tab", CONFIG, book)  # type: ignore[arg-type] - what the guard reads of it
    last = timedelta(hours=1, seconds=CONFIG.window_s)
    for after in (timedelta(minutes=5), last, last + timedelta(minutes=1), last + timedelta(minutes=2), last + timedelta(minutes=3)):
        watch.ask(_pointer(), now=AT + after)
    assert book.reads == [1, 1, 1]
