"""The gates that a cycle really asks, plugged in as in the loop process."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from app import wiring
from app.db.engine import open_engine
from app.domain.release.gates import GateName, Verdict
from app.domain.release.releases import ReleaseState
from app.domain.release.versions import RunStatus, TrainingRun, Version, VersionKind
from app.settings import from_environment
from app.trajectories.segments import ParquetSegments
from pipelines.commands.running.loop_ports import corrections_of, judges_of, loop_world
from pipelines.config import loop_config
from pipelines.cycle import LOOP, PRETRAINER, Case
from tests.fakes.gateway import policy_config
from tests.fakes.releases import POLICY, release_room, version
from tests.integration.batching.rows import NOON, add_turn, add_version
from tests.integration.labelling.test_reactions import say
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
    for made in (base, orphan, waiting):
        wiring.version_book(settings).add(made)
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


def test_people_who_wait_for_an_approval_do_not_keep_the_loop_from_training_unless_it_is_told_so(sqlite_url: str, tmp_path: Path) -> None:
    engine = open_engine(sqlite_url)
    room = release_room(engine)
    settings = from_environment({"RATCHET_DATA": str(tmp_path), "RATCHET_DATABASE_URL": sqlite_url})
    assert loop_world(settings, loop_config({}), {}).blocked(POLICY) is None
    room.ready("v2")
    assert loop_world(settings, loop_config({}), {}).blocked(POLICY) is None
    assert loop_world(settings, loop_config({"schedule": {"ready_blocks": True}}), {}).blocked(POLICY) == "release tiny-v2 is in READY"
    engine.dispose()


def test_a_chain_goes_on_from_the_newest_candidate_and_stops_when_too_many_are_ahead(sqlite_url: str, tmp_path: Path) -> None:
    engine = open_engine(sqlite_url)
    room = release_room(engine)
    settings = from_environment({"RATCHET_DATA": str(tmp_path), "RATCHET_DATABASE_URL": sqlite_url})
    book, chained = wiring.version_book(settings), loop_config({"schedule": {"chain": 1}, "batching": {"staleness": 1}})
    for digest, parent in (("v1", None), ("v2", "v1"), ("v3", "v2")):
        book.add(replace(version(digest), parent=parent))
    world = loop_world(settings, chained, {})
    assert world.ports.ahead is not None
    assert (world.ports.ahead(POLICY), world.blocked(POLICY)) == (None, None)
    room.canary("v2")
    assert (world.ports.ahead(POLICY), world.blocked(POLICY)) == ("v2", None)
    room.queued("v3")
    assert world.blocked(POLICY) == "2 updates are ahead of the champion already (chain = 1)"
    unchained = loop_world(settings, loop_config({}), {})
    assert unchained.ports.ahead is not None
    assert unchained.ports.ahead(POLICY) is None, "each update continues from the champion where no chain is wanted"
    assert unchained.blocked(POLICY) == "release tiny-v3 is in QUEUED"
    engine.dispose()


def test_an_update_forgets_no_state_that_a_release_or_a_rollback_may_go_on_from(sqlite_url: str, tmp_path: Path) -> None:
    engine = open_engine(sqlite_url)
    room = release_room(engine)
    settings = from_environment({"RATCHET_DATA": str(tmp_path), "RATCHET_DATABASE_URL": sqlite_url})
    for digest in ("v2", "v3", "v5", "v6"):
        room.champion(digest)
    room.canary("v4")
    for digest in ("v1", "v7"):
        wiring.version_book(settings).add(version(digest))
    room.desk.pin(POLICY, "v7", actor="user:ada", reason="the one that the customers liked")
    for rollbacks, back_to in ((1, {"v5"}), (3, {"v5", "v3", "v2"})):
        world = loop_world(settings, loop_config({"gates": {"rollbacks_max": rollbacks}}), {})
        assert set(world.ports.training.pinned(POLICY)) == {"v1", "v4", "v6", "v7"} | back_to
    engine.dispose()


def test_a_slot_waits_for_labels_but_not_for_those_of_a_version_that_was_pretrained(sqlite_url: str, tmp_path: Path) -> None:
    engine = open_engine(sqlite_url)
    room = release_room(engine)
    settings = from_environment({"RATCHET_DATA": str(tmp_path), "RATCHET_DATABASE_URL": sqlite_url})
    world = loop_world(settings, loop_config({"batching": {"min_turns": 2}}), {})
    assert world.thin(POLICY) == "0 of 2 labels"
    for name, changes in (("a", {}), ("b", {"held_out": True}), ("c", {"version": "v0"}), ("d", {"exclusion": "no_consent"})):
        add_turn(engine, name, policy=POLICY, **{"version": "v1", **changes})
    assert world.thin(POLICY) == "1 of 2 labels", "of the champion, with consent, and of nobody who only measures"
    room.desk.open(replace(version("v9"), kind=VersionKind.PRETRAIN), initiator=PRETRAINER)
    assert world.thin(POLICY) is None
    engine.dispose()


def test_an_update_learns_from_what_people_showed_under_the_rules_in_force(sqlite_url: str, tmp_path: Path) -> None:
    engine = open_engine(sqlite_url)
    add_version(engine, "champion")
    for name in ("shown", "silent"):
        add_turn(engine, name, actor="asker", completion="wrong")
    say(engine, "demonstration", "right", of="shown", actor="colleague", minute=10)
    engine.dispose()
    settings = from_environment({"RATCHET_DATA": str(tmp_path), "RATCHET_DATABASE_URL": sqlite_url})
    items = [SimpleNamespace(inference_id=name) for name in ("shown", "silent")]
    batch = cast("Any", SimpleNamespace(policy="composer", window_to=NOON + timedelta(days=1), items=items))
    config = loop_config({"batching": {"newcomer_days": 1}})
    found = corrections_of(settings, config, {"composer": policy_config()}, batch)
    assert [(one.inference_id, one.wanted, one.author, one.newcomer) for one in found] == [("shown", "right", "colleague", True)]
