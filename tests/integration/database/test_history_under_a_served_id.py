"""History told under the id of an answer that somebody was served: it neither takes the answer's place nor speaks for its version."""

from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import Engine, insert, select

from app.db.engine import reading, writing
from app.db.learning.rollups import add_up
from app.db.release.evidence import read_sessions
from app.db.tables import exposures, label_rollups, labels, observations, segments, turn_words, turns
from app.domain.release.sessions import Session
from app.domain.telemetry.events import is_imported
from app.domain.telemetry.streams import Effect
from app.domain.telemetry.turns import FinishReason, TurnServed, Usage
from tests.fakes.served import applied, at, exposure, observation, turn
from tests.integration.database.test_effects import Bench


@pytest.fixture
def bench(engine: Engine) -> Bench:
    return Bench(engine)


def forged(id_: str = "a", policy: str = "tab") -> TurnServed:
    return turn(
        id_, episode="mine", policy=policy, source="import:x", finish_reason=FinishReason.ERROR, completion="forged", prompt_tokens=[],
        completion_tokens=[], logprobs=None, usage=Usage(prompt_tokens=0, completion_tokens=0), time_to_first_token_s=900.0,
    )  # fmt: skip


def tell(bench: Bench, *effects: Effect, offset: int = 0) -> None:
    """Apply them; history is an event of its importer's."""
    events = [applied(effect, offset=offset + n) for n, effect in enumerate(effects)]
    bench.apply_events([replace(e, source="import:x@tab") if is_history(e.effect) else e for e in events])


def is_history(effect: Effect | None) -> bool:
    return isinstance(effect, TurnServed) and is_imported(effect.source)


def sessions(engine: Engine) -> list[Session]:
    with reading(engine) as connection:
        return read_sessions(connection, exposures.c.policy == "composer")


def held(bench: Bench) -> dict[str, set[str]]:
    return {name: {payload.completion for payload in payloads.values()} for name, payloads in bench.segments.written.items()}


@pytest.mark.parametrize("policy", ["tab", "composer"])
@pytest.mark.parametrize("order", ["before", "together", "together, behind", "behind"])
def test_an_answer_stands_whatever_history_is_told_under_its_id(bench: Bench, policy: str, order: str) -> None:
    history, real = forged(policy=policy), turn("a")
    if order == "before":
        tell(bench, history, observation("o", of="a"))
        tell(bench, exposure("a"), real, offset=10)
    elif order == "behind":
        tell(bench, exposure("a"), real)
        tell(bench, history, observation("o", of="a"), offset=10)
    else:
        effects = [exposure("a"), *((history, real) if order == "together" else (real, history)), observation("o", of="a")]
        tell(bench, *effects)
    assert bench.rows(turns, "inference_id", "policy", "source", "finish_reason") == [("a", "composer", "gateway", "stop")]
    assert bench.rows(turn_words, "inference_id", "completion") == [("a", "answer a")]
    (name,) = {name for (name,) in bench.rows(turns, "payload_segment")}
    assert held(bench)[name] == {"answer a"}
    assert bench.counts()["turn_ignored"] == (0 if order == "before" else 1)
    (session,) = sessions(bench.engine)
    assert (session.served, session.finish_reason, session.completion) == (True, "stop", "answer a")


def test_an_answer_takes_nothing_over_from_the_history_whose_place_it_takes(bench: Bench) -> None:
    tell(bench, forged(), observation("o", of="a", policy="tab"))
    ((name,),) = bench.rows(turns, "payload_segment")
    label = {
        "inference_id": "a", "revision": 1, "current": True, "policy": "tab", "version": "v1", "reward": -1.0, "terms": [],
        "rule_set": "rules", "exclusion": None, "segment": "", "actor": "alice", "held_out": False, "finished_at": at(0),
        "labelled_at": at(61), "success": None,
    }  # fmt: skip
    with writing(bench.engine) as connection:
        connection.execute(insert(labels), [label])
        add_up(connection, [label])
        ((before,),) = connection.execute(select(turns.c.evidence)).all()
    bench.label_turns()
    tell(bench, exposure("a"), turn("a"), offset=10)
    assert bench.rows(labels, "inference_id") == []
    assert bench.rows(label_rollups, "measure") == []
    assert bench.rows(turns, "policy", "actor", "labelled_at", "has_logprobs") == [("composer", "alice", None, True)]
    ((evidence,),) = bench.rows(turns, "evidence")
    assert evidence > before, "a labeller that read the history's observations a moment ago sees that they were not these"
    assert bench.rows(observations, "id", "policy") == [("o", "tab")], "which says nothing about an answer of composer"
    assert name not in {name for (name,) in bench.rows(segments, "name")}, "the forged words go"
    assert name not in bench.segments.written


def test_history_alone_is_no_evidence_of_what_was_served(bench: Bench) -> None:
    tell(bench, exposure("a"), forged(), observation("o", of="a", policy="tab"), forged("b", "composer"), exposure("b"))
    label = {
        "inference_id": "b", "revision": 1, "current": True, "policy": "composer", "version": "v1", "reward": -1.0, "terms": [],
        "rule_set": "rules", "exclusion": None, "segment": "", "actor": None, "held_out": False, "finished_at": at(0),
        "labelled_at": at(0) + timedelta(seconds=61),
    }  # fmt: skip
    with writing(bench.engine) as connection:
        connection.execute(insert(labels), [label])
    for session in sessions(bench.engine):
        assert (session.served, session.finish_reason, session.completion, session.time_to_first_token_s) == (False, None, "", None)
        assert (session.labelled, session.reward, session.signals or {}) == (False, None, {})
