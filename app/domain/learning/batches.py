"""Batches: immutable manifests of labels, and the token samples that training reads for them."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

import msgspec

from app.domain.telemetry.turns import PayloadClaim, Shape, TurnServed


@dataclass(frozen=True, kw_only=True)
class BatchItem:
    """One label in a batch."""

    inference_id: str
    episode_id: str
    reward: float
    label_revision: int
    segment: str
    actor: str | None
    version: str = ""
    """Digest of the weights that sampled the turn; known to the turn's row, not part of the manifest's id."""
    payload_segment: str = ""
    """Parquet segment with the turn's tokens."""
    channels: str = ""
    """Which terms decided the outcome (`follow_up,rating`), empty where none did: what is usual differs between them."""
    group: str = ""
    """Of a rollout: the tries at one task that it is compared with; known to the turn's row, as is the version."""


@dataclass(frozen=True, kw_only=True)
class BatchManifest:
    """What one update learns from. `id` is content-addressed: the same window and config give the same id."""

    id: str
    policy: str
    slot: int
    """Start of the slot, Unix seconds."""
    champion: str
    """Digest of the version whose turns these are."""
    anchor: str
    rule_set: str
    window_from: datetime
    window_to: datetime
    items: tuple[BatchItem, ...]
    """Sorted by inference_id."""
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    """Count per `Exclusion` value of everything labelled in the window that is not in `items`."""


class Voice(NamedTuple):
    """Somebody whose word decided a turn's outcome."""

    rater: str | None
    """Pseudonym; whoever asked, where the observation names nobody. None where nobody is named at all."""
    newcomer: bool
    """Nothing was heard of them until a short while ago."""


@dataclass(frozen=True, kw_only=True)
class LabelledTurn:
    """A current label with what batching must know about its turn."""

    inference_id: str
    episode_id: str
    version: str
    reward: float
    label_revision: int
    rule_set: str
    exclusion: str | None
    """As labelling said; batching adds its own reasons."""
    segment: str
    actor: str | None
    held_out: bool
    kind: str
    """`answer` or `summary`."""
    imported: bool
    train_consent: bool
    erased: bool
    has_logprobs: bool
    payload_segment: str | None
    completion_tokens: int
    finished_at: datetime
    labelled_at: datetime
    episode_open: bool = False
    """Some turn of the episode has no label yet."""
    process: float = 0.0
    """The part of `reward` that is the turn's own: its process terms. The rest is the outcome's."""
    has_outcome: bool = True
    """Whether any term spoke about the outcome."""
    spoke: tuple[tuple[str, float], ...] = ()
    """The terms about the outcome that spoke, and what they said."""
    completion: str = ""
    tries: int = 0
    """In how many batches it was that came to nothing by a fault and gave their labels back."""
    rollout: bool = False
    """Practice."""
    group: str = ""
    """Of practice: the tries at one task that are compared with each other."""


class LabelGroup(NamedTuple):
    """What labels have in common that are counted together."""

    exclusion: str | None
    version: str
    held_out: bool
    rule_set: str


def group_of(turn: LabelledTurn) -> LabelGroup:
    """The group a label is counted in."""
    return LabelGroup(exclusion=turn.exclusion, version=turn.version, held_out=turn.held_out, rule_set=turn.rule_set)


@dataclass(frozen=True, kw_only=True)
class LabelsMade:
    """Unused labels of a window, counted where they lie."""

    groups: Counter[LabelGroup]
    first_at: datetime | None
    """When the first of them was made."""


@dataclass(frozen=True, kw_only=True)
class TurnPayload:
    """The tokens of one turn, as sampled; what training and off-policy evaluation read from the segments."""

    inference_id: str
    episode_id: str
    policy: str
    version: str
    prompt_tokens: Sequence[int]
    """[P]; a tuple, or an array on the way into a segment"""
    completion_tokens: tuple[int, ...]
    """[T]"""
    logprobs: tuple[float, ...] | None
    """[T], natural logarithm, of the sampled distribution."""
    routed_experts: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    """[T, L, K]"""
    kept_log_mass: tuple[float, ...] | None = None
    """[T] log of the probability mass that top-k and top-p kept; None where nothing was cut, or where it is not known."""
    temperature: float
    top_p: float
    top_k: int = 0
    """0 is all."""
    shape: Shape | None = None
    precision: str = ""
    """What its version was rounded to where it was served in less than was published."""
    finished_at: datetime
    messages: tuple[dict[str, object], ...] = ()
    completion: str = ""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and completion, [P + T]."""
        return (*self.prompt_tokens, *self.completion_tokens)

    @property
    def is_cut(self) -> bool:
        """Whether its log-probabilities are of a distribution that top-k or top-p made narrower."""
        return self.top_p < 1 or self.top_k > 0


def payload_of(turn: TurnServed) -> TurnPayload:
    """The part of a turn that goes into a segment."""
    experts = turn.routed_experts
    return TurnPayload(
        inference_id=turn.inference_id, episode_id=turn.episode_id, policy=turn.policy, version=turn.version,
        prompt_tokens=_kept(turn.prompt_tokens), completion_tokens=tuple(turn.completion_tokens),
        logprobs=None if turn.logprobs is None else tuple(turn.logprobs),
        routed_experts=None if experts is None else tuple(tuple(tuple(layer) for layer in token) for token in experts),
        kept_log_mass=None if turn.kept_log_mass is None else tuple(turn.kept_log_mass),
        temperature=turn.sampling.temperature, top_p=turn.sampling.top_p, top_k=turn.sampling.top_k or 0, shape=turn.shape or None,
        precision=turn.precision or "", finished_at=turn.finished_at, messages=tuple(turn.messages), completion=turn.completion,
    )  # fmt: skip


def _kept(tokens: Sequence[int]) -> Sequence[int]:
    return tokens if isinstance(tokens, array) else tuple(tokens)


def without_payload(turn: TurnServed, claim: PayloadClaim | msgspec.UnsetType) -> TurnServed:
    """The turn with a reference in the place of what lies in the trajectory store."""
    return msgspec.structs.replace(
        turn, messages=[], prompt_tokens=[], completion_tokens=[], logprobs=None, routed_experts=None, kept_log_mass=None,
        shape=msgspec.UNSET, payload=claim,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RewardedTurn:
    """A labelled turn that no update may learn from: what off-policy evaluation judges a candidate on."""

    inference_id: str
    segment: str
    """Parquet segment with the turn's tokens."""
    reward: float


def batch_id(*, policy: str, champion: str, rule_set: str, items: tuple[BatchItem, ...], tries: int = 0) -> str:
    """SHA-256 (first 32 hex digits) over everything that decides what is learned; independent of when it is cut.

    `tries` is how often its items were in batches that gave them back, in all: the same labels again are another batch.
    """
    rows = [[i.inference_id, i.label_revision, i.reward] for i in sorted(items, key=lambda i: i.inference_id)]
    content = msgspec.json.encode([policy, champion, rule_set, rows, *([tries] if tries else [])])
    return hashlib.sha256(content).hexdigest()[:32]
