"""Every list that is shown ends somewhere: the newest are in it, as many as are promised, and one more row changes nothing."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, Table

from app.db import tables
from app.db.engine import reading
from app.db.learning import readings
from app.db.learning.cycles import SqlCycles
from app.db.learning.rule_sets import KEPT_REPLAYS, SqlReplays, SqlRules, read_replays
from app.db.release.alarms import read_alarms
from app.db.release.evidence import SqlEvidenceBook
from app.db.release.holdouts import SqlHoldoutBook
from app.db.release.pointer import read_history
from app.db.release.release_views import SqlReleaseViews
from app.db.release.releases import SqlReleaseLedger
from app.db.release.webhooks import SqlWebhookBook
from app.db.sight import data
from app.db.sight.access import read_hands
from app.db.sight.book import SqlPages
from app.db.sight.demonstration import SqlOperations
from app.db.sight.needs import read_needs
from app.domain.access import Order
from app.domain.learning.rule_sets import AskedReplay
from app.domain.release.gates import GateName
from tests.fakes.sealed import SEAL
from tests.unit.app.db.rows import NOON, POLICY, fill

Shown = Callable[[Engine], Any]


def inside(read: Callable[..., Any], *arguments: Any) -> Shown:
    """What a function of a connection answers."""

    def shown(engine: Engine) -> Any:
        with reading(engine) as connection:
            return read(connection, *arguments)

    return shown


def counting(n: int) -> int:
    return n + 1


READY = {"state": "READY", "id": lambda n: f"r-{n:06}", "config": {"stages": [0.1]}}
CYCLE = {"slot": counting, "status": "held"}
GATE = {"release_id": "r", "gate": GateName.CANARY.value, "verdict": "pass"}


@pytest.mark.parametrize(
    ("most", "table", "row", "shown"),
    [
        (100, tables.deployment_history, {"generation": counting, "action": "promote"}, inside(read_history, POLICY)),
        (100, tables.alarms, {"kind": "gap", "ended_at": NOON}, inside(read_alarms, POLICY)),
        (10, tables.holdouts, {"ended_at": NOON, "thresholds": [], "readings": []}, lambda engine: SqlHoldoutBook(engine).newest(POLICY)),
        (30, tables.batches, {"slot": counting}, lambda engine: SqlPages(engine).cuts(POLICY)),
        (20, tables.rule_set_proposals, {}, lambda engine: SqlRules(engine, "").proposals(POLICY)),
        (10, tables.rule_set_replays, {}, inside(read_replays, POLICY)),
        (50, tables.cycles, CYCLE, lambda engine: SqlCycles(engine).recent(POLICY)),
        (50, tables.cycles, CYCLE, lambda engine: SqlOperations(engine, engine).cycles(POLICY)),
        (48, tables.cycles, CYCLE, lambda engine: inside(read_needs, POLICY)(engine).slots),
        (48, tables.cycles, CYCLE, lambda engine: inside(read_needs, POLICY)(engine).held),
        (50, tables.releases, READY, lambda engine: SqlOperations(engine, engine).releases(POLICY)),
        (100, tables.releases, READY, lambda engine: SqlReleaseLedger(engine).list(policy=POLICY)),
        (20, tables.releases, READY, lambda engine: inside(read_needs, POLICY)(engine).in_flight),
        (20, tables.releases, READY, lambda engine: inside(read_needs, POLICY)(engine).ready),
        (50, tables.credential_acts, {"person": "user:ada"}, inside(read_hands, "user:ada")),
        (200, tables.stream_offsets, {"consumer_group": "g", "topic": "t", "partition": counting}, inside(data.read_streams)),
        (100, tables.webhook_deliveries, {"webhook_id": "w"}, lambda engine: SqlWebhookBook(engine, seal=SEAL).deliveries("w")),
        (1_000, tables.gate_results, GATE, lambda engine: SqlEvidenceBook(engine).decisions("r")),
        (200, tables.gate_results, GATE, lambda engine: SqlPages(engine).decisions("r")),
        (100, tables.audit, {"seq": counting}, lambda engine: SqlReleaseViews(engine).audit()),
    ],
)  # fmt: skip
def test_the_newest_are_shown_and_no_more_than_are_promised(
    sqlite_engine: Engine, most: int, table: Table, row: dict[str, Any], shown: Shown
) -> None:
    fill(sqlite_engine, table, most, **row)
    full = shown(sqlite_engine)
    assert len(full) == most
    next_one = {name: (lambda n, of=value: of(n + most)) for name, value in row.items() if callable(value)}
    later = {column.name: NOON + timedelta(days=1) for column in table.c if isinstance(column.type, tables.UtcMicros)}
    ids = {column.name: f"z-{column.name}" for column in table.c if column.primary_key and isinstance(column.type, tables.String)}
    unique = {"event_id": "z"} if table is tables.webhook_deliveries else {"hash": "z"} if table is tables.audit else {}
    kept = {name: value for name, value in row.items() if not callable(value) and name not in ("webhook_id", "consumer_group", "topic")}
    same = {name: row[name] for name in ("webhook_id", "consumer_group", "topic") if name in row}
    ids = {name: value for name, value in ids.items() if name not in ("policy", "consumer_group", "topic", "webhook_id")}
    fill(sqlite_engine, table, 1, **(later | ids | unique | kept | next_one | same))
    again = shown(sqlite_engine)
    assert len(again) == most
    assert [str(one) for one in again] != [str(one) for one in full], "the newest is among them"


@pytest.mark.parametrize(
    ("most", "table", "row", "counted"),
    [
        (1_000, tables.dead_letters, {"offset": counting}, lambda engine: inside(read_needs, POLICY)(engine).dead_letters),
        (1_000, tables.follow_up_readings, {}, inside(readings.count_open, POLICY)),
        (2_000, tables.follow_up_readings, {"mood": "x"}, lambda engine: sum(inside(readings.agreed, POLICY)(engine).counted.values())),
        (10_000, tables.observations, {"inference_id": "t", "status": "parked"}, inside(data.read_parked)),
    ],
)  # fmt: skip
def test_a_table_is_counted_no_further_than_is_shown(
    sqlite_engine: Engine, most: int, table: Table, row: dict[str, Any], counted: Shown
) -> None:
    fill(sqlite_engine, table, most + 1, **row)
    assert counted(sqlite_engine) == most


def test_the_champion_s_comparisons_with_itself_are_added_up_over_five_hundred_verdicts(sqlite_engine: Engine) -> None:
    fill(sqlite_engine, tables.releases, 501, state="CHAMPION")
    evidence = {"live_aa": {"alarms": 1, "comparisons": 2}}
    fill(sqlite_engine, tables.gate_results, 501, gate=GateName.CANARY.value, verdict="pass", evidence=evidence)
    assert SqlEvidenceBook(sqlite_engine).false_alarms(POLICY, besides="nobody") == (500, 1_000)


def test_engines_that_lag_are_shown_by_twenties(sqlite_engine: Engine) -> None:
    fill(sqlite_engine, tables.deployment_pointer, digest="d")
    fill(sqlite_engine, tables.engine_versions, 21, digest="d", state="failed")
    assert [row.engine_id for row in inside(read_needs, POLICY)(sqlite_engine).engines] == [f"{n:06}" for n in range(20)]


def test_of_a_policy_s_replays_fifty_are_kept_the_newest(sqlite_engine: Engine) -> None:
    fill(sqlite_engine, tables.rule_set_replays, 50)
    fill(sqlite_engine, tables.rule_set_replays, policy="tab", id="other")
    order = Order(request_id="q", actor="user:ada", act="replay", subject=POLICY)
    asked = AskedReplay(id="new", policy=POLICY, toml="", asked_by="user:ada", asked_at=NOON + timedelta(days=1))
    SqlReplays(sqlite_engine).ask(asked, order)
    with reading(sqlite_engine) as connection:
        kept = [replay.id for replay in read_replays(connection, POLICY, newest=100)]
        assert len(read_replays(connection, "tab")) == 1
    assert kept == ["new", *(f"{n:06}" for n in range(49, 0, -1))]
    assert len(kept) == KEPT_REPLAYS
    waiting = SqlReplays(sqlite_engine).waiting(POLICY)
    assert waiting is not None
    assert waiting.id == "000001"


def test_an_answer_on_a_page_has_twenty_thousand_characters_and_two_hundred_things_said_of_it(sqlite_engine: Engine) -> None:
    fill(sqlite_engine, tables.turns, inference_id="t", episode_id="e", completion="x" * 20_001, tool_calls=[])
    fill(sqlite_engine, tables.observations, 201, inference_id="t", status="joined")
    shown = SqlPages(sqlite_engine).inspect("t")
    assert shown is not None
    assert (len(shown.completion), len(shown.observed)) == (20_000, 200)


def test_held_slots_are_told_from_two_in_a_row_on(sqlite_engine: Engine) -> None:
    """From the newest decided one back to the first that came to something; one that runs is not decided."""

    def held(*statuses: str) -> list[int]:
        with sqlite_engine.begin() as connection:
            connection.execute(tables.cycles.delete())
        fill(sqlite_engine, tables.cycles, len(statuses), slot=counting, status=lambda n: statuses[n])
        return [slot.slot for slot in inside(read_needs, POLICY)(sqlite_engine).held]

    assert held("done", "held") == []
    assert held("done", "held", "failed") == [3, 2]
    assert held("held", "done", "held", "held", "running") == [4, 3]
    assert held("held", "held", "done") == []
    assert held("held", "failed") == [2, 1]
    assert held("skipped", "held", "held") == [3, 2]
