"""What is old and needed all the same: nothing that a batch at work, a comparison under way or an audit rests on is dropped.

batches at work      their cycle or run is not over, or their candidate's release is in flight: their turns and tokens
comparisons          everything of a policy since its oldest release in flight was opened, since a holdback began, and since
                     what the long-term holdout has counted
audit                batches with ids, rewards and pseudonyms, runs, releases, decisions and their evidence, the audit chain:
                     nothing here ever touches them
"""

from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection, func, or_, select

from app.db.tables import batches, cycles, deployment_pointer, holdouts, releases, training_runs
from app.domain.learning.cycles import CycleStatus
from app.domain.release.releases import IN_FLIGHT
from app.domain.release.versions import RunStatus


class Needs(NamedTuple):
    """What may not be dropped at a moment."""

    batches: frozenset[str]
    """Ids of batches at work."""
    since: dict[str, datetime]
    """By policy: everything from this moment on."""

    def keeps(self, policy: str, moment: datetime) -> bool:
        """Whether a comparison may still read what happened then."""
        return policy in self.since and moment >= self.since[policy]


def needs(connection: Connection) -> Needs:
    """As the database stands in this transaction."""
    return Needs(batches=_batches_at_work(connection), since=_comparisons(connection))


def _batches_at_work(connection: Connection) -> frozenset[str]:
    running = select(cycles.c.batch_id).where(cycles.c.status == CycleStatus.RUNNING.value, cycles.c.batch_id.is_not(None))
    cut = select(batches.c.id).join(cycles, (cycles.c.policy == batches.c.policy) & (cycles.c.slot == batches.c.slot))
    cut = cut.where(cycles.c.status == CycleStatus.RUNNING.value)
    in_flight = select(releases.c.digest).where(releases.c.state.in_([state.value for state in IN_FLIGHT]))
    trained = select(training_runs.c.batch_id).where(
        or_(training_runs.c.status == RunStatus.RUNNING.value, training_runs.c.candidate.in_(in_flight))
    )
    return frozenset(id_ for query in (running, cut, trained) for id_ in connection.execute(query).scalars())


def _comparisons(connection: Connection) -> dict[str, datetime]:
    opened = select(releases.c.policy, func.min(releases.c.created_at)).where(releases.c.state.in_([state.value for state in IN_FLIGHT]))
    held = select(deployment_pointer.c.policy, deployment_pointer.c.changed_at).where(deployment_pointer.c.holdback > 0)
    uncounted = select(holdouts.c.policy, holdouts.c.counted_until).where(holdouts.c.ended_at.is_(None))
    since: dict[str, datetime] = {}
    for query in (opened.group_by(releases.c.policy), held, uncounted):
        for policy, moment in connection.execute(query):
            since[policy] = min(moment, since.get(policy, moment))
    return since
