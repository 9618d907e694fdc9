"""Which unit a session belongs to, and how likely its arm was: for a canary, and for a holdback."""

from collections.abc import Callable
from dataclasses import dataclass

from app.domain.release.assignment import is_lasting, unit_interval
from app.domain.release.sessions import Era, Session


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
    """Units of a canary: person, stage and day, as they were drawn."""

    def draw(session: Session) -> Draw | None:
        treated = session.arm == "candidate"
        if session.digest != (digest if treated else champion) or session.arm not in ("candidate", "champion"):
            return None
        probability = session.probability if treated else round(1.0 - session.probability, 12)
        stage = int(session.stage.removeprefix("canary-").partition(".")[0])
        return Draw(key=(session.actor, session.stage), treated=treated, probability=probability, stratum=stage)

    return draw


def lasting_drawing(*, share: float) -> Drawing:
    """Units of the lasting cohort's comparison: persons, drawn once for the whole ramp. Treated is whoever could get the candidate."""

    def draw(session: Session) -> Draw | None:
        return Draw(key=(session.actor,), treated=not is_lasting(session.stage), probability=1.0 - share, stratum=0)

    return draw


def era_drawing(era: Era) -> Drawing:
    """Units of a holdback: person, era, day of the draw, and the stage of the canary that ran meanwhile. Treated is the champion.

    Among those who get champion or reference, the champion's probability is (1-h)(1-s) / ((1-h)(1-s) + h), with h the holdback and s the
    share of a canary that ran at the time. That holds within one stage of one release only: whoever met two canaries of one share had two
    chances not to be taken by them. And each stratum draws the holdback anew, so that a person's arm in one says nothing about the next.
    """

    def draw(session: Session) -> Draw | None:
        treated = session.arm == "champion"
        if session.digest != (era.champion if treated else era.reference):
            return None
        rest = (1.0 - session.holdback) * (1.0 - session.share)
        probability = rest / (rest + session.holdback)
        stratum, day = _stratum(era.generation, session), session.stage.partition(".")[2]
        return Draw(key=(session.actor, str(stratum), day), treated=treated, probability=probability, stratum=stratum)

    return draw


def _stratum(generation: int, session: Session) -> int:
    """A number for the era, and the release and stage of the canary that ran meanwhile (`canary-1` and `holdback-1` are one stage)."""
    stage = session.stage.partition(".")[0].partition("-")[2]
    return round(unit_interval("stratum", str(generation), session.release_id or "", stage) * (1 << 53))
