"""Labels added up: after any sequence of revisions, retractions and erasures the rows say what a recount says, on both databases."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, delete, insert, select

from app.db.engine import reading, writing
from app.db.ingestion import turn_counts
from app.db.ingestion.streams import SqlEffects
from app.db.learning.labels import SqlLabels
from app.db.learning.rollups import REWARD, SUCCESS, read_rollups, rebuild, recount
from app.db.tables import label_rollups, labels, turns
from app.db.upkeep.needs import needs
from app.db.upkeep.past import retire_labels
from app.domain.policies import PolicyConfig
from app.domain.telemetry.streams import EffectBatch, JoinRules
from pipelines.labelling.labeller import label, label_due
from pipelines.labelling.rule_set import parse_rule_set
from tests.fakes.served import applied, at, erasure, observation, retraction, turn
from tests.fakes.streaming import MemorySegments

POLICY = PolicyConfig(model="m", base_name="b", base_model="B", held_out_share=0.0)
RULES = parse_rule_set('name = "two"\n[[terms]]\nname = "rating"\nweight = 1.0\n[[terms]]\nname = "tool_calls"\nweight = 0.5\n')


@dataclass
class Line:
    """Ingestion and labelling over one database."""

    engine: Engine
    applied: int = 0

    def apply(self, *effects: Any, received: float) -> None:
        segments = MemorySegments()
        rules = JoinRules(policies={}, label_wait_s=60, lateness_s=1e6)
        store = SqlEffects(self.engine, rules=lambda: rules, segments=segments)
        events = tuple(applied(effect, offset=self.applied + n, received=received) for n, effect in enumerate(effects))
        self.applied += len(events)
        store.apply(EffectBatch(events=events), now=at(received))

    def label(self, now: float) -> int:
        return label_due(SqlLabels(self.engine), policy="composer", config=POLICY, rule_set=RULES, now=at(now), limit=7)

    def retire(self, *, before: float) -> int:
        with writing(self.engine) as connection:
            return retire_labels(connection, "composer", needs(connection), before=at(before), limit=100)[0]

    def sums(self) -> dict[Any, Any]:
        with reading(self.engine) as connection:
            assert turn_counts.read_turn_counts(connection) == turn_counts.recount(connection)
            return read_rollups(connection)

    def labels(self) -> dict[str, int]:
        """Turns with a label, and which revision it is."""
        with reading(self.engine) as connection:
            current = connection.execute(select(labels.c.inference_id, labels.c.revision).where(labels.c.current))
            return {row.inference_id: row.revision for row in current}

    def compare(self) -> dict[Any, Any]:
        with reading(self.engine) as connection:
            rows = read_rollups(connection)
            assert rows == recount(connection)
        return rows


@pytest.fixture
def line(engine: Engine) -> Line:
    return Line(engine)


def test_the_rows_are_what_a_recount_gives_after_any_sequence(line: Line) -> None:
    drawn, served, said = random.Random(1), 0, 0
    for step in range(60):
        now = 60.0 * step
        match drawn.choice(("turn", "turn", "say", "say", "take back", "erase")):
            case "turn":
                actor, version = drawn.choice("abcdef"), drawn.choice(("v1", "v2"))
                line.apply(turn(f"i{served}", finished=now, actor=actor, version=version), received=now + 1)
                served += 1
            case "say" if served:
                name, value = drawn.choice((("rating", round(drawn.uniform(-1, 1), 3)), ("task_success", drawn.random() < 0.5)))
                about = f"i{drawn.randrange(served)}"
                line.apply(observation(f"o{said}", of=about, name=name, value=value, occurred=now), received=now)
                said += 1
            case "take back" if said:
                line.apply(retraction(f"o{drawn.randrange(said)}", occurred=now), received=now)
            case "erase" if step % 3 == 0:
                line.apply(erasure(drawn.choice("abcdef"), occurred=now), received=now)
            case _:
                pass
        if drawn.random() < 0.7:
            line.label(now + 61)
        if step % 10 == 9:
            line.compare()
    while line.label(1e5):
        pass
    rows = line.compare()
    with reading(line.engine) as connection:
        current = connection.execute(select(labels.c.reward, labels.c.revision).where(labels.c.current)).all()
    counted = {key: sums for key, sums in rows.items() if key[-1] == REWARD}
    assert sum(sums.n for sums in counted.values()) == len(current) == served
    assert sum(sums.total for sums in counted.values()) == sum(round(row.reward * 1_000_000) for row in current)
    assert any(row.revision > 1 for row in current), "nothing was revised: the sequence shows nothing"
    assert any(key[-1] == "excluded:erased" for key in rows), "nobody was erased: the sequence shows nothing"
    assert any(key[-1] == SUCCESS for key in rows)


def test_rows_that_were_lost_are_counted_anew_and_older_hours_than_any_label_stay(line: Line) -> None:
    line.apply(turn("a"), observation("o", of="a", value=0.5), received=1)
    line.label(61)
    before = line.compare()
    old = {"policy": "composer", "version": "v0", "hour": at(-864_000), "segment": "", "measure": REWARD}
    kept = {**old, "n": 3, "total": 1, "squares": 1, "negative": 0}
    with writing(line.engine) as connection:
        connection.execute(delete(label_rollups))
        connection.execute(insert(label_rollups), kept)
        assert rebuild(connection, only_if_empty=True) == 0
        assert rebuild(connection) == len(before)
        after = read_rollups(connection)
    assert after.pop(tuple(old.values())).n == 3
    assert after == before


def test_what_retention_took_from_the_labels_stays_added_up(line: Line) -> None:
    """A label that a batch took outlives its neighbours; counting anew from it alone would forget their hour, and every hour since."""
    line.apply(*(turn(f"i{n}", finished=3600.0 * n) for n in range(4)), received=4 * 3600.0)
    while line.label(1e5):
        pass
    before = line.compare()
    with writing(line.engine) as connection:
        connection.execute(delete(labels).where(labels.c.inference_id.in_(["i1", "i2"])))  # as retention does; a batch holds i0, i3 is new
        connection.execute(delete(label_rollups).where(label_rollups.c.hour == at(3 * 3600.0)))  # lost, and there to be counted
        rebuild(connection)
        after = read_rollups(connection)
    assert after == before


def test_a_turn_whose_label_retention_took_is_counted_once_whatever_becomes_known_of_it(line: Line) -> None:
    line.apply(turn("a", actor="alice"), turn("b", actor="bob"), observation("o-b", of="b"), received=1)
    line.label(70)
    line.apply(turn("young", actor="carol", finished=900), observation("o-young", of="young"), received=901)
    line.label(1000)
    assert line.retire(before=500) == 2
    line.apply(retraction("o-young", occurred=2000), received=2000)
    line.label(2100)
    before = line.sums()
    line.apply(retraction("o-b", occurred=3000), erasure("alice", occurred=3000), received=3000)
    line.label(3100)
    assert line.sums() == before
    assert line.labels() == {"young": 2}
    assert line.label(3200) == 0, "nothing waits for a label that never comes"
    with writing(line.engine) as connection:
        rebuild(connection)
        assert connection.execute(select(turns.c.labelled_at).where(turns.c.inference_id == "a")).scalar() == at(70), "and goes in its time"
    assert line.sums() == before


def test_a_label_that_retention_takes_while_the_next_one_is_made_is_the_turn_s_last(line: Line) -> None:
    line.apply(turn("a"), observation("o", of="a"), received=1)
    line.label(70)
    before = line.sums()
    line.apply(retraction("o", occurred=2000), received=2000)
    book = SqlLabels(line.engine)
    due = book.due("composer", now=at(2100), limit=7)
    assert [turn.revision for turn in due] == [1]
    assert line.retire(before=500) == 1
    book.write([label(turn, config=POLICY, rule_set=RULES, now=at(2100)) for turn in due], now=at(2100))
    assert (line.sums(), line.labels()) == (before, {})
    assert line.label(2200) == 0
