"""A watch over a policy with simulated people, on a real database and a clock of the test's."""

from dataclasses import dataclass

from sqlalchemy import Engine

from app.db.release.evidence import SqlEvidenceBook
from app.db.release.holdouts import SqlHoldoutBook
from app.domain.release.alarms import Alarm, AlarmKind
from app.domain.release.releases import IN_FLIGHT, Release, ReleaseState
from pipelines.evaluation.config import ApprovalConfig, GatesConfig, Good, MetricClass, MetricConfig, StageConfig, terms_of
from pipelines.watch import Watch, WatchPorts
from tests.fakes.clock import FrozenClock
from tests.fakes.learning import FakeProgress
from tests.fakes.releases import ADA, BOB, POLICY, ReleaseRoom, release_room
from tests.fakes.traffic import Behaviour, Traffic

S = ReleaseState
DECIDED = frozenset(S) - IN_FLIGHT | {S.READY}


def small_gates(**changes: object) -> GatesConfig:
    """Gates that a few thousand simulated people can answer: a margin of ten points, windows of ten seconds, the production alphas."""
    k, m = MetricClass, MetricConfig
    values: dict[str, object] = {
        "stages": (
            StageConfig(share=0.05, units=200, minutes=10.0), StageConfig(share=0.25, units=200, minutes=10.0),
            StageConfig(share=0.50, units=0, minutes=0.0, least_units=0),
        ),
        "window_s": 10.0, "turn_wait_s": 30.0, "settle_s": 1.0, "min_power": 0.0, "holdback_s": 3600.0, "no_data_hold_s": 600.0,
        "lasting_share": 0.0,
        "metrics": (
            m(name="fault", source="fault", kind=k.HARD, good=Good.DOWN, window_s=0.0, prior=0.01),
            m(name="task_success", source="observation:task_success", kind=k.GOLD, abort_margin=0.02, margin=0.10),
            m(name="reward", source="reward", kind=k.PROXY, low=-1.0, high=1.0, margin=0.10, prior=0.1),
            m(name="acts", source="acts", kind=k.BEHAVIOUR, good=Good.SAME, abort_margin=0.03, prior=0.95),
            m(name="asks", source="asks", kind=k.BEHAVIOUR, good=Good.SAME, abort_margin=0.03, prior=0.05),
            m(name="refuses", source="refuses", kind=k.BEHAVIOUR, good=Good.SAME, abort_margin=0.03, prior=0.02),
            m(name="long", source="length", threshold=70.0, kind=k.BEHAVIOUR, good=Good.SAME, abort_margin=0.03, prior=0.02),
            m(name="undone", source="has:undo", kind=k.USER_HARM, good=Good.DOWN, prior=0.05),
        ),
        "approval": ApprovalConfig(ttl_s=3600.0),
    }  # fmt: skip
    return GatesConfig(**{**values, **changes})  # type: ignore[arg-type] - a test's own names


@dataclass(kw_only=True)
class WatchedRoom:
    """Everything a test of the watch needs; version v1 is champion."""

    room: ReleaseRoom
    watch: Watch
    traffic: Traffic
    config: GatesConfig

    def queue(self, digest: str, behaviour: Behaviour) -> Release:
        """A candidate that the engines hold."""
        self.traffic.behaviours[digest] = behaviour
        self.traffic.engines_hold(digest)
        return self.room.queued(digest)

    def run(self, release: Release, *, until: frozenset[ReleaseState], people: int = 100, rounds: int = 100) -> Release:
        """People come and the watch ticks until the release is in one of the states, or the rounds are over."""
        for _ in range(rounds):
            self.watch.tick()
            release = self.room.desk.find(release.id)
            if release.state in until:
                return release
            self.traffic.serve(people)
        return release


def watched_room(
    engine: Engine, *, config: GatesConfig | None = None, champion: Behaviour | None = None, seed: int = 1, clock: FrozenClock | None = None
) -> WatchedRoom:
    """A room with a champion that was used by five hundred people already."""
    config = config or small_gates()
    room = release_room(engine, terms=terms_of(config), clock=clock)
    traffic = Traffic(engine=engine, clock=room.clock, behaviours={"v1": champion or Behaviour()}, seed=seed)
    traffic.engines_hold("v1")
    traffic.serve(500)
    return WatchedRoom(room=room, watch=new_watch(engine, room, config), traffic=traffic, config=config)


def new_watch(engine: Engine, room: ReleaseRoom, config: GatesConfig) -> Watch:
    """A watch as it is after a start: nothing remembered."""
    ports = WatchPorts(
        desk=room.desk, releases=room.ledger, evidence=SqlEvidenceBook(engine), holdouts=SqlHoldoutBook(engine), progress=FakeProgress(),
        clock=room.clock,
    )  # fmt: skip
    return Watch(policy="tab", config=config, ports=ports)


def promoted(world: WatchedRoom, digest: str, behaviour: Behaviour | None = None) -> str:
    """A version that people made champion; the id of its release."""
    release = world.run(world.queue(digest, behaviour or Behaviour()), until=DECIDED)
    assert release.state is S.READY, release.reason
    for person in (ADA, BOB)[: release.approvals_needed]:
        world.room.desk.approve(release.id, approver=person, evidence=release.evidence_digest or "")
    world.watch.tick()
    assert world.room.desk.pointer(POLICY).digest == digest
    return release.id


def serve(world: WatchedRoom, rounds: int, *, people: int = 100, known: int | None = None) -> None:
    for _ in range(rounds):
        world.traffic.serve(people, known=known)
        world.watch.tick()


def alarms(world: WatchedRoom, kind: AlarmKind) -> list[Alarm]:
    return [alarm for alarm in world.room.desk.alarms(POLICY) if alarm.kind is kind]


def free(world: WatchedRoom) -> None:
    """Two people free promotions."""
    for person in (ADA, BOB):
        world.room.desk.unfreeze(POLICY, actor=person)
