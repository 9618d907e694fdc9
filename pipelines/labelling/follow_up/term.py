"""The `follow_up` term: calibrated satisfaction of the user's next message."""

from collections.abc import Callable, Sequence

from app.domain.learning.rewards import Aggregation, TermScore, TurnFacts
from app.domain.telemetry.events import Observation
from app.domain.telemetry.signals import ObservationName
from pipelines.labelling.aggregate import aggregate
from pipelines.labelling.follow_up.classifier import Judgement, Unread, judge

Reader = Callable[[str, str], Judgement]
"""Reads (follow-up, answer); the shipped classifier, or a judge model. Raises `Unread` where it cannot."""


class FollowUp:
    """[-1, 1]: p(satisfied) − p(dissatisfied), 0 for a next step; abstains where the reading is not confident."""

    name = "follow_up"

    def __init__(self, *, confident: float = 0.6, aggregation: Aggregation = Aggregation.EARLIEST, read: Reader | None = None) -> None:
        if not 0.5 <= confident <= 1.0:
            raise ValueError("confident must be from 0.5 to 1: below that two readings could both be the confident one")
        self._confident = confident
        self._aggregation = aggregation
        self._read = read or shipped

    def score(self, turn: TurnFacts, observations: Sequence[Observation], *, weight: float) -> TermScore:
        """Aggregate over the turn's follow-ups that could be read; the moods of all are in the detail."""
        mine = [o for o in observations if o.name == ObservationName.FOLLOW_UP]
        if not mine:
            return TermScore(name=self.name, value=None, weight=weight, abstained="no_observation")
        evidence = tuple(o.id for o in mine)
        try:
            read = [self._read(str(o.value), turn.completion) for o in mine]
        except Unread as error:
            detail = {"error": str(error)[:200]}
            return TermScore(name=self.name, value=None, weight=weight, abstained="unread", evidence=evidence, detail=detail)
        values = [value for j in read if (value := j.satisfaction(confident=self._confident)) is not None]
        detail = {"moods": [j.mood.value for j in read], "by": sorted({j.by for j in read})}
        if not values:
            return TermScore(name=self.name, value=None, weight=weight, abstained="uncertain", evidence=evidence, detail=detail)
        return TermScore(name=self.name, value=aggregate(values, self._aggregation), weight=weight, evidence=evidence, detail=detail)


def shipped(text: str, answer: str) -> Judgement:
    """The classifier that comes with the package."""
    return judge(text, answer=answer)
