"""Who counts beside whom, and how many have to: each rule by hand, over a transaction that only knows names and hands."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from app.domain.errors import Refused
from app.domain.release.gates import GateName, GateResult, Verdict
from app.domain.release.releases import Approval, Pointer, Release, ReleaseState
from app.domain.release.terms import Terms
from app.release.ledger import ReleaseTransaction
from app.release.people import evidence_digest, is_person, people_needed, require_independent, require_strangers

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)
ADA, BOB, EVE = "user:ada", "user:bob", "user:eve"


@dataclass
class Book:
    """Names of one person, and who made or reset a credential of theirs within a day."""

    names: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    hands: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    yes: tuple[str, ...] = ()
    found: dict[GateName, GateResult] = field(default_factory=dict[GateName, GateResult])
    deployed: Release | None = None
    rolled_back: bool = False

    def names_of(self, actor: str) -> set[str]:
        return {actor} | self.names.get(actor, set())

    def hands_of(self, actor: str) -> set[str]:
        return self.hands.get(actor, set())

    def approvals(self, release_id: str) -> list[Approval]:
        return [
            Approval(release_id=release_id, approver=who, approved=True, evidence_digest="e", reason=None, decided_at=NOON)
            for who in self.yes
        ]

    def results(self, release_id: str) -> dict[GateName, GateResult]:
        return self.found

    def pointer(self) -> Pointer | None:
        if self.deployed is None:
            return None
        return Pointer(
            policy="tab", digest="v1", generation=1, previous=None, anchor="v1", holdback=0.0, release_id=self.deployed.id, changed_at=NOON
        )

    def release(self, release_id: str) -> Release:
        assert self.deployed is not None
        return self.deployed

    def rolled_back_automatically(self) -> bool:
        return self.rolled_back


def tx(**known: Any) -> ReleaseTransaction:
    return cast(ReleaseTransaction, Book(**known))


def release(id_: str = "r", **more: Any) -> Release:
    parts: dict[str, Any] = {
        "id": id_, "policy": "tab", "version_name": "tiny-v2", "digest": "v2", "state": ReleaseState.READY, "stage": 0, "stage_since": NOON,
        "champion_digest": "v1", "champion_generation": 1, "evidence_digest": "e", "reason": "", "created_at": NOON, "changed_at": NOON,
        "initiator": "system:loop", "config": {}, "generation": 1,
    }  # fmt: skip
    return Release(**parts | more)


def result(gate: GateName, *, digest: str = "v2", **evidence: Any) -> GateResult:
    return GateResult(
        gate=gate, digest=digest, verdict=Verdict.PASS, reason="", evidence=evidence, config_hash="c", evidence_hash="h", decided_at=NOON
    )


@pytest.mark.parametrize(
    ("actor", "person"),
    [
        (ADA, True),
        ("user:ADA", True),
        ("user:", False),
        ("user: ", False),
        ("ada", False),
        ("user:ci-bot", False),
        ("user:Dep[BOT]", False),
    ],
)
def test_a_person_is_a_user_whose_name_is_no_program_s(actor: str, person: bool) -> None:
    assert is_person(actor) is person


@pytest.mark.parametrize(
    ("known", "counts"),
    [
        ({}, True), ({"names": {ADA: {BOB}}}, False), ({"hands": {ADA: {BOB}}}, False), ({"hands": {BOB: {ADA}}}, False),
        ({"hands": {ADA: {EVE}, BOB: {EVE}}}, False), ({"hands": {ADA: {EVE}}}, True), ({"hands": {ADA: {ADA}}}, True),
        ({"names": {BOB: {"user:robert"}}, "hands": {ADA: {"user:robert"}}}, False),
        ({"names": {ADA: {"user:a"}}, "hands": {BOB: {"user:a"}}}, False),
    ],
)  # fmt: skip
def test_two_count_beside_each_other_where_neither_nor_a_third_had_a_hand_in_both(known: dict[str, Any], counts: bool) -> None:
    if counts:
        require_strangers(tx(**known), ADA, {ADA, BOB})
    else:
        with pytest.raises(Refused):
            require_strangers(tx(**known), ADA, {ADA, BOB})
    require_strangers(tx(**known), ADA, {ADA})


def test_whoever_is_concerned_had_no_hand_in_who_decides() -> None:
    require_strangers(tx(hands={ADA: {BOB}}), ADA, (), concerned={EVE})
    with pytest.raises(Refused, match="user:eve made or reset a credential of user:ada"):
        require_strangers(tx(hands={ADA: {EVE}}), ADA, (), concerned={BOB, EVE})


def test_who_asked_or_wrote_the_rules_says_no_yes_under_any_name_nor_through_a_credential() -> None:
    asked = release(initiator=EVE)
    require_independent(tx(), asked, Terms(edited_by=BOB), ADA)
    for known, terms, words in (
        ({"names": {ADA: {EVE}}}, Terms(), "asked for release r"), ({}, Terms(edited_by=ADA), "last edited the gates"),
        ({"hands": {ADA: {EVE}}}, Terms(), "user:eve made or reset"),
        ({"hands": {ADA: {BOB}}}, Terms(edited_by=BOB), "user:bob made or reset"),
        ({"yes": (ADA, BOB), "names": {ADA: {BOB}}}, Terms(), "are the same person"),
    ):  # fmt: skip
        with pytest.raises(Refused, match=words):
            require_independent(tx(**known), asked, terms, ADA)


BUDGET = "more than half of the KL budget to the anchor is used"
ALONE = "the reward rose alone, its behaviour changed, or a monitor alerts"
CHANGED = "the gates' configuration changed since the last promotion"


@pytest.mark.parametrize(
    ("known", "terms", "needed"),
    [
        ({}, {}, (1, "configured")), ({}, {"approvals": 3}, (3, "configured")), ({}, {"high_tier": True}, (2, "the tier is high")),
        ({}, {"forced": "by hand"}, (2, "the offline gates were skipped by hand")),
        ({}, {"forced": "by hand", "approvals_in_doubt": 4}, (4, "the offline gates were skipped by hand")),
        ({}, {"forced": "by hand", "approvals": 5}, (5, "the offline gates were skipped by hand")),
        ({"found": {GateName.TRAINING_HEALTH: result(GateName.TRAINING_HEALTH, anchor_budget_used=0.5)}}, {}, (1, "configured")),
        ({"found": {GateName.TRAINING_HEALTH: result(GateName.TRAINING_HEALTH, anchor_budget_used=0.51)}}, {}, (2, BUDGET)),
        ({"found": {GateName.TRAINING_HEALTH: result(GateName.TRAINING_HEALTH)}}, {}, (1, "configured")),
        ({"found": {GateName.CANARY: result(GateName.CANARY, alarms=["gap"])}}, {}, (2, ALONE)),
        ({"found": {GateName.CANARY: result(GateName.CANARY, alarms=[])}}, {}, (1, "configured")),
        ({"deployed": release("d", config={"config_hash": "old"})}, {"config_hash": "new"}, (2, CHANGED)),
        ({"deployed": release("d", config={"config_hash": "new"})}, {"config_hash": "new"}, (1, "configured")),
        ({"rolled_back": True}, {}, (2, "the last champion was rolled back automatically")),
    ],
)  # fmt: skip
def test_how_many_have_to_approve_and_why(known: dict[str, Any], terms: dict[str, Any], needed: tuple[int, str]) -> None:
    assert people_needed(tx(**known), release(), Terms(**terms)) == needed


def test_a_yes_is_bound_to_everything_that_it_rests_on() -> None:
    found = {GateName.CANARY: result(GateName.CANARY)}
    whole = evidence_digest(release(), Terms(), found)
    others = [
        evidence_digest(release(digest="v3"), Terms(), found), evidence_digest(release(), Terms(config_hash="x"), found),
        evidence_digest(release(), Terms(), {}), evidence_digest(release(champion_digest="v0"), Terms(), found),
        evidence_digest(release(champion_generation=2), Terms(), found), evidence_digest(release(), Terms(forced="x"), found),
    ]  # fmt: skip
    assert len({whole, *others}) == 7
    assert evidence_digest(release(reason="another", stage=2), Terms(), found) == whole
