"""Thousands of people with hidden, differing preferences, drawn from a seed: the same seed gives the same people for ever."""

import random
from dataclasses import dataclass

from pipelines.simulation.editing import Taste

PANEL = "panel"
TIERS = ("free", "pro", "team")


@dataclass(frozen=True, kw_only=True)
class Person:
    """One simulated person; everything but `name` and `tier` is hidden from the service."""

    name: str
    tier: str
    """What the product sends as the tier; `panel` for held-out people, who never consent to training."""
    taste: Taste
    carelessness: float
    """Probability of reverting an answer whatever it is like, for reasons of their own."""
    talkativeness: float
    """Probability of writing a follow-up at all."""

    @property
    def held_out(self) -> bool:
        """Whether this person measures and is never learned from."""
        return self.tier == PANEL


def person(seed: int, index: int, *, held_out: bool = False) -> Person:
    """The person of that number in the population of `seed`."""
    draw = random.Random(f"{seed}/{'held-out' if held_out else 'person'}/{index}")
    taste = Taste(
        docstrings=draw.random() < 0.2, comments=draw.random() < 0.6, prints=draw.random() < 0.5, prose=draw.random() < 0.03
    )  # fmt: skip
    return Person(
        name=f"{'panel' if held_out else 'dev'}-{seed}-{index:05d}",
        tier=PANEL if held_out else draw.choice(TIERS),
        taste=taste,
        carelessness=draw.uniform(0.0, 0.1),
        talkativeness=draw.uniform(0.2, 0.8),
    )
