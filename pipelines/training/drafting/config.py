"""How a draft head is made. The defaults are the vetted setting."""

import msgspec

from app.domain.errors import BadConfig


class DraftingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One head, from a version's own answers."""

    after_answers: int = 0
    """So many answers a new champion has given when the loop trains its head, between cycles and at the lowest priority. 0: never by
    itself, `ratchet model draft` does it."""
    seconds: float = 600.0
    """Of training, reading the answers included: a third of it at most. The first of `seconds` and `steps` ends it."""
    steps: int = 20_000
    """Of the optimizer. Where these end it, the same answers and seed give the same head."""
    tokens: int = 60_000
    """Of answers, the newest first: their states take 2 bytes × hidden size each."""
    vocabulary: int = 8192
    """Tokens that it may draft: the most frequent of the answers."""
    held_out: float = 0.2
    """Share of the people whose answers judge it."""
    inner: float = 2.0
    """Inner size of its block over the hidden size."""
    positions: int = 512
    """Places per optimizer step."""
    learning_rate: float = 1e-3
    least_answers: int = 30
    """Fewer train nothing."""
    least_people: int = 5
    """Held-out people, or conversations where nobody is named: fewer judge nothing."""
    margin: float = 0.05
    """What it must gain for sure: less is not worth its memory."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("seconds", "steps", "tokens", "vocabulary", "inner", "positions", "learning_rate"):
            if not getattr(self, name) > 0:
                raise BadConfig(f"drafting.{name} is {getattr(self, name)}: give a number above 0")
        if self.after_answers and self.after_answers < self.least_answers:
            raise BadConfig(
                f"drafting.after_answers is {self.after_answers}, and a head is trained on {self.least_answers} answers at least "
                "(drafting.least_answers): wait for as many, or 0 for no head"
            )
        if not 0.0 < self.held_out < 1.0 or self.margin < 0:
            raise BadConfig("drafting.held_out is a share between 0 and 1, and drafting.margin at least 0")
        if self.least_people < 2:
            raise BadConfig(f"drafting.least_people is {self.least_people}: a gain has an interval from two people at least")
