"""Sessions: one exposure with what came of it, as the live gates read them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One exposure, its turn and its first label. Made by `app.db.release.evidence`, eaten by `pipelines.evaluation.counting.evidence`.

    Only what was known at the turn's label deadline is here, whenever it is read: late observations and later revisions of the label
    never change a unit that was counted already.
    """

    inference_id: str
    actor: str
    episode_id: str
    release_id: str | None
    stage: str
    arm: str
    probability: float
    share: float
    holdback: float
    digest: str
    exposed_at: datetime
    served: bool
    """Whether the turn arrived; an exposure without one is a fault of its arm once the wait is over."""
    finish_reason: str | None = None
    completion: str = ""
    completion_tokens: int
    """0 where the turn did not arrive."""
    tool_verdicts: tuple[str, ...] = ()
    time_to_first_token_s: float | None = None
    total_s: float | None = None
    """From the request to the end of the answer."""
    prompt_tokens: int = 0
    labelled: bool = False
    reward: float | None = None
    terms: Mapping[str, float | None] | None = None
    """Value per term of the rule set; None where it abstained."""
    excluded: bool = False
    """The label has an exclusion, for whatever reason."""
    signals: Mapping[str, Any] | None = None
    """Newest value per observation name, of the turn or its episode, received by the label deadline and not retracted by then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Era:
    """A stretch of time with one champion and one holdback."""

    generation: int
    since: datetime
    until: datetime | None
    champion: str
    reference: str | None
    holdback: float
    anchor: str
    action: str
    release_id: str | None
