"""Releases that people judge because no traffic can: asked, counted, and ended. Each act is one transaction of the watch.

ask_people   QUEUED → JUDGING, or an end where there is nothing that people could judge
count_votes  JUDGING → READY on an explicit pass; REJECTED where people favour the champion; INCONCLUSIVE without an answer
"""

from collections.abc import Sequence

from app.domain.errors import Quarantined, Refused
from app.domain.release.by_people import BY_PEOPLE, Judgement, judge
from app.domain.release.gates import CanaryAction, GateName, GateResult, content_hash
from app.domain.release.pairs import BlindVote
from app.domain.release.releases import Release, ReleaseState
from app.release.alarms import require_calm
from app.release.ledger import ReleaseTransaction
from app.release.people import require_strangers
from app.release.policy_desk import WATCH, PolicyDesk
from app.release.promotion import terms_of
from app.release.readiness import make_ready, require_offline

S = ReleaseState
ENDS = {CanaryAction.ABORT: S.REJECTED, CanaryAction.INCONCLUSIVE: S.INCONCLUSIVE}


class PeopleDesk(PolicyDesk):
    """Acts on releases that people judge."""

    def ask_people(self, release_id: str, *, because: str, seen: Release | None = None) -> Release:
        """Let people judge a release, `because` no traffic can. Where their votes could decide nothing it ends instead."""

        def act(tx: ReleaseTransaction, release: Release) -> Release:
            pointer, terms = tx.pointer(), terms_of(release)
            require_calm(tx, season_s=terms.reentry_season_s)
            if not terms.people.enabled:
                raise Refused(f"release {release.id} was opened under terms that let no people judge instead of traffic")
            if tx.releases(states={S.CANARY, S.JUDGING}):
                raise Refused(f"a candidate of {release.policy} is being judged: one at a time")
            if tx.is_quarantined(release.digest):
                raise Quarantined(f"version {release.digest} was rolled back and may never serve again: train a new one")
            problem = _nothing_to_judge(tx, release)
            if pointer is None or problem is not None:
                return tx.move(release, S.INCONCLUSIVE, actor=WATCH, reason=f"{BY_PEOPLE}, and {problem}; {because}")
            require_offline(release, terms, tx.results(release.id))
            changes = {"config": {**release.config, "by_people": because}, "champion_generation": pointer.generation}
            return tx.move(release, S.JUDGING, actor=WATCH, reason=f"{BY_PEOPLE}: {because}", changes=changes)

        return self._act(release_id, act, seen=seen)

    def count_votes(self, release_id: str, *, seen: Release | None = None) -> Judgement:
        """Judge by the votes that there are; what they decide is recorded and done in the same transaction."""

        def act(tx: ReleaseTransaction, release: Release) -> Judgement:
            if release.state is not S.JUDGING:
                raise Refused(f"release {release.id} is {release.state}: nobody judges it")
            terms = terms_of(release)
            votes = [vote for vote in tx.votes(release.id) if vote.counted]
            waited_s = (tx.now - release.changed_at).total_seconds()
            found = judge(
                terms.people, [vote.favoured for vote in votes], pairs=max(tx.count_pairs(release.id), len(votes)),
                people=people_behind(tx, votes), waited_s=waited_s,
            )  # fmt: skip
            if found.action is CanaryAction.CONTINUE:
                return found
            if found.action is CanaryAction.READY:
                require_calm(tx, season_s=terms.reentry_season_s)
            tx.add_result(release.id, _result(tx, release, found, config_hash=terms.config_hash), action=found.action)
            if found.action is CanaryAction.READY:
                make_ready(tx, release)
            else:
                tx.move(release, ENDS[found.action], actor=WATCH, reason=found.reason)
            return found

        return self._act(release_id, act, seen=seen)


def _nothing_to_judge(tx: ReleaseTransaction, release: Release) -> str | None:
    """Why votes about this release could decide nothing."""
    pointer, terms = tx.pointer(), terms_of(release)
    if pointer is None or pointer.digest != release.champion_digest or tx.champion_moved_since(release.champion_generation):
        return "its pairs are beside a version that is no longer the champion"
    if terms.forced is not None:
        return "it came past the offline gates, which keep the pairs"
    kept = tx.count_pairs(release.id)
    if kept < terms.people.votes:
        return f"{kept} pairs were kept where {terms.people.votes} votes are needed: raise `blind_pairs`, or give the suites more questions"
    return None


def _result(tx: ReleaseTransaction, release: Release, found: Judgement, *, config_hash: str) -> GateResult:
    return GateResult(
        gate=GateName.PEOPLE, digest=release.digest, verdict=found.verdict, reason=found.reason, evidence=found.numbers,
        config_hash=config_hash, evidence_hash=content_hash(found.numbers), decided_at=tx.now,
    )  # fmt: skip


def people_behind(tx: ReleaseTransaction, votes: Sequence[BlindVote]) -> int:
    """How many people said what is counted: none of them under two names, none beside whose credential they made within a day.

    Where nothing proved who voted, all of them are one.
    """
    found: list[str] = []
    for voter in sorted({vote.voter for vote in votes if vote.proven}):
        try:
            require_strangers(tx, voter, found)
        except Refused:
            continue
        found.append(voter)
    return max(len(found), 1 if votes else 0)
