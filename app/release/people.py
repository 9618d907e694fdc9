"""Who may say yes: the four-eyes rules (`facts/gates.md`, section 4.6).

A person is `user:<name>`. Programs (`system:…`, `service:…`, and users whose name marks them as a bot) may abort and roll back, never
approve. People are counted, not names: their user on the machine is the same person, and who made or reset somebody's credential
within a day may be behind it.
"""

from collections.abc import Collection, Sequence

from app.domain.errors import Refused
from app.domain.people import is_person
from app.domain.release.gates import GateName, GateResult, content_hash
from app.domain.release.releases import Release, approvers
from app.domain.release.terms import Terms
from app.release.ledger import ReleaseTransaction


def require_person(actor: str, act: str) -> None:
    """Refuse anybody who is not a person."""
    if not is_person(actor):
        raise Refused(f"{actor} may not {act}: that takes a person (user:<name>), never a program")


def require_independent(tx: ReleaseTransaction, release: Release, terms: Terms, approver: str) -> None:
    """Refuse whoever asked for the release or edited what it is judged by, under whatever name, and whose credential they made."""
    names = tx.names_of(approver)
    if release.initiator in names:
        raise Refused(f"{approver} asked for release {release.id} and may not approve it: ask somebody else")
    if terms.edited_by in names:
        raise Refused(f"{approver} last edited the gates' configuration and may not approve a release under it: ask somebody else")
    said_yes = approvers(release, tx.approvals(release.id)) - {approver}
    concerned = {name for name in (release.initiator, terms.edited_by) if name is not None}
    require_strangers(tx, approver, said_yes, concerned=concerned)


def require_strangers(tx: ReleaseTransaction, actor: str, others: Collection[str], *, concerned: Collection[str] = ()) -> None:
    """Refuse to count two beside each other where one, or a third, made or reset a credential of theirs within a day: they may be one.

    `concerned` are those who must not be behind the actor either. Whoever waits a day is not found out here; the audit chain shows it.
    """
    names, hands = tx.names_of(actor), tx.hands_of(actor)
    for other in sorted(set(others) - {actor}):
        if other in names:
            raise Refused(f"{actor} and {other} are the same person: the second has to be somebody else")
        theirs = tx.hands_of(other)
        behind = (hands & tx.names_of(other)) | (theirs & names) | (hands & theirs)
        if behind:
            raise Refused(
                f"{', '.join(sorted(behind))} made or reset a credential of {actor} or {other} within the last day: "
                "they do not count beside each other until a day has passed; ask a third person"
            )
    for other in sorted(set(concerned)):
        if hands & tx.names_of(other):
            raise Refused(f"{other} made or reset a credential of {actor} within the last day, and must not decide here: ask somebody else")


def people_needed(tx: ReleaseTransaction, release: Release, terms: Terms) -> tuple[int, str]:
    """How many have to approve, and why."""
    for reason in _reasons_for_doubt(tx, release, terms):
        return max(terms.approvals, terms.approvals_in_doubt, 2 if terms.high_tier else 1), reason
    return terms.approvals, "configured"


def _reasons_for_doubt(tx: ReleaseTransaction, release: Release, terms: Terms) -> Sequence[str]:
    results = tx.results(release.id)
    health, live = results.get(GateName.TRAINING_HEALTH), results.get(GateName.CANARY)
    pointer = tx.pointer()
    before = tx.release(pointer.release_id) if pointer and pointer.release_id else None
    asked = {
        "the tier is high": terms.high_tier,
        "the offline gates were skipped by hand": terms.forced is not None,
        "more than half of the KL budget to the anchor is used": health is not None
        and health.evidence.get("anchor_budget_used", 0.0) > 0.5,
        "the reward rose alone, its behaviour changed, or a monitor alerts": live is not None and bool(live.evidence.get("alarms")),
        "the gates' configuration changed since the last promotion": before is not None
        and before.config.get("config_hash") != terms.config_hash,
        "the last champion was rolled back automatically": tx.rolled_back_automatically(),
    }
    return [reason for reason, applies in asked.items() if applies]


def evidence_digest(release: Release, terms: Terms, results: dict[GateName, GateResult]) -> str:
    """What an approval binds to: the version, the configuration, every gate's record and the champion it was compared with."""
    return content_hash(
        {
            "digest": release.digest,
            "config_hash": terms.config_hash,
            "gates": {gate.value: [r.verdict, r.config_hash, r.evidence_hash] for gate, r in results.items()},
            "champion": [release.champion_digest, release.champion_generation],
            "forced": terms.forced,
        }
    )
