"""Tokens for one answer: `feedback_token` in the response of a chat completion, safe in a browser.

    POST /feedback   Authorization: Bearer ft_…   {"metric_name": "rating", "value": true}

Whoever holds one may say what a person says of an answer (`SAYABLE`), about that answer and nothing else, for a week. What is said again
under the same name replaces what was said, so a token is one voice however often it is used; it reads nothing. The rater is whoever asked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from app.api.entry.signed import Ending, Signed
from app.domain.telemetry.signals import ObservationName

FEEDBACK_PREFIX = "ft_"
FEEDBACK_S = 7 * 86_400.0
"""A week: people rate what they find in yesterday's conversation; what comes later reaches no label that is still open."""
RATE_PER_S = 10.0
"""Requests a second about one answer: an impatient thumb, and no more."""
SAYABLE = frozenset({ObservationName.RATING, ObservationName.COMMENT, ObservationName.UNDO, ObservationName.REGENERATE})
"""What a person says. What the product measured (edits, tool calls, success) is not for a browser to claim."""
SOURCE = "sdk:browser"


class Answered(Ending, frozen=True, kw_only=True):
    """What a token says."""

    answer: str
    """The inference id."""
    policy: str
    parent: str = ""
    """Prefix of the key with which the answer was asked for; empty on an open service, and in tokens from before it was said."""


@dataclass(frozen=True)
class FeedbackTokens:
    """Writes and reads the tokens of answers."""

    secrets: Callable[[], Sequence[str]]

    def issue(self, answer: str, *, policy: str, now: datetime, parent: str = "") -> str:
        """The token of an answer."""
        return self._signed().write(Answered(answer=answer, policy=policy, parent=parent, expires=now.timestamp() + FEEDBACK_S))

    def read(self, token: str, *, now: datetime) -> Answered | None:
        """What a token says; None where we did not sign it or its time is over."""
        return self._signed().read(token, now=now)

    def _signed(self) -> Signed[Answered]:
        return Signed(prefix=FEEDBACK_PREFIX, purpose="feedback", kind=Answered, secrets=self.secrets)


def observation_id(answered: Answered, name: str) -> str:
    """One id per answer and name: a second word replaces the first."""
    return f"ft:{answered.answer}:{name}"
