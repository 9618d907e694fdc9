"""READY: every gate passed explicitly, the evidence is bound, and people are asked."""

from datetime import datetime, timedelta

from app.domain.errors import Refused
from app.domain.release.by_people import BY_PEOPLE
from app.domain.release.gates import GateName, GateResult, Verdict
from app.domain.release.releases import Release, ReleaseState
from app.domain.release.terms import Terms
from app.release.ledger import ReleaseTransaction
from app.release.people import evidence_digest, people_needed
from app.release.promotion import terms_of

S = ReleaseState
REQUIRED_OFFLINE = (GateName.TRAINING_HEALTH, GateName.OFFLINE)
"""Gates that have to pass before a canary or people judge; the others may only veto."""


def make_ready(tx: ReleaseTransaction, release: Release, *, next_ready_at: datetime | None = None) -> Release:
    """CANARY or JUDGING → READY, after the passing result was recorded; an older one that waits for people gives way."""
    terms, results = terms_of(release), tx.results(release.id)
    require_offline(release, terms, results)
    needed, why = people_needed(tx, release, terms)
    ttl = tx.now + timedelta(seconds=terms.approval_ttl_s)
    for older in tx.releases(states={S.READY, S.APPROVED}):
        tx.void_approvals(older.id, actor="system:watch", reason="a newer release is ready")
        to = S.SUPERSEDED_BY_NEWER if older.state is S.READY else S.EXPIRED
        tx.move(older, to, actor="system:watch", reason=f"{release.version_name} is ready", changes={"stage": None})
    changes = {
        "evidence_digest": evidence_digest(release, terms, results), "approvals_needed": needed,
        "approval_expires_at": min(ttl, next_ready_at) if next_ready_at else ttl,
    }  # fmt: skip
    reason = f"{needed} approvals needed ({why})"
    return tx.move(
        release, S.READY, actor="system:watch", reason=reason if terms.by_people is None else f"{BY_PEOPLE}: {reason}", changes=changes
    )


def require_offline(release: Release, terms: Terms, results: dict[GateName, GateResult]) -> None:
    """Explicit passes about exactly these weights; a veto by any gate stops (invariant I1)."""
    if terms.forced is not None:
        return
    vetoed = [gate.value for gate, result in results.items() if result.verdict is Verdict.FAIL]
    missing = [g.value for g in REQUIRED_OFFLINE if g not in results or results[g].verdict is not Verdict.PASS]
    stale = [gate.value for gate, result in results.items() if result.digest != release.digest]
    if vetoed or missing or stale:
        names = ", ".join(dict.fromkeys([*vetoed, *missing, *stale]))
        raise Refused(f"release {release.id} has no explicit pass of {names}: only a pass lets a candidate go on")
