"""The gates that a cycle really asks, plugged in as in the loop process."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from app import wiring
from app.db.engine import open_engine
from app.domain.release.gates import GateName, Verdict
from app.domain.release.releases import ReleaseState
from app.domain.release.versions import RunStatus, TrainingRun, Version, VersionKind
from app.settings import from_environment
from app.trajectories.segments import ParquetSegments
from pipelines.commands.running.loop_ports import judges_of, loop_world
from pipelines.config import loop_config
from pipelines.cycle import LOOP, PRETRAINER, Case
from tests.integration.batching.rows import NOON, add_turn, add_version
from tests.ports.test_trajectory_store_port import payload


def test_the_off_policy_gate_is_asked_in_every_cycle_and_without_an_engine_it_says_unsupported(sqlite_url: str, tmp_path: Path) -> None:
    settings = from_environment(
        {"RATCHET_DATA": str(tmp_path), "RATCHET_DATABASE_URL": sqlite_url, "RATCHET_ENGINES": "http://127.0.0.1:9"}
    )
    judges = judges_of(settings, loop_config({}), {})
    assert list(judges) == [GateName.TRAINING_HEALTH, GateName.OFFLINE, GateName.OFF_POLICY, GateName.LICENCE]

    ParquetSegments(settings.segments).write("segment-1", [payload("held-out", version="champion")])
    engine = open_engine(sqlite_url)
    add_turn(engine, "held-out", held_out=True, reward=0.5)
    add_version(engine, "champion")
    engine.dispose()
    assert [t.inference_id for t in wiring.rewarded_turns(settings)("composer", "champion", 10)] == ["held-out"]

    champion = Version(
        digest="champion", policy="composer", name="v1", kind=VersionKind.BASE, parent=None, step=0, run_id=None, created_at=NOON,
        base_model="tiny", licence="Apache-2.0",
    )  # fmt: skip
    run = TrainingRun(
        id="run", policy="composer", batch_id="b", parent="champion", status=RunStatus.SUCCEEDED, candidate="candidate", started_at=NOON
    )
    case = Case(candidate=replace(champion, digest="candidate"), champion=champion, run=run, release=cast("Any", None))
    assert judges[GateName.TRAINING_HEALTH](case).verdict is Verdict.INCONCLUSIVE, "nothing was measured"
    result = judges[GateName.OFF_POLICY](case)
    assert (result.gate, result.digest, result.verdict) == (GateName.OFF_POLICY, "candidate", Verdict.INCONCLUSIVE)
    assert result.evidence["status"] == "unsupported"
    assert "ratchet engine" in result.reason


def test_a_release_whose_cycle_died_is_closed_and_blocks_no_slot_for_ever(sqlite_url: str, tmp_path: Path) -> None:
    settings = from_environment({"RATCHET_DATA": str(tmp_path), "RATCHET_DATABASE_URL": sqlite_url})
    desk = wiring.release_desk(settings)
    base, orphan, waiting = (
        Version(
            digest=name, policy="composer", name=name, kind=kind, parent=parent, step=0, run_id=None, created_at=NOON, base_model="tiny",
            licence="Apache-2.0",
        )
        for name, kind, parent in (("v1", VersionKind.BASE, None), ("v2", VersionKind.RL, "v1"), ("v3", VersionKind.PRETRAIN, "v1"))
    )  # fmt: skip
    for version in (base, orphan, waiting):
        wiring.version_book(settings).add(version)
    desk.bootstrap(base, actor=LOOP)
    left = desk.open(orphan, initiator=LOOP)
    desk.start_offline(left.id)
    pretrained = desk.open(waiting, initiator=PRETRAINER)

    world = loop_world(settings, loop_config({}), {})
    assert world.blocked("composer") == "release v2 is in OFFLINE"
    world.close_orphans("composer")
    states = {release.id: release.state for release in wiring.release_ledger(settings).list(policy="composer")}
    assert (states[left.id], states[pretrained.id]) == (ReleaseState.ABORTED, ReleaseState.TRAINED)
    assert world.blocked("composer") is None
