"""What the demo's terminal sees is what is in the tables, on both databases."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Connection, Engine, insert

from app.db.engine import writing
from app.db.sight import SqlPages
from app.db.sight.demonstration import SqlOperations
from app.db.tables import (
    cycles,
    deployment_pointer,
    exposures,
    gate_results,
    labels,
    observations,
    progress,
    release_history,
    releases,
    turns,
    versions,
)
from app.domain.release.releases import ReleaseState
from app.domain.views.measures import Measure

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def operations(engine: Engine) -> SqlOperations:
    with writing(engine) as connection:
        for digest, name, step in (("d0", "tiny-base-s0", 0), ("d1", "tiny-rl-<s1>", 1)):
            connection.execute(
                insert(versions).values(
                    digest=digest, policy="composer", name=name, kind="rl" if step else "base", parent="d0" if step else None, step=step,
                    run_id=None, base_model="m", licence="Apache-2.0", tags={}, created_at=NOW + timedelta(seconds=step),
                )
            )  # fmt: skip
        connection.execute(
            insert(deployment_pointer).values(
                policy="composer", digest="d0", generation=1, previous=None, anchor="d0", holdback=0.0, release_id=None, changed_at=NOW
            )
        )
        connection.execute(
            insert(releases).values(
                id="r1", policy="composer", digest="d1", version_name="tiny-rl-<s1>", state="CANARY", generation=2, stage=1,
                stage_since=NOW, champion_digest="d0", champion_generation=1,
                reason="canary starts at 5%", config={}, created_at=NOW, changed_at=NOW,
            )
        )  # fmt: skip
        connection.execute(
            insert(release_history).values(
                release_id="r1",
                generation=1,
                from_state=None,
                to_state="TRAINED",
                stage=None,
                reason=None,
                actor="system:loop",
                occurred_at=NOW,
            )
        )
        for verdict in ("inconclusive", "pass"):
            connection.execute(
                insert(gate_results).values(
                    release_id="r1", gate="g3_canary", digest="d1", verdict=verdict, action="continue", reason=f"it is {verdict}",
                    evidence={"units": 3}, config_hash="c", evidence_hash="e", decided_at=NOW,
                )
            )  # fmt: skip
        connection.execute(
            insert(cycles).values(
                policy="composer", slot=60, status="held", step="elected", reason="too few", owner="o", fencing_token=1, attempt=1,
                timings={"batch": 0.5}, started_at=NOW,
            )
        )  # fmt: skip
        connection.execute(insert(progress).values(policy="composer", task="training", done=3, total=9, detail={}, updated_at=NOW))
        for number in range(12):
            _turn(connection, number)
    return SqlOperations(engine, engine)


def _turn(connection: Connection, number: int) -> None:
    at = NOW + timedelta(seconds=number)
    common = {"policy": "composer", "version": "d0", "segment": "task=complete,tier=panel", "actor": f"a{number}", "finished_at": at}
    connection.execute(
        insert(turns).values(
            inference_id=f"i{number}", episode_id=f"e{number}", kind="answer", source="gateway", started_at=at, label_due_at=at,
            finish_reason="stop", train_consent=True, has_logprobs=True, prompt_tokens=1, completion_tokens=1, tool_calls=[],
            stage="champion", arm="champion", probability=1.0, completion="x", tags={}, labelled_at=at if number < 10 else None, **common,
        )
    )  # fmt: skip
    connection.execute(
        insert(exposures).values(
            id=f"x{number}", policy="composer", inference_id=f"i{number}", episode_id=f"e{number}", actor=f"a{number % 4}",
            stage="champion", arm="champion", probability=1.0, share=0.0, holdback=0.0, digest="d0", occurred_at=at,
        )
    )  # fmt: skip
    if number >= 10:
        return
    terms = [
        {"name": "edit_persistence", "value": 0.2, "detail": {"survival": 0.5}},
        {"name": "follow_up", "value": -0.9 if number < 3 else None},
    ]
    connection.execute(
        insert(labels).values(
            inference_id=f"i{number}", revision=1, current=True, reward=0.1, terms=terms, rule_set="rs",
            exclusion="no_consent" if number == 0 else None, held_out=False, labelled_at=at, **common,
        )
    )  # fmt: skip
    connection.execute(
        insert(observations).values(
            source="api", id=f"o{number}", inference_id=f"i{number}", name="task_success", value=number % 2 == 0, occurred_at=at,
            received_at=at, tags={}, status="joined",
        )
    )  # fmt: skip


def test_labels_carry_what_pages_show(operations: SqlOperations) -> None:
    rows = operations.labels("composer")
    assert len(rows) == 10
    assert {row.tier for row in rows} == {"panel"}
    assert {row.persistence for row in rows} == {0.5}
    assert sum(row.follow_up is not None for row in rows) == 3
    assert sum(row.success or 0.0 for row in rows) == 5.0
    assert rows[-1].exclusion == "no_consent"


def test_versions_are_measured_by_their_labels(operations: SqlOperations) -> None:
    base, candidate = operations.versions("composer")
    assert (base.name, base.turns, candidate.turns) == ("tiny-base-s0", 10, 0)
    assert base.persistence == Measure(n=10, mean=0.5, low=0.2, high=0.8)  # all alike: ± 3/n
    assert base.dissatisfied == Measure(n=3, mean=1.0, low=0.0, high=1.0)
    assert base.success is not None
    assert (base.success.n, base.success.mean) == (10, 0.5)
    assert base.reward is not None
    assert (base.reward.mean, base.reward.low, base.reward.high) == pytest.approx((0.1, -0.2, 0.4))
    assert candidate.persistence is None


def test_a_gate_s_newest_answer_is_the_one_shown(operations: SqlOperations) -> None:
    [gate] = operations.gates("r1")
    assert (gate.verdict, gate.evidence) == ("pass", {"units": 3})


def test_the_rest_is_read_as_it_stands(operations: SqlOperations, engine: Engine) -> None:
    pages = SqlPages(engine)
    pointer, [release], [step] = operations.pointer("composer"), operations.releases("composer"), pages.steps("r1")
    assert pointer is not None
    assert pointer.digest == "d0"
    assert (release.state, release.stage) == (ReleaseState.CANARY, 1)
    assert step.to_state == "TRAINED"
    exposed = operations.exposed("d0")
    assert (exposed.requests, exposed.people) == (12, 4)
    nothing = operations.exposed("nothing")
    assert (nothing.first_at, nothing.units, nothing.share) == (None, 0, 0.0)
    assert operations.waiting_turns("composer") == 2
    assert operations.cycles("composer")[0].reason == "too few"
    assert operations.progress("composer")[0].total == 9
    assert operations.accepted_events() == 0
    assert pages.policies() == ["composer"]


def test_harm_is_counted_in_units_of_both_arms_and_as_a_share_of_the_people_served_meanwhile(
    operations: SqlOperations, engine: Engine
) -> None:
    """Ten people in the canary of d9, three of them on it, one in two stages; five more meanwhile on the champion alone, one later."""
    drawn = [(f"p{n}", "canary-0", "d9" if n < 3 else "d0", "r9") for n in range(10)]
    drawn += [*((f"q{n}", "champion", "d0", None) for n in range(5)), ("p0", "canary-1", "d9", "r9"), ("later", "champion", "d0", None)]
    with writing(engine) as connection:
        for n, (actor, stage, digest, release) in enumerate(drawn):
            row = {
                "id": f"h{n}", "policy": "composer", "inference_id": f"h{n}", "episode_id": f"h{n}", "actor": actor, "release_id": release,
                "stage": stage, "arm": "candidate" if digest == "d9" else "champion", "probability": 0.5, "share": 0.5, "holdback": 0.0,
                "digest": digest, "occurred_at": NOW + timedelta(days=1, seconds=n),
            }  # fmt: skip
            connection.execute(insert(exposures).values(row))
    exposed = operations.exposed("d9")
    assert (exposed.requests, exposed.people, exposed.units, exposed.people_meanwhile) == (4, 3, 11, 15)
    assert exposed.share == 0.2


def test_a_release_is_found_however_many_came_after_it(operations: SqlOperations, engine: Engine) -> None:
    """Pages searched the newest thousand: a link to a release died with the thousandth after it."""
    pages = SqlPages(engine)
    found = pages.release("r1")
    assert found is not None
    assert (found.id, found.policy) == ("r1", "composer")
    assert pages.release("never") is None
