"""Readings: what the database knows about the loop at one moment, as numbers with labels; the api shows them at `/metrics`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One sample of a metric that the catalogue names."""

    metric: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


class Readings(Protocol):
    """Whoever reads the loop's state."""

    def readings(self) -> list[Reading]:
        """Every sample, bounded in number by policies and versions. Raises `Unavailable`."""
        ...
