"""What was said against what is there: losses and doubles of a throughput benchmark, event by event, not by totals."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Accounts:
    """One side's ids against the other's."""

    lost: int
    """Acknowledged and not there."""
    duplicated: int
    """There more often than once."""
    unsaid: int
    """There, and nobody was told that it was taken: answers that were refused or never came."""


def settle(*, acknowledged: Iterable[str], kept: Iterable[str]) -> Accounts:
    """Compare the ids that a client was promised with the ids of what is kept, with repetitions."""
    promised, found = set(acknowledged), Counter(kept)
    return Accounts(
        lost=len(promised - found.keys()), duplicated=sum(count - 1 for count in found.values()), unsaid=len(found.keys() - promised)
    )


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How fast events went through a part that runs in a process of its own."""

    per_cpu_s: float
    """Events per second of that process's CPU time, all threads; other processes (broker, database server) and all waiting are left out."""
    per_s: float
    """Events per second by the wall, with all waiting, on whatever the machine had left."""
