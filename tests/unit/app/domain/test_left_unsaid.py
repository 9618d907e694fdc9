"""What a record says where nobody said anything: nothing that would count, pay, cut, hold back or be shown."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from app.domain.learning.boxes import BoxSpec, Limits
from app.domain.learning.cycles import MAX_ATTEMPTS
from app.domain.learning.rollouts import Closed, Outcome, Rollout
from app.domain.release.gates import GateName, GateResult, Verdict
from app.domain.release.holdouts import ArmMean, Holdout, PersonSums
from app.domain.release.releases import Pointer, Release, ReleaseState, Route
from app.domain.release.sessions import Session
from app.domain.release.sums import Sums
from app.domain.release.terms import Terms
from app.domain.release.versions import RunStatus, TrainingRun, Version, VersionKind, version_name
from app.domain.telemetry.events import CloudEvent
from app.domain.telemetry.serving import EngineSight, GenerateRequest, GenerationChunk, ScoreRequest
from app.domain.telemetry.streams import EffectBatch, OutgoingEvent
from app.domain.telemetry.turns import SamplingParams
from app.domain.views.operations import Exposed

NOW = datetime(2026, 11, 27, 4, tzinfo=UTC)


def test_a_turn_that_never_came_said_nothing_and_is_not_labelled() -> None:
    session = Session(
        inference_id="t", actor="a", episode_id="e", release_id=None, stage="champion", arm="champion", probability=1.0, share=0.0,
        holdback=0.0, digest="v", exposed_at=NOW, served=False, completion_tokens=0,
    )  # fmt: skip
    assert (session.labelled, session.excluded, session.prompt_tokens, session.completion) == (False, False, 0, "")
    assert (session.reward, session.terms, session.signals, session.total_s, session.time_to_first_token_s) == (None,) * 5
    assert (session.finish_reason, session.tool_verdicts) == (None, ())


def test_a_route_without_a_canary_sends_nobody_to_one() -> None:
    pointer = Pointer(
        policy="tab", digest="v1", generation=1, previous="v0", anchor="v0", holdback=0.0, release_id=None, changed_at=NOW
    )  # fmt: skip
    route = Route(policy="tab", pointer=pointer)
    assert (route.canary_stage, route.canary_share, route.canary_lasting) == (0, 0.0, 0.0)
    assert (route.canary_digest, route.canary_release, route.coming, route.holdout, route.quarantined) == (
        None,
        None,
        None,
        None,
        frozenset(),
    )
    assert pointer.reference == "v0", "the holdback is on the version before, where it is on no other"


def test_a_batch_of_nothing_applies_nothing_and_an_event_was_sent_never() -> None:
    batch = EffectBatch()
    assert (batch.events, batch.dead, batch.replayed_dead_letters) == ((), (), ())
    assert (batch.next_offsets, batch.high_waters, batch.incarnations, batch.group) == ({}, {}, {}, "ratchet-ingest")
    event = CloudEvent(id="e", source="s", type="t", time=NOW, key="k", data=b"")
    assert OutgoingEvent(seq=1, topic="t", event=event, received_at=NOW).rounds == 0


def test_an_engine_that_only_answers_is_neither_ejected_nor_draining() -> None:
    sight = EngineSight(address="a", answers=True)
    assert (sight.ejected, sight.draining) == (False, False)
    assert {getattr(sight, name) for name in ("fault", "queue", "sampled_tokens", "acceptance", "drafters", "precision")} == {None}


def test_a_request_of_an_engine_streams_and_cuts_nothing() -> None:
    asked = GenerateRequest(policy="p", digest="d", messages=[], sampling=SamplingParams())
    assert (asked.stream, asked.record_experts, asked.likely, asked.tools, asked.shape) == (True, False, None, None, None)
    scored = ScoreRequest(policy="p", digest="d", prompt_tokens=[1], completion_tokens=[2])
    assert (scored.temperature, scored.top_p, scored.top_k) == (1.0, 1.0, 0)
    assert (SamplingParams().temperature, SamplingParams().top_p, SamplingParams().max_tokens, SamplingParams().stop) == (1.0, 1.0, 256, ())
    chunk = GenerationChunk(text="", tokens=[], logprobs=[])
    assert {getattr(chunk, name) for name in ("finish_reason", "likely", "mixed_versions", "unscorable", "precision", "message")} == {None}


def test_sums_of_nobody_are_zero() -> None:
    assert (Sums().n, Sums().total, Sums().squares, Sums().negative, Sums().mean, Sums().variance) == (0, 0, 0, 0, 0.0, 0.0)
    people = PersonSums()
    assert (people.people, people.n, people.x, people.nn, people.xx, people.nx) == (0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert (ArmMean().people, ArmMean().turns, ArmMean().mean) == (0, 0, None)


def test_who_met_nobody_has_no_share_of_anybody() -> None:
    assert Exposed(requests=0, people=0, first_at=None, last_at=None).share == 0.0
    assert Exposed(requests=3, people=1, first_at=NOW, last_at=NOW).share == 0.0
    met = Exposed(requests=3, people=1, first_at=NOW, last_at=NOW, people_meanwhile=4)
    assert (met.share, met.units) == (0.25, 0)


def test_a_try_that_nobody_took_has_no_token_and_no_flags() -> None:
    rollout = Rollout(id="r", policy="p", taskset="t", task="k", task_hash="h", group="g", attempt=0, harness_hash="x")
    assert (rollout.token, rollout.flags, rollout.outcome, rollout.reward, rollout.episode) == (0, (), None, None, None)
    assert Closed(outcome=Outcome.SOLVED, reward=1.0, duration_s=1.0, turns=1).flags == ()


def test_a_box_has_no_workspace_no_gateway_and_no_end_of_its_own() -> None:
    limits = Limits(cpu_s=1, memory_bytes=1, file_bytes=1)
    assert (limits.processes, limits.workspace_bytes / 2**20) == (16, 256.0)
    spec = BoxSpec(limits=limits)
    assert (spec.workspace, spec.gateway, spec.lifetime_s, spec.scratch) == (None, None, None, ())
    assert BoxSpec(limits=limits, workspace=Path("w"), scratch=("/tests",)).scratch == ("/tests",)


def test_terms_that_nobody_set_are_the_ones_that_people_were_told() -> None:
    terms = Terms()
    assert (terms.stages, terms.lasting, terms.holdback) == ((0.05, 0.25, 0.5), 0.0, 0.1)
    assert (terms.approvals, terms.approvals_in_doubt, terms.approval_ttl_s / 3600) == (1, 2, 4.0)
    assert (terms.breaker_rollbacks, terms.breaker_window_s / 3600, terms.rollbacks_max, terms.reentry_season_s) == (2, 24.0, 3, 0.0)
    assert (terms.high_tier, terms.sealed, terms.by_people, terms.forced, terms.edited_by, terms.parent) == (False, False, *(None,) * 4)
    assert (terms.gates, terms.plan, terms.config_hash) == ({}, {}, "")
    assert terms.judges == 1, "where no people judge, one reads what the gates say"


def test_records_of_training_and_gates_say_no_more_than_they_were_told() -> None:
    version = Version(
        digest="d", policy="p", name="n", kind=VersionKind.BASE, parent=None, step=0, run_id=None, created_at=NOW, base_model="b",
        licence="Apache-2.0",
    )  # fmt: skip
    assert (version.optimizer_uri, version.tags) == (None, {})
    run = TrainingRun(id="r", policy="p", batch_id="b", parent="d", status=RunStatus.RUNNING, started_at=NOW)
    assert (run.hold_reason, run.message, run.candidate, run.finished_at, run.metrics, run.config) == (None, None, None, None, {}, {})
    result = GateResult(
        gate=GateName.CANARY, digest="d", verdict=Verdict.PASS, reason="r", config_hash="c", evidence_hash="e", decided_at=NOW
    )  # fmt: skip
    assert result.evidence == {}
    assert version_name(base="smol", kind=VersionKind.RL, created_at=NOW, step=12) == "smol-rl-1127-s12"
    assert MAX_ATTEMPTS == 2, "a slot is tried again once"


def test_a_release_and_a_holdout_of_which_nothing_happened_yet_have_not_ended() -> None:
    release = Release(
        id="r", policy="p", digest="d", version_name="n", state=ReleaseState.TRAINED, generation=0, stage=None, champion_digest="c",
        champion_generation=0, evidence_digest=None, reason=None, created_at=NOW, changed_at=NOW,
    )  # fmt: skip
    assert {release.stage_since, release.initiator, release.approvals_needed, release.approval_expires_at} == {None}
    assert release.config == {}
    holdout = Holdout(
        id="h", policy="p", digest="d", share=0.01, began_at=NOW, ends_at=NOW + timedelta(days=7), counted_until=NOW
    )  # fmt: skip
    assert {holdout.read_until, holdout.ended_at, holdout.ended_because} == {None}
    assert (dict(holdout.thresholds), holdout.readings, holdout.told) == ({}, (), [])
