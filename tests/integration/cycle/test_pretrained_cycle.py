"""A pretrained version goes through the same offline gates as any candidate: the loop's next slot takes it, few labels or none."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from app import wiring
from app.domain.ids import utc_now
from app.domain.learning.cycles import CycleStatus
from app.domain.policies import PolicyConfig
from app.domain.release.gates import GateName, GateResult, Verdict
from app.domain.release.releases import Release, ReleaseState
from app.domain.release.versions import VersionKind
from app.policy.tiny import write_tiny
from app.settings import Settings, from_environment
from pipelines.commands.pretrain import continue_from_live
from pipelines.commands.running.loop_ports import judges_of, pretrained_release
from pipelines.config import loop_config
from pipelines.cycle import Case, CyclePorts, run_cycle
from pipelines.training.ports import TrainingPorts
from pipelines.training.pretraining import PretrainingConfig
from tests.fakes.learning import FakeRegistry, FakeTrajectories, LocalTrainers
from tests.fakes.releases import answer, deployed

PRETRAINING = PretrainingConfig(
    steps=4, sequence_tokens=64, sequences_per_step=4, learning_rate=2e-3, warmup_steps=1, dtype="float32", threads=1
)  # fmt: skip
POLICY = PolicyConfig(model="tiny", base_name="tiny", base_model="ratchet/tiny-random")


@pytest.fixture
def settings(sqlite_url: str, tmp_path: Path) -> Settings:
    """A deployment whose champion is the tiny model."""
    settings = from_environment({"RATCHET_DATA": str(tmp_path / "data"), "RATCHET_DATABASE_URL": sqlite_url})
    write_tiny(tmp_path / "tiny", tied=True)
    deployed(settings, tmp_path / "tiny")
    return settings


def pretrained(settings: Settings, tmp_path: Path) -> Release:
    """What `ratchet pretrain` leaves behind."""
    corpus = tmp_path / "corpus" / "code"
    corpus.mkdir(parents=True)
    for number in range(60):
        (corpus / f"module_{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 12)
    continue_from_live(settings, "composer", POLICY, tmp_path / "corpus", PRETRAINING, LocalTrainers())
    waiting = pretrained_release(wiring.release_ledger(settings), "composer")
    assert waiting is not None
    assert waiting.state is ReleaseState.TRAINED
    return waiting


def run_slot(settings: Settings, *, suite: Verdict = Verdict.PASS, slot: int = 0) -> list[Case]:
    """One cycle with the real health gate and an offline suite that says `suite`; returns what the suite was asked."""
    asked: list[Case] = []
    ledger = wiring.release_ledger(settings)

    def ask_suite(case: Case) -> GateResult:
        asked.append(case)
        return answer(GateName.OFFLINE, case.candidate.digest, suite)

    config = loop_config({})
    health = judges_of(settings, config, {})[GateName.TRAINING_HEALTH]
    training = TrainingPorts(
        trajectories=FakeTrajectories(), weights=wiring.open_weights(settings), runs=wiring.run_store(settings),
        progress=wiring.progress_log(settings), folder=settings.data / "training", trainers=LocalTrainers(),
    )  # fmt: skip
    book = wiring.cycle_book(settings)
    ports = CyclePorts(
        cycles=book, batches=wiring.batch_store(settings), versions=wiring.version_book(settings), weights=training.weights,
        releases=wiring.release_desk(settings), registry=FakeRegistry(), training=training, progress=training.progress,
        judges={GateName.TRAINING_HEALTH: health, GateName.OFFLINE: ask_suite},
        pretrained=lambda policy: pretrained_release(ledger, policy), clock=utc_now,
    )  # fmt: skip
    cycle = book.elect("composer", slot, owner="me", now=utc_now(), lease=timedelta(seconds=60))
    assert cycle is not None
    run_cycle(cycle, policy=POLICY, config=config, ports=ports)
    return asked


def test_the_next_slot_judges_a_pretrained_version_and_queues_it(settings: Settings, tmp_path: Path) -> None:
    waiting = pretrained(settings, tmp_path)
    asked = run_slot(settings)
    release = wiring.release_desk(settings).find(waiting.id)
    assert release.state is ReleaseState.QUEUED
    assert [(case.candidate.digest, case.candidate.kind) for case in asked] == [(waiting.digest, VersionKind.PRETRAIN)]
    verdict = wiring.release_desk(settings).recorded(waiting.id)[GateName.TRAINING_HEALTH]
    assert verdict.verdict is Verdict.PASS
    assert "perplexity" in verdict.reason
    cycle = wiring.cycle_book(settings).find("composer", 0)
    assert (cycle.status, cycle.batch_id) == (CycleStatus.DONE, None)


def test_a_pretrained_version_that_fails_the_suite_is_rejected_and_the_slot_after_learns_again(settings: Settings, tmp_path: Path) -> None:
    waiting = pretrained(settings, tmp_path)
    run_slot(settings, suite=Verdict.FAIL)
    assert wiring.release_desk(settings).find(waiting.id).state is ReleaseState.REJECTED
    assert run_slot(settings, slot=18_000) == []
    assert wiring.cycle_book(settings).find("composer", 18_000).status is CycleStatus.HELD  # nobody used the product: too few labels


def test_a_pretrained_version_of_a_champion_that_is_gone_is_aborted_and_the_slot_goes_on(settings: Settings, tmp_path: Path) -> None:
    waiting = pretrained(settings, tmp_path)
    desk, book = wiring.release_desk(settings), wiring.version_book(settings)
    newer = replace(book.find("composer", waiting.champion_digest), digest="e" * 64, name="newer", kind=VersionKind.RL)
    book.add(newer)
    release = desk.open(newer, initiator="user:ada")
    desk.start_offline(release.id)
    for gate in (GateName.TRAINING_HEALTH, GateName.OFFLINE):
        desk.record(release.id, answer(gate, newer.digest))
    desk.start_canary(desk.queue(release.id).id)
    desk.mark_ready(release.id, answer(GateName.CANARY, newer.digest))
    evidence = desk.find(release.id).evidence_digest
    assert evidence is not None
    desk.approve(release.id, approver="user:bob", evidence=evidence)
    desk.begin_promotion(release.id)
    desk.promote(release.id)
    assert run_slot(settings) == []
    aborted = desk.find(waiting.id)
    assert aborted.state is ReleaseState.ABORTED
    assert "run `ratchet pretrain` again" in (aborted.reason or "")
    assert wiring.cycle_book(settings).find("composer", 0).status is CycleStatus.HELD


def test_forgetting_a_domain_fails_the_health_gate(settings: Settings, tmp_path: Path) -> None:
    waiting = pretrained(settings, tmp_path)
    runs = wiring.run_store(settings)
    run_id = wiring.version_book(settings).find("composer", waiting.digest).run_id
    assert run_id is not None
    run = runs.get(run_id)
    assert run is not None
    runs.put(replace(run, metrics={**run.metrics, "perplexity_after": {"code": 2 * run.metrics["perplexity_before"]["code"]}}))
    run_slot(settings)
    release = wiring.release_desk(settings).find(waiting.id)
    assert release.state is ReleaseState.REJECTED
    assert "held-out perplexity rose" in (release.reason or "")
