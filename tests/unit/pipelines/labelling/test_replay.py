"""Stored labels scored anew, by hand; and what is answered to somebody who asked for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pytest

from app.domain.errors import BadConfig
from app.domain.learning.rewards import Labelled
from app.domain.learning.rule_sets import AskedReplay, Replay, Shift
from app.domain.policies import PolicyConfig
from pipelines.labelling.replay import ASKED_MOVERS, answer, replay
from pipelines.labelling.rule_set import RuleSet, parse_rule_set
from tests.fakes.labelling import NOON, due, observed

POLICY = PolicyConfig(model="m", base_name="b", base_model="B")
RULES = parse_rule_set('name = "r"\n[[terms]]\nname = "rating"\nweight = 2.0\n[[terms]]\nname = "undo"\nweight = 1.0\n')


def rated(
    number: int, value: float, before: float, *, segment: str = "s", terms: tuple[dict[str, Any], ...] = (), **changes: Any
) -> Labelled:
    said = observed("rating", value) if value else observed("comment", "x")
    return Labelled(due(said, inference_id=f"i{number}", segment=segment, **changes), before, terms)


def test_labels_are_compared_with_what_they_would_be() -> None:
    # after: 2, 1, -1, 0, 2
    turns = [
        rated(
            1,
            1.0,
            0.5,
            segment="a",
            terms=({"name": "rating", "weight": 0.5, "value": 1.0}, {"name": "undo", "weight": 1.0, "value": None}),
        ),
        rated(2, 0.5, 1.0, segment="b"),
        rated(3, -0.5, 0.0, segment="b", terms=({"name": "old", "weight": 3.0, "value": -0.5},)),
        rated(4, 0.0, 0.0, segment="b"),
        rated(5, 1.0, 1.0 + 1e-10, segment="a", train_consent=False),
    ]
    found = replay(turns, config=POLICY, rule_set=RULES, now=NOON)
    assert (found.turns, found.changed) == (5, 3)
    assert (found.before, found.after) == ((0.0, 0.0, 0.5, 1.0, 1.0 + 1e-10), (-1.0, 0.0, 1.0, 2.0, 2.0))
    assert found.segments == {"a": (2, pytest.approx(0.75), 2.0), "b": (3, pytest.approx(1 / 3), 0.0)}
    assert found.excluded == {"no_signal": 1, "no_consent": 1}
    assert [(m.inference_id, m.change) for m in found.movers] == [("i1", 1.5), ("i3", -1.0), ("i5", pytest.approx(1.0))]
    assert found.movers[0].paid_before == {"rating": 0.5}
    assert found.movers[0].paid_after == {"rating": 2.0}
    assert found.terms["rating"] == Shift(spoke_before=1, mean_before=0.5, spoke_after=4, mean_after=1.0)
    assert found.terms["old"] == Shift(spoke_before=1, mean_before=-1.5, spoke_after=0, mean_after=0.0)


def test_what_moves_by_nothing_is_no_change_and_ten_movers_are_shown_the_largest_first() -> None:
    still = replay([rated(1, 0.5, 1.0 + 1e-10), rated(2, 0.5, 1.0 + 1e-8)], config=POLICY, rule_set=RULES, now=NOON)
    assert [m.inference_id for m in still.movers] == ["i2"]
    many = replay([rated(n, 0.5, n / 10) for n in range(11, 31)], config=POLICY, rule_set=RULES, now=NOON)
    assert [m.inference_id for m in many.movers] == [f"i{n}" for n in range(30, 20, -1)]
    twins = replay([rated(n, 0.5, 2.0) for n in (2, 1)], config=POLICY, rule_set=RULES, now=NOON, movers=1)
    assert (twins.changed, [m.inference_id for m in twins.movers]) == (2, ["i1"])


@pytest.mark.parametrize(("learned", "excluded"), [(True, {}), (False, {"rollout": 1})])
def test_practice_is_left_out_of_a_replay_only_where_batches_leave_it_out(learned: bool, excluded: dict[str, int]) -> None:
    practised = rated(1, 1.0, 0.5, source="rollout:tasks")
    assert replay([practised], config=POLICY, rule_set=RULES, now=NOON, learn_from_rollouts=learned).excluded == excluded
    book = Book(asked_for('name = "r"\n[[terms]]\nname = "rating"\nweight = 2.0\n'))

    @contextmanager
    def one() -> Iterator[Iterator[Labelled]]:
        yield iter([practised])

    answer(book, one, policy="composer", config=POLICY, read=parse_rule_set, clock=lambda: NOON, learn_from_rollouts=learned)
    [(_, outcome, _, _)] = book.settled
    assert outcome is not None
    assert outcome.excluded == excluded


def test_a_replay_of_nothing_says_nothing() -> None:
    found = replay([], config=POLICY, rule_set=RULES, now=NOON)
    assert (found.turns, found.changed, found.before, found.after, found.segments, found.movers) == (0, 0, (), (), {}, ())


class Book:
    """Keeps what is waiting and what was settled."""

    def __init__(self, *waiting: AskedReplay) -> None:
        self.open, self.settled = list(waiting), list[tuple[AskedReplay, Replay | None, str | None, datetime]]()

    def waiting(self, policy: str) -> AskedReplay | None:
        return next((asked for asked in self.open if asked.policy == policy), None)

    def settle(self, asked: AskedReplay, *, outcome: Replay | None, refused: str | None, now: datetime) -> bool:
        self.open.remove(asked)
        self.settled.append((asked, outcome, refused, now))
        return True


def asked_for(toml: str) -> AskedReplay:
    return AskedReplay(id="1", policy="composer", toml=toml, asked_by="ann", asked_at=NOON)


@contextmanager
def stored() -> Iterator[Iterator[Labelled]]:
    yield (rated(n, 0.5, float(n)) for n in range(2, 102))


def answered(book: Book, read: Any = parse_rule_set) -> bool:
    return answer(book, stored, policy="composer", config=POLICY, read=read, clock=lambda: NOON)


def test_one_replay_at_a_time_is_answered_with_what_it_is_of() -> None:
    toml = 'name = "mine"\n[[terms]]\nname = "rating"\nweight = 2.0\n'
    book = Book(asked_for(toml), asked_for(toml))
    assert answered(book) is True
    [(_, outcome, refused, now)] = book.settled
    assert outcome is not None
    assert (refused, now, outcome.name, outcome.digest) == (None, NOON, "mine", parse_rule_set(toml).digest)
    assert (outcome.turns, outcome.changed, len(outcome.movers)) == (100, 100, ASKED_MOVERS)
    assert [answered(book), answered(book), len(book.settled)] == [True, False, 2]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (BadConfig("no such term"), "no such term"),
        (RecursionError("too deep"), "it cannot be read (RecursionError: too deep)"),
        (KeyError("a term's own"), 'it cannot be read (KeyError: "a term\'s own")'),
    ],
)
def test_a_rule_set_that_cannot_be_read_is_refused_and_nothing_is_scored(error: Exception, why: str) -> None:
    def read(toml: str) -> RuleSet:
        raise error

    book = Book(asked_for("x"))
    assert answered(book, read) is True
    assert book.settled == [(asked_for("x"), None, why, NOON)]
