"""Gates: a gate is one question about a candidate with three answers, and all gates are asked."""

import hashlib
import json
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec


class Verdict(StrEnum):
    """Only an explicit pass promotes; inconclusive and missing never do (invariant I1)."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


class GateName(StrEnum):
    """The gates of `facts/gates.md`, section 4, and the licence gate."""

    TRAINING_HEALTH = "g0_training_health"
    OFFLINE = "g1_offline"
    SEALED = "g1_sealed"
    """The suites' sealed split, the champion against the anchor: asked only before the anchor moves."""
    OFF_POLICY = "g2_off_policy"
    CANARY = "g3_canary"
    PEOPLE = "g4_people"
    """People's blind votes, where no traffic can judge."""
    HOLDBACK = "g5_holdback"
    """The champion against its holdback, after the promotion."""
    LICENCE = "licence"


class CanaryAction(StrEnum):
    """What `decide()` answers, in the order of `facts/gates.md`, section 4.5."""

    ABORT = "abort"
    HOLD = "hold"
    CONTINUE = "continue"
    RAMP = "ramp"
    READY = "ready"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """One gate's answer about one candidate, replayable from its record."""

    gate: GateName
    digest: str
    verdict: Verdict
    reason: str
    """One sentence a person can act on."""
    evidence: dict[str, Any] = field(default_factory=dict[str, Any])
    """Everything the verdict was computed from, JSON-serialisable."""
    config_hash: str
    evidence_hash: str
    decided_at: datetime


def canonical_json(value: object) -> bytes:
    """Canonical JSON (RFC 8785 in what we use of it): sorted keys, no spaces, shortest floats, NaN refused."""
    plain = msgspec.to_builtins(value, order="sorted")
    return json.dumps(plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def content_hash(value: object) -> str:
    """SHA-256 (hex) of `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()
