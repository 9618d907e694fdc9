"""Which unit a session belongs to, and how likely its arm was: for a canary, and for a holdback."""

from collections.abc import Callable
from dataclasses import dataclass

from app.domain.sessions import Era, Session


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """What unit a session belongs to and how likely its arm was; `problem` where that cannot be."""

    key: tuple[str, ...]
    treated: bool
    probability: float
    stratum: int


Drawing = Callable[[Session], Draw | None]
"""None for a session whose arm and version contradict each other."""


def canary_drawing(*, digest: str, champion: str) -> Drawing:
    """Units of a canary: person and stage."""

    def draw(session: Session) -> Draw | None:
        treated = session.arm == "candidate"
        if session.digest != (digest if treated else champion) or session.arm not in ("candidate", "champion"):
            return None
        probability = session.probability if treated else round(1.0 - session.probability, 12)
        stage = int(session.stage.removeprefix("canary-"))
        return Draw(key=(session.actor, session.stage), treated=treated, probability=probability, stratum=stage)

    return draw


def era_drawing(era: Era) -> Drawing:
    """Units of a holdback: person, era, and the share a canary took meanwhile. Treated is the champion.

    Among those who get champion or reference, the champion's probability is (1-h)(1-s) / ((1-h)(1-s) + h), with h the holdback and s the
    share of a canary that ran at the time.
    """

    def draw(session: Session) -> Draw | None:
        treated = session.arm == "champion"
        if session.digest != (era.champion if treated else era.reference):
            return None
        rest = (1.0 - session.holdback) * (1.0 - session.share)
        probability = rest / (rest + session.holdback)
        stratum = era.generation * 1000 + round(session.share * 100)
        return Draw(key=(session.actor, str(stratum)), treated=treated, probability=probability, stratum=stratum)

    return draw
