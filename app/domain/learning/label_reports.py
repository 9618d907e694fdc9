"""What the label report says of a policy: how turns were labelled, what stayed silent, what was left out."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TermReport:
    """One term over all current labels."""

    name: str
    spoke: int
    mean: float | None
    """Of the values where it spoke; None where it never did."""
    abstained: dict[str, int]
    """Labels by reason of abstention."""

    @property
    def abstention_share(self) -> float:
        """Share of labels about which the term said nothing."""
        silent = sum(self.abstained.values())
        return silent / (silent + self.spoke) if silent + self.spoke else 0.0


@dataclass(frozen=True, kw_only=True)
class LabelReport:
    """Current labels of one policy."""

    policy: str
    labels: int
    revised: int
    """Labels that a later observation corrected at least once."""
    held_out: int
    reward_mean: float | None
    reward_quantiles: tuple[float, ...]
    """At 0, 25, 50, 75 and 100 %; empty without labels."""
    moods: dict[str, int]
    """Follow-ups by what they were read as."""
    terms: tuple[TermReport, ...]
    rule_sets: dict[str, int]
    """Labels by rule set digest."""
    versions: dict[str, dict[str, int]]
    """Labels of each version by exclusion; `trainable` counts those without one."""
    counters: dict[str, int]
    """Monotone counts of this policy: late, orphaned, duplicate, …"""
