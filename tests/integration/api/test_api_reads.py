"""What the API reads from the database: running episodes, counters, backlog, reports, and which events were accepted."""

import asyncio
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine, insert

from app.db.engine import open_engine, writing
from app.db.ingestion.episodes import SqlEpisodes
from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.turn_counts import count_labelled, count_turns
from app.db.reads import SqlReads
from app.db.release.exposures import insert_exposures
from app.db.tables import inbox, labels, observations, segments, turns
from app.domain.errors import Unavailable
from app.domain.telemetry.events import CloudEvent, EventType, Exposure, Observation
from tests.fakes.clock import FrozenClock
from tests.fakes.gateway import CANDIDATE, CHAMPION, NOON


def exposure(number: int, **changes: Any) -> Exposure:
    given: dict[str, Any] = {
        "id": f"x{number}", "policy": "composer", "inference_id": f"i{number}", "episode_id": "ep", "actor": "a", "release_id": "r",
        "stage": "canary-1", "arm": "candidate", "probability": 0.25, "share": 0.25, "digest": CANDIDATE,
        "occurred_at": NOON + timedelta(seconds=number),
    }  # fmt: skip
    return Exposure(**given | changes)


def turn(number: int, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "inference_id": f"i{number}", "episode_id": "ep", "policy": "composer", "version": CHAMPION, "kind": "answer", "source": "gateway",
        "started_at": NOON, "finished_at": NOON + timedelta(seconds=number), "label_due_at": NOON, "labelled_at": None, "actor": None,
        "segment": "", "finish_reason": "stop", "train_consent": True, "has_logprobs": True, "prompt_tokens": 1, "completion_tokens": 1,
        "tool_calls": [], "stage": "champion", "arm": "champion", "probability": 1.0, "completion": f"text {number}", "tags": {},
    }  # fmt: skip
    return given | changes


def test_a_running_episode_is_its_newest_exposure_and_its_summaries(engine: Engine) -> None:
    with writing(engine) as connection:
        insert_exposures(connection, [exposure(1, arm="champion", digest=CHAMPION), exposure(2)])
        connection.execute(insert(turns), [turn(3, kind="summary", tags={"summary_messages": "2"}), turn(1), turn(2, kind="summary")])
    episodes = SqlEpisodes(engine)
    state = episodes.find("ep", "composer")
    assert state is not None
    assert (state.arm.digest, state.arm.stage, state.arm.probability, state.last_inference_id) == (CANDIDATE, "canary-1", 0.25, "i2")
    assert [(s.text, s.tags) for s in state.summaries] == [("text 2", {}), ("text 3", {"summary_messages": "2"})]
    assert episodes.find("another", "composer") is None
    assert episodes.find("ep", "tab") is None, "what another policy served is not its conversation"


def test_what_another_gateway_wrote_a_moment_ago_is_found_in_the_inbox_of_practice_too(engine: Engine) -> None:
    def event(name: str, at: int, **changes: Any) -> dict[str, Any]:
        said = {"policy": "composer", "kind": "summary", "finish_reason": "stop", "completion": name, "tags": {"n": name}}
        said |= {"finished_at": (NOON + timedelta(seconds=at)).isoformat()} | changes
        return {
            "source": "gateway", "event_id": name, "type": "ratchet.turn.v1", "key": "ep", "time": NOON, "payload_hash": b"",
            "payload": msgspec.json.encode(said), "received_at": NOON, "applied_at": None,
        }  # fmt: skip

    with writing(engine) as connection:
        stored = [turn(1, kind="summary"), turn(2, kind="summary", finish_reason="error"), turn(9, kind="summary", policy="tab")]
        connection.execute(insert(turns), stored)
        rows = [
            event("waiting", 5), event("applied", 1) | {"applied_at": NOON}, event("broken", 6, finish_reason="timeout"),
            event("answer", 7, kind="answer"), event("other", 8, policy="tab"), event("elsewhere", 9) | {"key": "another"},
            event("large", 4, completion="large", messages=[], payload={"ref": "x"}),
        ]  # fmt: skip
        connection.execute(insert(inbox), rows)
    episodes = SqlEpisodes(engine)
    assert [s.text for s in episodes.summaries("ep", "composer")] == ["text 1", "large", "waiting"]
    assert episodes.find("ep", "composer") is None, "practice exposes nobody: its arm is drawn by nobody"


