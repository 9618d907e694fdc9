"""Labels of rollouts: the same rules, a term of their own, and nobody's fault where the machinery failed."""

import pytest

from app.domain.learning.rewards import Exclusion
from app.domain.policies import PolicyConfig
from pipelines.labelling.labeller import is_held_out, label
from pipelines.labelling.rule_set import default_toml, parse_rule_set
from tests.fakes.labelling import NOON, due, facts, observed

POLICY = PolicyConfig(model="m", base_name="b", base_model="B", held_out_share=1.0)
RULES = parse_rule_set(default_toml() + '\n[[terms]]\nname = "practice"\nweight = 2.0\n')
SOURCE = "rollout:small-functions"


@pytest.mark.parametrize(("source", "value", "paid"), [(SOURCE, 1.0, 2.0), (SOURCE, 0.0, 0.0), ("gateway", 1.0, None)])
def test_the_grade_pays_practice_and_stays_a_gold_metric_for_people(source: str, value: float, paid: float | None) -> None:
    made = label(due(observed("task_success", value), source=source), config=POLICY, rule_set=RULES, now=NOON, learn_from_rollouts=True)
    said = next(term for term in made.terms if term.name == "practice")
    assert (None if said.value is None else said.value * said.weight) == paid
    assert made.exclusion is (None if paid is not None else Exclusion.NO_SIGNAL)


@pytest.mark.parametrize("learned", [True, False])
def test_what_the_machinery_failed_is_left_out_whatever_else_was_said(learned: bool) -> None:
    turn = due(observed("task_success", 0.0), observed("environment_fault", "box_lost"), source=SOURCE)
    assert label(turn, config=POLICY, rule_set=RULES, now=NOON, learn_from_rollouts=learned).exclusion is Exclusion.ENVIRONMENT_FAULT
    person = due(observed("rating", 1.0), observed("environment_fault", "box_lost"))
    assert label(person, config=POLICY, rule_set=RULES, now=NOON).exclusion is None, "people's turns are not taken out by a word"


def test_practice_is_left_out_where_no_batch_may_hold_it_and_is_never_held_out() -> None:
    turn = due(observed("task_success", 1.0), source=SOURCE)
    assert label(turn, config=POLICY, rule_set=RULES, now=NOON).exclusion is Exclusion.ROLLOUT
    assert not is_held_out(facts(source=SOURCE), POLICY)
    assert is_held_out(facts(), POLICY)
