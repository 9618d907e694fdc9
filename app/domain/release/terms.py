"""The terms a release is opened under, frozen with it: a changed configuration never changes a canary that runs."""

from typing import Any

import msgspec

from app.domain.release.by_people import PeopleTerms


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What the release desk needs to know of the gates' configuration. Stored as JSON in `Release.config`."""

    stages: tuple[float, ...] = (0.05, 0.25, 0.50)
    """Canary share of each stage."""
    lasting: float = 0.0
    """Share of units that never get the candidate, in no stage of the ramp: the lasting cohort."""
    holdback: float = 0.10
    """Share of units that stay on the previous champion after a promotion."""
    approvals: int = 1
    approvals_in_doubt: int = 2
    approval_ttl_s: float = 14_400.0
    high_tier: bool = False
    """Two people have to approve, always."""
    people: PeopleTerms = PeopleTerms()
    """How people judge where traffic cannot."""
    by_people: str | None = None
    """Why people judge this release and no traffic does; None where a canary judges it."""
    breaker_rollbacks: int = 2
    """So many rollbacks within `breaker_window_s` freeze promotions."""
    breaker_window_s: float = 86_400.0
    rollbacks_max: int = 3
    """So many rollbacks within `breaker_window_s` happen without a person; for the next one an alarm calls people."""
    reentry_season_s: float = 0.0
    """After an incident nothing moves forward until the time of this season in which it began has come again; 0 is no season."""
    edited_by: str | None = None
    """Who last edited the gates' configuration (`user:<name>`): may not approve the first release under it."""
    config_hash: str = ""
    """Hash of `gates`."""
    gates: dict[str, Any] = {}
    """The resolved `pipelines.evaluation.config.GatesConfig`, from which live decisions are made again by `explain`."""
    sealed: bool = False
    """The anchor moves only to a version that passed the suites' sealed split."""
    forced: str | None = None
    """Why the offline gates were skipped by hand; such a release is marked so everywhere and needs two people."""
    parent: str | None = None
    """The version that it continues from: the champion, or a candidate that was being judged."""
    plan: dict[str, Any] = {}
    """Declared at the canary's start: N_max per required metric, references of the champion, traffic (see `pipelines.watch`)."""

    @property
    def judges(self) -> int:
        """So many people share the votes on blind pairs that count: nobody has more than their part."""
        return self.people.judges if self.people.enabled else 1
