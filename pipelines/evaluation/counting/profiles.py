"""What an arm's traffic looks like in all, for the reward-hack monitors: sums over the turns of the units that were counted."""

import math

import msgspec

from app.domain.release.sessions import Session


class ArmProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the turns of one arm; plain numbers, so that they are stored and hashed with the evidence."""

    arm: str
    """`treated` or `control`."""
    turns: int = 0
    labelled: int = 0
    excluded: int = 0
    """Labelled turns that labelling excluded, for whatever reason."""
    covered: int = 0
    """Labelled turns that anybody reacted to."""
    rewarded: int = 0
    """Labelled turns that were not excluded: those that the reward figures are about."""
    reward: float = 0.0
    reward_squared: float = 0.0
    at_ceiling: int = 0
    """Rewards at the top of the reward's range."""
    tokens: float = 0.0
    tokens_squared: float = 0.0
    terms: dict[str, float] = {}
    """Sum of absolute values per term of the reward."""

    @property
    def reward_std(self) -> float:
        """NaN without rewards."""
        return _std(self.rewarded, self.reward, self.reward_squared)

    @property
    def length_mean(self) -> float:
        """Tokens per answer; NaN without turns."""
        return self.tokens / self.turns if self.turns else math.nan

    @property
    def length_std(self) -> float:
        return _std(self.turns, self.tokens, self.tokens_squared)


def with_session(profile: ArmProfile, session: Session, *, ceiling: float) -> ArmProfile:
    """The profile with one more served turn; an exposure without a turn is a fault, and the family's business."""
    if not session.served:
        return profile
    length, reward = float(session.completion_tokens), session.reward
    counted = session.labelled and not session.excluded and reward is not None
    paid = reward if counted and reward is not None else 0.0
    return ArmProfile(
        arm=profile.arm, turns=profile.turns + 1, labelled=profile.labelled + session.labelled,
        excluded=profile.excluded + (session.labelled and session.excluded),
        covered=profile.covered + (session.labelled and bool(session.signals)), rewarded=profile.rewarded + counted,
        reward=profile.reward + paid, reward_squared=profile.reward_squared + paid**2,
        at_ceiling=profile.at_ceiling + (counted and paid >= ceiling - 1e-9), tokens=profile.tokens + length,
        tokens_squared=profile.tokens_squared + length**2, terms=_with_terms(profile.terms, session) if counted else profile.terms,
    )  # fmt: skip


def _with_terms(terms: dict[str, float], session: Session) -> dict[str, float]:
    spoken = {name: abs(value) for name, value in (session.terms or {}).items() if value is not None}
    return {name: terms.get(name, 0.0) + spoken.get(name, 0.0) for name in sorted({*terms, *spoken})}


def _std(count: int, total: float, squared: float) -> float:
    return math.sqrt(max(0.0, squared / count - (total / count) ** 2)) if count else math.nan
