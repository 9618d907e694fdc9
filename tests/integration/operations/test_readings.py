"""What the database knows of the loop, read as metrics: every name of the catalogue, with the values of the rows."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, insert

from app.db.engine import writing
from app.db.operations.facts import BACKUP, DRILL, identity, read_fact, write_fact
from app.db.operations.readings import SqlReadings
from app.db.operations.server import server_state, timeline
from app.db.tables import (
    alarms,
    audit_head,
    circuit_breakers,
    counters,
    cycles,
    deployment_pointer,
    engine_versions,
    leases,
    progress,
    release_history,
    releases,
    training_runs,
    turn_counts,
    webhook_deliveries,
)
from app.telemetry.catalogue import CATALOGUE, FROM_DATABASE
from tests.fakes.clock import FrozenClock
from tests.fakes.gateway import CHAMPION, NOON

AGO = NOON - timedelta(minutes=1)


def cycle(slot: int, status: str) -> dict[str, Any]:
    at = NOON + timedelta(seconds=slot)
    return {
        "policy": "composer", "slot": slot, "status": status, "step": "batch", "fencing_token": 1, "attempt": 1, "timings": {},
        "started_at": at, "finished_at": None if status == "running" else at,
    }  # fmt: skip


def release(number: int, state: str) -> dict[str, Any]:
    return {
        "id": f"r{number}", "policy": "composer", "digest": f"d{number}", "version_name": f"v{number}", "state": state, "generation": 1,
        "champion_digest": CHAMPION, "champion_generation": 1, "config": {}, "created_at": NOON, "changed_at": NOON,
        "approval_expires_at": NOON + timedelta(hours=2) if state == "READY" else None,
    }  # fmt: skip


def fill(engine: Engine) -> None:
    """A little of everything."""
    with writing(engine) as connection:
        connection.execute(
            insert(deployment_pointer),
            {"policy": "composer", "digest": CHAMPION, "generation": 7, "anchor": CHAMPION, "holdback": 0.0, "changed_at": AGO},
        )
        statuses = ("done", "held", "skipped", "held", "failed", "running")
        connection.execute(insert(cycles), [cycle(-600 + n, status) for n, status in enumerate(statuses)])
        connection.execute(insert(releases), [release(1, "READY"), release(2, "ROLLED_BACK")])
        history = {"release_id": "r2", "generation": 1, "to_state": "ROLLED_BACK", "actor": "system:watch", "occurred_at": NOON}
        connection.execute(insert(release_history), history)
        run = {"policy": "composer", "batch_id": "b", "parent": CHAMPION, "status": "succeeded", "config": {}}
        numbers = {"mismatch": 0.002, "effective_share": 0.8, "anchor_budget_used": 0.4}
        old, new = ({"id": name, "started_at": NOON - timedelta(hours=h), "finished_at": NOON} for name, h in (("old", 9), ("new", 1)))
        connection.execute(insert(training_runs), [{**run, **old, "metrics": {}}, {**run, **new, "metrics": numbers}])
        steps = {"policy": "composer", "done": 1.0, "total": 4.0}
        connection.execute(
            insert(progress),
            [
                {**steps, "task": "holdback", "detail": {"log_e": 2.5}, "updated_at": AGO},
                {**steps, "task": "canary", "detail": {"log_e": 9.0}, "updated_at": NOON - timedelta(minutes=4)},
                {**steps, "task": "training", "detail": {}, "updated_at": NOON - timedelta(hours=1)},
            ],
        )
        alarm = {"id": "a", "policy": "composer", "kind": "incident", "generation": 7, "reason": "", "raised_by": "", "until": ""}
        connection.execute(insert(alarms), {**alarm, "raised_at": NOON})
        connection.execute(insert(circuit_breakers), {"policy": "composer", "reason": "", "frozen_at": NOON, "unfreeze_votes": []})
        held = {"policy": "composer", "digest": CHAMPION, "address": "http://e", "state": "ready", "changed_at": NOON, "seen_at": NOON}
        held |= {"region": ""}
        gone = {**held, "engine_id": "gone", "detail": None, "seen_at": AGO, "region": "us", "digest": "older"}
        connection.execute(
            insert(engine_versions),
            [{**held, "engine_id": "good", "detail": None, "region": "eu"}, {**held, "engine_id": "off", "detail": "kl 0.3"}, gone],
        )
        connection.execute(insert(leases), {"name": "relay", "owner": "x", "token": 3, "expires_at": NOON + timedelta(seconds=3)})
        connection.execute(insert(audit_head), {"id": 1, "seq": 12, "hash": "h"})
        connection.execute(insert(webhook_deliveries), {"webhook_id": "w", "event_id": "e", "attempts": 1, "next_attempt_at": NOON})
        connection.execute(insert(counters), {"policy": "composer", "name": "late", "value": 4})
        connection.execute(insert(turn_counts), {"policy": "composer", "version": CHAMPION, "turns": 10, "labelled": 6})
        write_fact(connection, BACKUP, {}, now=NOON - timedelta(hours=30))
        write_fact(connection, DRILL, {}, now=NOON - timedelta(days=8))


def test_every_metric_of_the_database_is_told_with_its_labels(engine: Engine) -> None:
    fill(engine)
    readings = SqlReadings(engine, engine, clock=FrozenClock(NOON)).readings()
    told = {reading.metric for reading in readings}
    server = {"ratchet_database_synchronous", "ratchet_database_timeline"} if engine.dialect.name == "postgresql" else set[str]()
    assert told == FROM_DATABASE - {"ratchet_database_up", "ratchet_database_synchronous", "ratchet_database_timeline"} | server
    for reading in readings:
        assert set(reading.labels) == set(CATALOGUE[reading.metric].labels), reading


def test_the_values_are_those_of_the_rows(engine: Engine) -> None:
    fill(engine)
    found = SqlReadings(engine, engine, clock=FrozenClock(NOON)).readings()
    value = {(r.metric, r.labels.get("status") or r.labels.get("subject") or ""): r.value for r in found}
    assert value["ratchet_cycles_held_in_a_row", ""] == 3, "a skipped slot between held ones is no good one"
    assert value["ratchet_cycles_total", "held"] == 2
    assert value["ratchet_cycle_running_seconds", ""] == pytest.approx(595)
    assert value["ratchet_run_mismatch", ""] == 0.002, "the newest run, not the one before"
    assert value["ratchet_harm_e_value", "holdback"] == pytest.approx(12.18, abs=0.01)
    assert ("ratchet_harm_e_value", "canary") not in value, "old evidence is no evidence"
    assert value["ratchet_approval_expires_seconds", ""] == 7200
    assert value["ratchet_rollbacks_total", ""] == 1
    assert value["ratchet_engines_holding_champion", ""] == 2, "one has not been heard of for a minute"
    assert value["ratchet_engines_mismatched", ""] == 1
    where = {(r.metric, r.labels["region"]): r.value for r in found if "region" in r.labels}
    engines = {region: where["ratchet_region_engines", region] for region in ("", "eu", "us")}
    assert engines == {"": 1, "eu": 1, "us": 0}, "one in each of two, and none of the third was heard of for a minute"
    assert (where["ratchet_region_lag_seconds", "eu"], where["ratchet_region_lag_champions", "eu"]) == (0, 0)
    assert where["ratchet_region_lag_seconds", "us"] > 0
    assert ("ratchet_region_lag_champions", "us") not in where, "it holds no champion of this policy"
    assert value["ratchet_relay_in_office", ""] == 1
    assert value["ratchet_backup_age_seconds", ""] == 30 * 3600
    assert value["ratchet_promotions_frozen", ""] == 1


def test_an_empty_deployment_is_read_too(engine: Engine) -> None:
    told = {r.metric: r.value for r in SqlReadings(engine, engine, clock=FrozenClock(NOON)).readings()}
    assert told["ratchet_relay_in_office"] == 0
    assert "ratchet_backup_age_seconds" not in told


def test_a_deployment_has_one_id_for_ever(engine: Engine) -> None:
    with writing(engine) as connection:
        first = identity(connection, now=NOON)
        assert identity(connection, now=NOON + timedelta(days=1)) == first
        write_fact(connection, BACKUP, {"files": 3}, now=NOON)
        assert (fact := read_fact(connection, BACKUP)) is not None
        assert (fact.value, fact.at) == ({"files": 3}, NOON)


def test_a_server_says_its_timeline_and_that_nothing_waits_for_a_standby(engine: Engine) -> None:
    with writing(engine) as connection:
        state = server_state(connection)
        if engine.dialect.name == "sqlite":
            assert (state, timeline(connection)) == (None, 0)
        else:
            assert state is not None
            assert (state.timeline, state.synchronous) == (1, False)
