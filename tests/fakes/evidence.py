"""Evidence of a canary at the last stage of its ramp, with nothing wrong about it; whoever tests names what is otherwise."""

from collections.abc import Mapping
from typing import Any

from pipelines.evaluation.counting.evidence import Evidence, micros
from pipelines.evaluation.counting.references import Reference
from pipelines.evaluation.counting.unit_book import UnitBook
from tests.fakes.sessions import AT


def calm(*, at: int, **changes: Any) -> Evidence:
    """Taken at `at` (microseconds since the epoch), without a unit."""
    values: dict[str, Any] = {
        "release_id": "r", "policy": "tab", "digest": "v2", "champion": "v1", "at": at, "state": "CANARY", "stage": 2,
        "stage_since": micros(AT), "since": micros(AT), "lanes": (), "assigned": (), "duplicates": 0, "swapped": 0, "late": 0, "lag_s": 0.0,
        "last_session_at": at, "held_since": None, "found_earlier": (), "references": {}, "n_max": {}, "declared_share": 0.5, "slos": (),
        "hard": (),
    }  # fmt: skip
    return Evidence(**{**values, **changes})


def counted(book: UnitBook, references: Mapping[str, Reference], *, at: int, **changes: Any) -> Evidence:
    """What a book has counted until `at`."""
    found: dict[str, Any] = {
        "lanes": book.lanes(), "assigned": book.assigned(), "duplicates": book.duplicates, "swapped": book.swapped, "late": book.late,
        "references": dict(references), "slos": book.slos(),
    }  # fmt: skip
    return calm(at=at, **{**found, **changes})
