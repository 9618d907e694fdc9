"""Explaining: every live decision on record, decided again from its stored evidence, number by number (invariant I4)."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import msgspec

from app.domain.errors import NotFound
from app.domain.release.by_people import PeopleTerms, judge
from app.domain.release.gates import GateName, canonical_json, content_hash
from app.domain.release.pairs import Favoured
from app.domain.release.releases import Release
from pipelines.evaluation.counting.evidence import hash_of_packed, unpacked
from pipelines.evaluation.counting.subjects import frozen_config
from pipelines.evaluation.live.champion import decide_champion
from pipelines.evaluation.live.decide import Decision, decide

LIVE = frozenset({GateName.CANARY.value, GateName.HOLDBACK.value, GateName.PEOPLE.value})


class Record(Protocol):
    """What is on record."""

    def decisions(self, release_id: str, *, newest: int = 1000) -> list[dict[str, Any]]: ...
    def kept(self, digest: str) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One decision, and whether deciding again gives the same."""

    gate: str
    decided_at: datetime
    action: str | None
    verdict: str
    reason: str
    numbers: Mapping[str, Any]
    evidence_hash: str
    config_hash: str
    differences: tuple[str, ...]
    """What came out otherwise; empty where everything is the same, and for gates that are no live decision."""
    replayed: bool


def explain(release: Release, record: Record) -> Sequence[Explanation]:
    """Every gate's answers about a release, oldest first; the live ones decided again."""
    return [_explained(release, row, record) for row in record.decisions(release.id)]


def _explained(release: Release, row: Mapping[str, Any], record: Record) -> Explanation:
    live = row["gate"] in LIVE
    return Explanation(
        gate=row["gate"], decided_at=row["decided_at"], action=row["action"], verdict=row["verdict"], reason=row["reason"],
        numbers=row["evidence"], evidence_hash=row["evidence_hash"], config_hash=row["config_hash"], replayed=live,
        differences=tuple(_differences(release, row, record)) if live else (),
    )  # fmt: skip


def _differences(release: Release, row: Mapping[str, Any], record: Record) -> list[str]:
    config = frozen_config(release)
    if config.hash != row["config_hash"]:
        return [f"the frozen configuration hashes to {config.hash}, the decision was made under {row['config_hash']}"]
    if row["gate"] == GateName.PEOPLE:
        return _votes_compared(config.people, row)
    try:
        kept = record.kept(row["evidence_hash"])
        if hash_of_packed(kept) != row["evidence_hash"]:
            return ["its evidence was changed after the decision"]
        evidence = unpacked(kept)
    except (NotFound, zlib.error, msgspec.DecodeError) as error:
        return [f"its evidence cannot be read: {error}"]
    again = decide(config, evidence) if row["gate"] == GateName.CANARY else decide_champion(config, evidence)
    return _compared(again, row)


def _votes_compared(terms: PeopleTerms, row: Mapping[str, Any]) -> list[str]:
    """The votes are in the record itself."""
    kept: Mapping[str, Any] = row["evidence"]
    if content_hash(kept) != row["evidence_hash"]:
        return ["its votes were changed after the decision"]
    said = [Favoured(one) for one in kept["said"]]
    again = judge(terms, said, pairs=kept["pairs"], people=kept["people"], waited_s=kept["waited_s"])
    same = (again.verdict, again.reason, content_hash(again.numbers)) == (row["verdict"], row["reason"], row["evidence_hash"])
    return [] if same else [f"decided again: {again.verdict}, {again.reason}"]


def _compared(again: Decision, row: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    if again.verdict != row["verdict"] or again.reason != row["reason"]:
        found.append(f"decided again: {again.verdict}, {again.reason}")
    for name, value in again.numbers.items():
        if canonical_json(msgspec.to_builtins(value)) != canonical_json(row["evidence"].get(name)):
            found.append(f"{name}: {row['evidence'].get(name)} on record, {value} now")
    return found
