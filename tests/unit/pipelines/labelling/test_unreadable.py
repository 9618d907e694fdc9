"""Values that a term cannot read, and numbers of a rule set by which none could be scored: told, and nothing else is held up."""

from collections.abc import Sequence

import pytest

from app.domain.errors import BadConfig
from app.domain.learning.rewards import PROCESS_TERMS, Credit, Exclusion, TermScore, TurnFacts
from app.domain.telemetry.events import Observation
from pipelines.labelling.labeller import label
from pipelines.labelling.rule_set import parse_rule_set
from tests.fakes.labelling import NOON, due, observed
from tests.unit.pipelines.labelling.test_labelling import DEFAULT, PAYING, POLICY, SIGNALS, value_of

WEIGHTY = {"horizon_s": 30, "four_gram": 0.5, "length": 10**309}
GOLD = 'name = "gold"\n[[terms]]\nname = "task_success"\nweight = 1.0\n'


@pytest.mark.parametrize(
    ("said", "term", "toml", "why"),
    [
        (("rating", "great"), "rating", DEFAULT, "o: value: Expected `float`, got `str`"),
        (("rating", 5), "rating", DEFAULT, "o: value: Expected `float` <= 1.0"),
        (("rating", None), "rating", DEFAULT, "o: value: Expected `float`, got `null`"),
        (("edit_persistence", {"four_gram": 1.0}), "edit_persistence", DEFAULT, "o: value.horizon_s: "),
        (("edit_persistence", WEIGHTY), "edit_persistence", DEFAULT, "o: value.length is more than "),
        (("tool_call", {}), "tool_calls", DEFAULT, "o: value.name: "),
        (("latency", None), "latency", DEFAULT, "o: value: Expected `float`, got `null`"),
        (("undo", "yes"), "undo", DEFAULT, "o: value: Expected `bool`, got `str`"),
        (("task_success", 7), "task_success", GOLD, "o: value: Expected `float` <= 1.0"),
    ],
)
def test_a_value_that_a_term_cannot_read_makes_it_abstain_and_says_why(said: tuple[str, object], term: str, toml: str, why: str) -> None:
    made = label(due(observed(*said)), config=POLICY, rule_set=parse_rule_set(toml, signals={}), now=NOON)
    score = next(score for score in made.terms if score.name == term)
    assert (score.value, score.abstained) == (None, "unreadable")
    assert score.detail["error"].startswith(why)
    assert score.credit is (Credit.PROCESS if term in PROCESS_TERMS else Credit.OUTCOME)
    assert made.exclusion is Exclusion.NO_SIGNAL


def test_what_one_term_cannot_read_takes_nothing_from_the_others() -> None:
    turn = due(observed("edit_persistence", None, id_="a"), observed("rating", 1.0, id_="b"))
    made = label(turn, config=POLICY, rule_set=parse_rule_set(DEFAULT), now=NOON)
    assert made.reward == pytest.approx(0.5 - 0.0118, abs=1e-4)
    assert made.exclusion is None


class Endless:
    """A term that says nothing that can be kept."""

    name = "endless"

    def score(self, turn: TurnFacts, observations: Sequence[Observation], *, weight: float) -> TermScore:
        """Infinite."""
        return TermScore(name=self.name, value=float("inf"), weight=weight)


def test_a_term_that_comes_to_no_number_that_can_be_kept_abstains() -> None:
    toml = f'name = "own"\n[[terms]]\nname = "{__name__}:Endless"\nweight = 2.0\n'
    made = label(due(), config=POLICY, rule_set=parse_rule_set(toml, allowed=(f"{__name__}:Endless",)), now=NOON)
    assert (made.reward, made.terms[0].abstained) == (0.0, "unreadable")


@pytest.mark.parametrize(("name", "value"), [("user_score", 4.0), ("user_score", "good"), ("escalated", "no"), ("rating", 5.5)])
def test_what_the_turn_s_policy_declares_otherwise_is_not_paid(name: str, value: object) -> None:
    """A key of no policy may send what any policy declares: the policy is known when the turn is."""
    made = label(due(observed(name, value)), config=POLICY, rule_set=parse_rule_set(PAYING, signals=SIGNALS), now=NOON)
    assert {score.abstained for score in made.terms if score.name.endswith(name)} == {"unreadable"}
    assert made.reward == 0.0


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ('name = "rating"\nweight = nan', r"weight is nan: give a number from -1e\+09 to 1e\+09 - at `\$.terms\[0\]`"),
        ('name = "rating"\nweight = -inf', "weight is -inf: give a number"),
        (f'name = "rating"\nweight = 1{"0" * 400}', r"\$.terms\[0\]"),
        ('name = "latency"\nweight = 1\nparams = { target_s = 0 }', "term latency: target_s = 0: Expected `float` > 0.0"),
        ('name = "latency"\nweight = 1\nparams = { target_s = "10" }', "term latency: target_s = '10': Expected `float`, got `str`"),
        ('name = "latency"\nweight = 1\nparams = { target_s = true }', "term latency: target_s = True: Expected `float`, got `bool`"),
        ('name = "edit_persistence"\nweight = 1\nparams = { shift = "-0.3" }', "term edit_persistence: shift = '-0.3': Expected `float`"),
        ('name = "clarification"\nweight = 1\nparams = { cost = nan }', "term clarification: cost = nan: Expected `float`"),
        ('name = "finish"\nweight = 1\nparams = { length = inf }', "term finish: length = inf: Expected `float` <= "),
        ('name = "tool_calls"\nweight = 1\nparams = { broken = [] }', "term tool_calls: broken = .*: Expected `float`, got `array`"),
        ('name = "length"\nweight = 1\nparams = { k = nan }', "term length: k = nan: Expected `float`"),
        ('name = "length"\nweight = 1\nparams = { scale_tokens = -1.0 }', "term length: k and scale_tokens must be positive"),
        ('name = "follow_up"\nweight = 1\nparams = { confident = nan }', "term follow_up: confident must be from 0.5 to 1"),
        ('name = "follow_up"\nweight = 1\nparams = { confident = "sure" }', "term follow_up: confident = 'sure': Expected `float`"),
        ('name = "follow_up"\nweight = 1\nparams = { read = "x" }', "term follow_up: read is no param of a rule set: leave it out"),
        ('name = "rating"\nweight = 1\nparams = { aggregation = "best" }', "term rating: aggregation = 'best': Invalid enum value"),
        ('name = "undo"\nweight = 1\nparams = { cost = 1.0 }', "term undo: "),
    ],
)
def test_a_number_by_which_nothing_can_be_scored_is_refused_with_the_term_and_the_param(term: str, message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        parse_rule_set(f'name = "x"\n[[terms]]\n{term}')


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_default_reward_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(BadConfig, match=f"default_reward is {value}: give a number"):
        parse_rule_set(f'name = "x"\ndefault_reward = {value}\n[[terms]]\nname = "rating"\nweight = 1')


def test_a_param_is_taken_as_a_whole_number_and_an_aggregation_as_a_param_or_beside_them() -> None:
    toml = 'name = "x"\n[[terms]]\nname = "latency"\nweight = 1\nparams = { target_s = 1 }\n'
    assert value_of("latency", due(observed("latency", 1.5)), toml=toml) == -0.5
    rated = due(observed("rating", 1.0, id_="a", second=1), observed("rating", 0.0, id_="b", second=2))
    for how in ('aggregation = "average"', 'params = { aggregation = "average" }'):
        assert value_of("rating", rated, toml=f'name = "x"\n[[terms]]\nname = "rating"\nweight = 1\n{how}\n') == 0.5