def test_reports_count_what_is_there(engine: Engine) -> None:
    clock = FrozenClock(NOON + timedelta(minutes=1))
    label: dict[str, Any] = {
        "revision": 1, "current": True, "policy": "composer", "version": CHAMPION, "terms": [], "rule_set": "r", "segment": "task=a",
        "actor": None, "held_out": False, "finished_at": NOON, "labelled_at": NOON,
    }  # fmt: skip
    with writing(engine) as connection:
        connection.execute(insert(turns), [turn(1, labelled_at=NOON), turn(2, labelled_at=NOON), turn(3)])
        count_turns(connection, [("composer", CHAMPION)] * 3)
        count_labelled(connection, [("composer", CHAMPION)] * 2)
        connection.execute(
            insert(labels),
            [
                label | {"inference_id": "i1", "reward": 0.5, "exclusion": None},
                label | {"inference_id": "i2", "reward": 0.9, "exclusion": "no_consent"},
            ],
        )
        connection.execute(
            insert(observations),
            {"source": "api", "id": "o", "inference_id": "i", "name": "undo", "value": True, "occurred_at": NOON, "received_at": NOON,
             "tags": {}, "status": "parked"},
        )  # fmt: skip
    reads = SqlReads(engine, engine, clock=clock)
    report = reads.labels_report("composer")
    assert (report["turns"], report["labelled"], report["eligible"], report["exclusions"]) == (3, 2, 1, {"no_consent": 1})
    assert report["per_version"] == [{"version": CHAMPION, "labels": 2, "mean_reward": 0.5}]
    assert report["per_segment"] == [{"segment": "task=a", "labels": 2, "mean_reward": 0.5}]
    assert reads.turns_per_version() == [("composer", CHAMPION, 3, 2)]
    assert (reads.backlog()["labels_due"], reads.backlog()["observations_parked"]) == (1, 1)
    assert (reads.runs(None, 5), reads.versions("composer", 5)) == ([], [])


def test_what_segment_files_owe_is_told_until_it_is_done(engine: Engine) -> None:
    reads = SqlReads(engine, engine, clock=lambda: NOON)
    assert reads.backlog()["files_owing"] == 0
    states = ("writing", "whole", "trimming", "dropping", "dropping")
    with writing(engine) as connection:
        rows = [{"name": f"s{n}", "rows": 1, "bytes": 9, "created_at": NOON, "state": state} for n, state in enumerate(states)]
        connection.execute(insert(segments), rows)
    assert reads.backlog()["files_owing"] == 3


def test_an_accepted_event_is_known_from_the_inbox_and_after_it(engine: Engine) -> None:
    observation = Observation(id="o1", inference_id="i", name="rating", value={"a": [1]}, occurred_at=NOON, source="api")
    door = SqlInbox(engine, min_free_bytes=0)
    event = CloudEvent(
        id="o1", source="api", type=EventType.OBSERVATION, time=NOON, key="i", data=msgspec.json.encode(observation)
    )  # fmt: skip
    asyncio.run(door.append([event]))
    door.close()
    reads = SqlReads(engine, engine, clock=FrozenClock(NOON))
    assert reads.seen("api", ["o1", "o2"]) == {"o1"}
    assert reads.seen("sdk:x", ["o1"]) == set()
    assert reads.observation("api", "o1") == observation
    assert reads.backlog()["inbox_unsent"] == 1
    assert [(h.observation, h.status, h.retracted) for h in reads.about(inference_ids=["i"], policy=None)] == [
        (observation, "accepted", False)
    ]
    assert reads.about(inference_ids=["i"], policy="tab") == []
    with writing(engine) as connection:
        connection.execute(inbox.delete())
        row = {name: getattr(observation, name) for name in Observation.__struct_fields__}
        connection.execute(insert(observations), row | {"received_at": NOON, "status": "joined"})
    assert reads.observation("api", "o1") == observation
    assert [(h.observation.id, h.status) for h in reads.about(inference_ids=["i"], policy=None)] == [("o1", "joined")]
    assert reads.about(inference_ids=["j"], episode_ids=["i"], policy=None) == []


def test_a_database_that_is_gone_is_unavailable() -> None:
    gone = open_engine("postgresql://nobody@127.0.0.1:1/none")
    reads = SqlReads(gone, gone)
    with pytest.raises(Unavailable, match="RATCHET_DATABASE_URL"):
        reads.ping()
    with pytest.raises(Unavailable):
        SqlEpisodes(gone).find("ep", "composer")


def test_of_what_was_said_about_an_answer_the_newest_is_read_however_much_there_is(engine: Engine) -> None:
    """Half of it applied, half still in the inbox; nobody fills the reader's memory."""
    told = [
        Observation(id=f"o{n:02}", inference_id="i", name="undo", value=True, occurred_at=NOON + timedelta(seconds=n), source="api")
        for n in range(20)
    ]  # fmt: skip
    door = SqlInbox(engine, min_free_bytes=0)
    waiting = [
        CloudEvent(id=o.id, source="api", type=EventType.OBSERVATION, time=o.occurred_at, key="i", data=msgspec.json.encode(o))
        for o in told[::2]
    ]
    asyncio.run(door.append(waiting))
    door.close()
    with writing(engine) as connection:
        rows = [{name: getattr(o, name) for name in Observation.__struct_fields__} for o in told[1::2]]
        connection.execute(insert(observations), [row | {"received_at": NOON, "status": "joined"} for row in rows])
    reads = SqlReads(engine, engine, clock=FrozenClock(NOON))
    assert [heard.observation for heard in reads.about(inference_ids=["i"], policy=None, most=5)] == told[-5:]
    assert [heard.observation for heard in reads.about(inference_ids=["i"], policy=None)] == told
