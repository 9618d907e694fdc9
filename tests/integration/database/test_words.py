"""Words lie beside their turns, once no process runs that looks for them there; readers, erasures and retention see no difference."""

from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import Engine, delete, insert, select, update

from app.db.access.erasures import SqlEraser
from app.db.access.traces import SqlTraces
from app.db.engine import reading, writing
from app.db.ingestion.streams import SqlEffects
from app.db.ingestion.words import move_apart
from app.db.learning.labels import SqlLabels
from app.db.migrate import compatible, contract, head_revision, require_head
from app.db.tables import compatible_revisions, turn_words, turns
from app.db.upkeep import past
from app.db.upkeep.needs import Needs
from app.domain.learning.rewards import TurnFacts
from app.domain.telemetry.streams import EffectBatch, JoinRules
from app.domain.telemetry.turns import ToolCall, ToolVerdict, TurnServed
from tests.fakes.served import applied, at, erasure, turn
from tests.fakes.streaming import MemorySegments

RULES = JoinRules(policies={}, label_wait_s=60, lateness_s=600)
CALLS = (ToolCall(id="c", name="edit", arguments='{"path": "a.py"}', verdict=ToolVerdict.VALID),)


class NoFiles:
    """No segment anywhere."""

    def names(self) -> list[str]:
        return []

    def claims(self, before: datetime) -> list[str]:
        return []

    def turns(self, name: str) -> list[str]:
        raise AssertionError(name)


class Place:
    """A database, with the acts of the tests."""

    def __init__(self, engine: Engine, url: str) -> None:
        self.engine, self.url = engine, url
        self.segments = MemorySegments()

    def serve(self, *served: TurnServed) -> None:
        store = SqlEffects(self.engine, rules=lambda: RULES, segments=self.segments)
        store.apply(EffectBatch(events=tuple(applied(one, offset=n) for n, one in enumerate(served))), now=at(1))

    def an_older_process_may_run(self) -> None:
        with writing(self.engine) as connection:
            connection.execute(insert(compatible_revisions).values(revision="0018_holdouts"))

    def rows(self, *columns: Any) -> set[Any]:
        with reading(self.engine) as connection:
            return {row[0] if len(row) == 1 else tuple(row) for row in connection.execute(select(*columns))}

    def facts(self) -> dict[str, TurnFacts]:
        return {due.facts.inference_id: due.facts for due in SqlLabels(self.engine).due("composer", now=at(1e6), limit=100)}

    def erase(self, actor: str) -> None:
        SqlEraser(self.engine, self.engine, segments=self.segments).erase(erasure(actor, occurred=100), now=at(100))

    def left(self, actor: str) -> dict[str, int]:
        traces = SqlTraces(self.engine, self.engine, files=NoFiles(), topics=lambda _: {}, exported=list, folders=[])
        return {trace.place: trace.found for trace in traces.find(actor)}


@pytest.fixture
def place(engine: Engine, database_url: str) -> Place:
    return Place(engine, database_url)


def test_the_row_of_a_turn_holds_none_of_its_words(place: Place) -> None:
    place.serve(turn("a", completion="an answer", tool_calls=CALLS), turn("silent", completion=""))
    assert place.rows(turns.c.inference_id, turns.c.completion) == {("a", ""), ("silent", "")}
    assert place.rows(turn_words.c.inference_id, turn_words.c.completion) == {("a", "an answer")}
    facts = place.facts()
    assert (facts["a"].completion, facts["a"].tool_calls) == ("an answer", CALLS)
    assert (facts["silent"].completion, facts["silent"].tool_calls) == ("", ())


def test_words_stay_in_the_row_while_a_process_may_run_that_looks_for_them_there(place: Place) -> None:
    place.an_older_process_may_run()
    place.serve(turn("a", completion="an answer", tool_calls=CALLS))
    assert place.rows(turns.c.completion) == {"an answer"}
    assert place.rows(turn_words.c.inference_id) == set()
    assert (place.facts()["a"].completion, place.facts()["a"].tool_calls) == ("an answer", CALLS)


def test_after_the_contraction_no_older_process_starts_and_all_words_move_in_steps_that_may_be_broken_off(place: Place) -> None:
    place.an_older_process_may_run()
    place.serve(*(turn(f"t{n}", completion=f"answer {n}", tool_calls=CALLS) for n in range(7)), turn("u", completion=""))
    before = place.facts()
    assert contract(place.url) == ["0018_holdouts"]
    assert contract(place.url) == []
    require_head(place.url)
    place.serve(turn("v", completion="answer v"))
    assert place.rows(turns.c.completion) == {f"answer {n}" for n in range(7)} | {""}
    assert move_apart(place.engine, after="", limit=3) == (3, "t2")  # killed here: whoever comes next begins anew
    assert place.facts().items() >= before.items()
    moved, after = [], ""
    while after is not None:
        count, after = move_apart(place.engine, after=after, limit=3)
        moved.append(count)
    assert moved == [0, 3, 1, 0]
    assert place.rows(turns.c.completion) == {""}
    assert place.facts().items() >= before.items()
    assert place.facts()["v"].completion == "answer v"


def test_the_release_before_may_run_until_the_contraction_and_not_after_it(place: Place) -> None:
    place.an_older_process_may_run()
    assert "0018_holdouts" in compatible(place.url)
    contract(place.url)
    assert compatible(place.url) == {head_revision()}


@pytest.mark.parametrize("apart", [True, False])
def test_an_erasure_takes_the_words_wherever_they_are_and_its_proof_looks_there(place: Place, apart: bool) -> None:
    if not apart:
        place.an_older_process_may_run()
    place.serve(turn("a", actor="alice", completion="secret", tool_calls=CALLS), turn("b", actor="bob", completion="kept"))
    if not apart:
        contract(place.url)
        move_apart(place.engine, after="", limit=1)
    place.erase("alice")
    assert "secret" not in str(place.rows(turns.c.completion)) + str(place.rows(turn_words.c.completion))
    assert {facts.completion for facts in place.facts().values()} == {"", "kept"}
    assert sum(place.left("alice").values()) == 0
    with writing(place.engine) as connection:  # as an older release would have left them
        connection.execute(insert(turn_words).values(inference_id="a", completion="secret", tool_calls=[]))
    assert place.left("alice")["words beside shells"] == 1
    with writing(place.engine) as connection:
        connection.execute(delete(turn_words))
        connection.execute(update(turns).where(turns.c.inference_id == "a").values(tool_calls=[{"arguments": "secret"}]))
    assert place.left("alice")["shells with words"] == 1


def test_words_go_with_their_turn(place: Place) -> None:
    place.serve(turn("old"), turn("young"))
    with writing(place.engine) as connection:
        for id_, labelled in (("old", 10), ("young", 1e6)):
            mine = turns.c.inference_id == id_
            connection.execute(update(turns).where(mine).values(labelled_at=at(labelled), payload_segment=None))
        past.retire_turns(connection, Needs(frozenset(), {}), before=at(1_000), limit=10)
    assert place.rows(turn_words.c.inference_id) == place.rows(turns.c.inference_id) == {"young"}
