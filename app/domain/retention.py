"""How long each class of what people said and did is kept: `[retention]` of the configuration, in days.

The defaults are ninety days for words and tokens and thirty for identities. `inf` (TOML has no null) and None keep a class for ever. What
something still needs is kept as long as it does: see `app.db.upkeep.needs`.
"""

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec

from app.domain.errors import BadConfig


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[retention]` of the configuration."""

    inbox_days: float | None = 7.0
    """Bodies of accepted events, and of what was said to Kafka about them, after they were applied."""
    dedupe_days: float | None = 30.0
    """Identities of events: the same event sent again later than this is a new one. The API states it."""
    segments_days: float | None = 90.0
    """Prompts, answers, tokens and log-probabilities, since they were stored."""
    turns_days: float | None = 90.0
    """Turns with their answers and what was said about them, since they were labelled. Turns are not dropped before their tokens."""
    observations_days: float | None = 90.0
    """Observations about no turn that is known, and retractions of none that is, since they came. What was said about a turn goes with
    it."""
    labels_days: float | None = 90.0
    """Labels that no batch took. The others go with their turns; the rewards that were trained on stay in the batch."""
    exposures_days: float | None = 90.0
    """Who was shown which arm."""
    dead_letters_days: float | None = 30.0
    """Records that could not be applied, since they were last seen."""
    compact_after_h: float = 24.0
    """Segments of a day are put together when the day has been over for this long."""
    compact_bytes: int = 256 * 1024 * 1024
    """A compacted segment is closed at about this size; from 128 MiB to 512 MiB readers are best served."""

    def __post_init__(self) -> None:
        """Settings that no data could keep to. Raises ValueError."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}: give a number above 0, or leave the line out")
        if not _within(self.segments_days, self.turns_days):
            raise ValueError("segments_days is above turns_days: nobody would find the words again when their person asks to be forgotten")
        if not _within(self.labels_days, self.turns_days):
            raise ValueError("labels_days is above turns_days: a label says nothing without its turn")
        if not _within(self.inbox_days, self.dedupe_days):
            raise ValueError("inbox_days is above dedupe_days: the body of an event goes with its identity at the latest")

    @property
    def horizon(self) -> timedelta | None:
        """How long an event is known again; None is for ever."""
        return days(self.dedupe_days)


def _within(inner: float | None, outer: float | None) -> bool:
    return (math.inf if inner is None else inner) <= (math.inf if outer is None else outer)


def days(number: float | None) -> timedelta | None:
    """A setting in days; None where that is for ever."""
    return None if number is None or math.isinf(number) else timedelta(days=number)


def retention(toml: Mapping[str, Any]) -> Retention:
    """The table of the parsed configuration. Raises `BadConfig`."""
    try:
        return msgspec.convert(toml.get("retention", {}), Retention)
    except msgspec.ValidationError as error:
        raise BadConfig(f"[retention] in the configuration: {error}") from error
