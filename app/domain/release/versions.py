"""Model versions: what they are called, where they come from, and how a training run ended."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

KEPT_CHAMPIONS = 10
"""So many of the newest versions, and of those that were champion, keep their weights whatever happens: that far a rollback can go back."""


class VersionKind(StrEnum):
    """How a version was made."""

    BASE = "base"
    RL = "rl"
    PRETRAIN = "pretrain"
    PLANTED = "planted"
    """Put there by hand (the demo's harmful candidate); enters the same gates."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """One set of weights. `digest` is SHA-256 over the named tensors and their bytes, see `app.policy.storage.weights`."""

    digest: str
    policy: str
    name: str
    """Such as `smollm2-135m-rl-1121-s7`: base, kind, month-day, step; unique per policy."""
    kind: VersionKind
    parent: str | None
    """Digest of the version it was trained from; None for a base."""
    step: int
    """Number of updates since the base."""
    run_id: str | None
    created_at: datetime
    base_model: str
    """Such as `HuggingFaceTB/SmolLM2-135M-Instruct`."""
    licence: str
    """SPDX id of the base model's licence, or a name declared in the licence rules."""
    optimizer_uri: str | None = None
    """Where the optimizer state after this version's run lies; travels with the champion's lineage only."""
    tags: dict[str, str] = field(default_factory=dict[str, str])


class RunStatus(StrEnum):
    """State of a training run."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    HELD = "held"
    FAILED = "failed"


class HoldReason(StrEnum):
    """Why a run refused to update. None is silent: the run row, the cycle row and MLflow carry it."""

    TOO_FEW_LABELS = "too_few_labels"
    EQUAL_REWARDS = "equal_rewards"
    LOW_ESS = "low_effective_sample_size"
    MEAN_RATIO = "mean_ratio_out_of_range"
    ENGINE_MISMATCH = "engine_trainer_mismatch"
    NOT_FINITE = "not_finite"
    ENTROPY_COLLAPSE = "entropy_collapse"
    KL_CHAMPION = "kl_budget_champion"
    KL_ANCHOR = "kl_budget_anchor"


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One attempt to make a candidate from one batch."""

    id: str
    policy: str
    batch_id: str
    parent: str
    """Digest of the champion it starts from."""
    status: RunStatus
    hold_reason: HoldReason | None = None
    message: str | None = None
    candidate: str | None = None
    """Digest of the version it made."""
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    started_at: datetime
    finished_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """The run behind an earlier version of a champion's line, and how its canary ended; what G0 compares a new run with."""

    candidate: str
    anchor: str
    """Anchor that its KL was measured to."""
    metrics: dict[str, Any]
    canary: dict[str, Any] | None
    """Evidence of the passing canary; None where it had none."""


def version_name(*, base: str, kind: VersionKind, created_at: datetime, step: int) -> str:
    """Name of a version: `smollm2-135m-rl-1121-s7` from base, kind, month and day, and step."""
    return f"{base}-{kind.value}-{created_at:%m%d}-s{step}"
