"""Labels: the reward of a turn with its breakdown, or an exclusion with its reason. Every served turn gets exactly one of both."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import msgspec

from app.domain.telemetry.events import Observation
from app.domain.telemetry.turns import FinishReason, ToolCall


class Aggregation(StrEnum):
    """How several observations of one name on one turn become one value (decision-service semantics)."""

    EARLIEST = "earliest"
    LATEST = "latest"
    AVERAGE = "average"
    MEDIAN = "median"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


class Exclusion(StrEnum):
    """The closed list of reasons why a labelled turn is not trained on. Its rate per version is a gated metric."""

    NO_CONSENT = "no_consent"
    ERASED = "erased"
    NO_LOGPROBS = "no_logprobs"
    MIXED_VERSIONS = "mixed_versions"
    """The engine's weights were replaced while it was sampled, or just before: the version it is recorded under did not sample it all."""
    NO_RATIO = "no_ratio"
    """Drawn at temperature 0, with a top-p whose kept mass is not known, or under a mask that cannot be worked out again: no importance
    ratio can be formed."""
    IMPORTED = "imported"
    ROLLOUT = "rollout"
    """Practice in a sandbox, and `batching.rollout_share` is 0: nothing of it goes into batches."""
    ENVIRONMENT_FAULT = "environment_fault"
    """A part of ours failed the rollout (its box, its grader, the gateway): neither the turn nor the group's mean hears of it."""
    STALE_VERSION = "stale_version"
    UNKNOWN_VERSION = "unknown_version"
    PAYLOAD_MISSING = "payload_missing"
    TOKENS_OUT_OF_RANGE = "tokens_out_of_range"
    TOO_LONG = "too_long"
    EMPTY_COMPLETION = "empty_completion"
    ENGINE_FAULT = "engine_fault"
    """The engine failed before or while sampling: not the model's doing (see labelling for what is)."""
    NO_SIGNAL = "no_signal"
    """No term of the rule set had anything to say; the turn is labelled with the default, and not trained on if the rule set says so."""
    ACTOR_CAP = "actor_cap"
    HELD_OUT = "held_out"
    """Kept for evaluation, never trained on."""
    EPISODE_OPEN = "episode_open"
    """Another turn of its episode is not labelled yet: the chain waits for its final reward and is eligible again in the next slot."""
    QUARANTINED = "quarantined"
    """Rests on what raters said who seem to act together (`pipelines.batching.raters`): waits until an operator has looked."""
    RATER_CAP = "rater_cap"
    """Whoever decided its outcome has decided as many others in this batch as one person may."""
    OTHER_RULE_SET = "other_rule_set"
    """Scored by another rule set than the newest labels: rewards of two rule sets do not compare."""
    HELD_AGAIN = "held_again"
    """Was in as many batches that came to nothing by a fault as `batching.max_tries` allows: it may be what is at fault."""
    NOT_SAMPLED = "not_sampled"
    """Eligible, but the batch was full."""


class TurnFacts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is known of a served turn without its tokens: what terms look at. Read from the turns table."""

    inference_id: str
    episode_id: str
    policy: str
    version: str
    kind: str
    source: str
    started_at: datetime
    finished_at: datetime
    actor: str | None
    segment: str
    finish_reason: FinishReason
    train_consent: bool
    has_logprobs: bool
    prompt_tokens: int
    completion_tokens: int
    tool_calls: tuple[ToolCall, ...]
    time_to_first_token_s: float | None
    completion: str
    tags: dict[str, str]
    erased: bool


class Credit(StrEnum):
    """Which turns of an episode a term's value is paid to."""

    OUTCOME = "outcome"
    """What came of it: reaches every turn of the chain that led there."""
    PROCESS = "process"
    """How the turn itself went about it (a broken call, a question, its length): stays with the turn."""


PROCESS_TERMS = frozenset({"tool_calls", "clarification", "finish", "length", "latency"})
"""The built-in terms about the turn itself, for labels that were made before labels said so."""


UNREADABLE = "unreadable"
"""Why a term abstains that could not read what was said: a value of another shape or scale than its policy's, or a fault of its own."""


class TermScore(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one term said about one turn."""

    name: str
    value: float | None
    """In the term's own range, documented there; None where it abstains."""
    weight: float
    abstained: str | None = None
    """Why the term abstained, in a word (`no_observation`, `uncertain`, `unreadable`, …)."""
    evidence: tuple[str, ...] = ()
    """Ids of the observations used."""
    detail: dict[str, Any] = {}
    credit: Credit = Credit.OUTCOME


class Label(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The reward of one turn under one version of one rule set."""

    inference_id: str
    policy: str
    version: str
    """Digest of the weights that sampled the turn."""
    reward: float
    """Weighted sum of the terms that spoke, in reward units (about -1 … 1)."""
    terms: tuple[TermScore, ...]
    rule_set: str
    """Digest of the rule set."""
    revision: int
    """1 at the deadline, then one more for each correction by a late observation or retraction."""
    exclusion: Exclusion | None
    """Why this turn can never be trained on as things stand; None where it is eligible."""
    labelled_at: datetime
    segment: str
    """Canonical `key=value,…` of the turn's segment tags."""
    actor: str | None
    held_out: bool
    """Drawn once, by a hash of the actor (else the episode): kept for evaluation, never trained on."""


class DueTurn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A turn to label, with everything that was observed of it and of its episode, in order of occurrence."""

    facts: TurnFacts
    observations: tuple[Observation, ...]
    revision: int
    """Of its current label; 0 where it has none."""


class Labelled(NamedTuple):
    """A turn as labelling saw it, with the label that it has."""

    turn: DueTurn
    reward: float
    terms: tuple[Mapping[str, Any], ...]
    """Of its current label, as stored."""


class Term(Protocol):
    """One question about a turn, answered with a score; named in the rule set, found by name or import path.

    A term about the turn itself says so with `credit = Credit.PROCESS` in its class; without a word it is about the outcome.
    """

    name: str

    def score(self, turn: TurnFacts, observations: Sequence[Observation], *, weight: float) -> TermScore:
        """Score the turn from what is known about it; `observations` are those of the turn and its episode, sorted by time.

        Whatever it raises is an abstention: `unreadable`.
        """
        ...


def segment_key(segment: dict[str, str]) -> str:
    """Canonical text of segment tags: sorted `key=value` pairs joined by commas; empty for none."""
    return ",".join(f"{key}={segment[key]}" for key in sorted(segment))
