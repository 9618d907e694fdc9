"""Makes releases for tests: a desk on a real database, versions, and gate results of every kind."""

from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec
from sqlalchemy import Engine

from app import wiring
from app.db.release.releases import SqlReleaseLedger
from app.domain.ids import utc_now
from app.domain.release.gates import GateName, GateResult, Verdict, content_hash
from app.domain.release.releases import Release, ReleaseState
from app.domain.release.terms import Terms
from app.domain.release.versions import Version, VersionKind
from app.release import ReleaseDesk
from app.settings import Settings
from tests.fakes.clock import FrozenClock

POLICY = "tab"
ADA, BOB, EVE = "user:ada", "user:bob", "user:eve"


def version(digest: str, *, policy: str = POLICY) -> Version:
    """A version with its digest for a name."""
    return Version(
        digest=digest, policy=policy, name=f"tiny-{digest}", kind=VersionKind.RL, parent=None, step=1, run_id=None,
        created_at=FrozenClock().now, base_model="tiny", licence="Apache-2.0",
    )  # fmt: skip


def deployed(settings: Settings, snapshot: Path) -> str:
    """Make a snapshot the champion of a new deployment's policy `composer`; returns its digest."""
    settings.data.mkdir()
    digest = wiring.open_weights(settings).publish(snapshot)
    base = Version(
        digest=digest, policy="composer", name="tiny-base", kind=VersionKind.BASE, parent=None, step=0, run_id=None, created_at=utc_now(),
        base_model="ratchet/tiny-random", licence="Apache-2.0",
    )  # fmt: skip
    wiring.version_book(settings).add(base)
    wiring.release_desk(settings).bootstrap(base, actor="system:loop")
    return digest


def answer(gate: GateName, digest: str, verdict: Verdict = Verdict.PASS, *, note: str = "") -> GateResult:
    """A gate's answer about a digest."""
    return GateResult(
        gate=gate, digest=digest, verdict=verdict, reason=f"{gate} says {verdict}", evidence={"note": note}, config_hash="config",
        evidence_hash=content_hash([gate, digest, verdict, note]), decided_at=FrozenClock().now,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ReleaseRoom:
    """A desk with a clock that stands still, on a database where version v1 is champion."""

    engine: Engine
    desk: ReleaseDesk
    ledger: SqlReleaseLedger
    clock: FrozenClock
    terms: Terms

    def queued(self, digest: str, *, initiator: str = "system:loop") -> Release:
        """A candidate that passed the offline gates."""
        release = self.desk.start_offline(self.desk.open(version(digest), initiator=initiator).id)
        for gate in (GateName.TRAINING_HEALTH, GateName.OFFLINE):
            self.desk.record(release.id, answer(gate, digest))
        return self.desk.queue(release.id)

    def canary(self, digest: str, *, initiator: str = "system:loop") -> Release:
        """A candidate in its first canary stage."""
        return self.desk.start_canary(self.queued(digest, initiator=initiator).id)

    def ready(self, digest: str, *, initiator: str = "system:loop") -> Release:
        """A candidate that waits for people."""
        return self.desk.mark_ready(self.canary(digest, initiator=initiator).id, answer(GateName.CANARY, digest))

    def approved(self, digest: str, *, by: tuple[str, ...] = (ADA, BOB)) -> Release:
        """A candidate that people let through."""
        release = self.ready(digest)
        assert release.evidence_digest is not None
        for person in by[: release.approvals_needed]:
            release = self.desk.approve(release.id, approver=person, evidence=release.evidence_digest or "")
        return release

    def champion(self, digest: str) -> Release:
        """A candidate all the way to the top."""
        return self.desk.promote(self.desk.begin_promotion(self.approved(digest).id).id)

    def states(self) -> dict[str, ReleaseState]:
        """State of every release by digest, the newest of each digest."""
        return {release.digest: release.state for release in reversed(self.ledger.list(policy=POLICY))}


def release_room(engine: Engine, *, terms: Terms | None = None, clock: FrozenClock | None = None) -> ReleaseRoom:
    """A room with version v1 deployed; `clock` where what reads it has the machine's."""
    clock, terms = clock or FrozenClock(), terms or Terms(config_hash="config", breaker_rollbacks=3)
    ledger = SqlReleaseLedger(engine, clock=clock)
    numbers = count(1)  # known ids: the arms that people draw are the same in every run
    desk = ReleaseDesk(ledger, terms=terms, clock=clock, new_id=lambda: f"release-{next(numbers)}")
    desk.bootstrap(version("v1"), actor="system:loop")
    return ReleaseRoom(engine=engine, desk=desk, ledger=ledger, clock=clock, terms=msgspec.convert(msgspec.to_builtins(terms), Terms))
