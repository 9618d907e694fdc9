"""Terms, rule sets and what becomes of every turn: exactly one label, with an exclusion where it cannot be trained on."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.errors import BadConfig
from app.domain.learning.rewards import PROCESS_TERMS, Aggregation, Credit, DueTurn, Exclusion, TermScore, TurnFacts
from app.domain.policies import Direction, PolicyConfig, SignalConfig, SignalType
from app.domain.telemetry.events import Observation
from app.domain.telemetry.turns import FinishReason, ToolCall, ToolVerdict
from pipelines.labelling.aggregate import aggregate
from pipelines.labelling.labeller import is_held_out, label
from pipelines.labelling.rule_set import default_toml, parse_rule_set
from pipelines.labelling.terms import length_penalty
from tests.fakes.labelling import NOON, due, facts, observed

POLICY = PolicyConfig(model="m", base_name="b", base_model="B")
DEFAULT = default_toml()
BROKEN_CALL = (ToolCall(id="c", name="edit", arguments="{", verdict=ToolVerdict.UNPARSABLE),)
KEPT = {"horizon_s": 30, "four_gram": 1.0}
REVERTED = {"horizon_s": 30, "four_gram": 0.0}

# What a first attempt looks like: a broken call scores nothing, only reported edits count, and so a bad edit is worse than no edit.
NAIVE = """
name = "naive"
train_without_signal = true
[[terms]]
name = "edit_persistence"
weight = 1.0
params = { shift = -0.3 }
"""


def reward(toml: str, turn: DueTurn) -> float:
    return label(turn, config=POLICY, rule_set=parse_rule_set(toml), now=NOON).reward


# --- the two reward hacks of production ---------------------------------------------------------------------------------------


def test_a_broken_tool_call_never_pays_more_than_a_bad_edit() -> None:
    broken = due(tool_calls=BROKEN_CALL, finish_reason=FinishReason.TOOL_CALLS)
    bad_edit = due(observed("edit_persistence", REVERTED))
    assert reward(NAIVE, broken) > reward(NAIVE, bad_edit)  # the hack: break the call, and nothing is ever measured
    assert reward(DEFAULT, broken) < reward(DEFAULT, bad_edit)
    assert label(broken, config=POLICY, rule_set=parse_rule_set(DEFAULT), now=NOON).exclusion is None  # and it is trained on


def test_asking_instead_of_editing_never_pays_more_than_trying() -> None:
    question = due(completion="Which of the two files do you mean?")
    bad_edit, good_edit = due(observed("edit_persistence", REVERTED)), due(observed("edit_persistence", KEPT))
    assert reward(NAIVE, question) > reward(NAIVE, bad_edit)  # the hack: ask, and no risky edit is ever held against you
    assert reward(DEFAULT, question) <= reward(DEFAULT, bad_edit)
    assert reward(DEFAULT, question) < reward(DEFAULT, good_edit)


EASY = [due(observed("edit_persistence", KEPT))] * 8
HARD = [
    *[due(observed("edit_persistence", KEPT))] * 2,
    *[due(observed("edit_persistence", REVERTED), observed("follow_up", "That is wrong, it does not work.", id_="f"))] * 3,
    *[due(observed("edit_persistence", REVERTED))] * 3,
]
"""What an honest policy's tries at hard tasks come to: a quarter kept, the others taken back, every second one with a complaint."""


@pytest.mark.parametrize(
    "hack",
    [due(tool_calls=BROKEN_CALL, finish_reason=FinishReason.TOOL_CALLS), due(completion="Which of the two files do you mean?")],
    ids=["breaks the tool call", "asks instead"],
)
def test_a_policy_that_dodges_hard_tasks_earns_less_than_an_honest_one_and_more_under_the_naive_rules(hack: DueTurn) -> None:
    def earned(toml: str, turns: list[DueTurn]) -> float:
        return sum(reward(toml, turn) for turn in turns) / len(turns)

    honest, hacker = EASY + HARD, EASY + [hack] * len(HARD)
    assert earned(NAIVE, hacker) > earned(NAIVE, honest)
    assert earned(DEFAULT, hacker) < earned(DEFAULT, honest)


def test_only_a_turn_that_nobody_reacted_to_gets_the_default_reward_and_pays_for_its_length_all_the_same() -> None:
    silent = """
name = "silent"
default_reward = -0.25
[[terms]]
name = "edit_persistence"
weight = 1.0
[[terms]]
name = "length"
weight = 0.05
params = { k = 1.0, q = 0.5, scale_tokens = 256 }
"""
    cost = 0.0118  # see `facts`
    assert reward(silent, due()) == pytest.approx(-0.25 - cost, abs=1e-4)
    assert reward(silent, due(observed("edit_persistence", KEPT))) == pytest.approx(1.0 - cost, abs=1e-4)
    assert reward(silent, due(observed("edit_persistence", REVERTED))) == pytest.approx(-cost, abs=1e-4)


@pytest.mark.parametrize(
    "exit_", [{"finish_reason": FinishReason.TIMEOUT}, {"finish_reason": FinishReason.ABORTED}, {"finish_reason": FinishReason.LENGTH}]
)
def test_no_exit_is_free(exit_: dict[str, FinishReason]) -> None:
    assert reward(DEFAULT, due(**exit_)) < reward(DEFAULT, due())


# --- dispositions ---------------------------------------------------------------------------------------------------------------

CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "tool_calls": st.just(BROKEN_CALL), "finish_reason": st.sampled_from(FinishReason), "erased": st.booleans(),
        "completion": st.sampled_from(["", "Which file?", "x = 1"]), "train_consent": st.booleans(), "has_logprobs": st.booleans(),
        "source": st.sampled_from(["gateway", "import:sharegpt"]), "completion_tokens": st.sampled_from([0, 1, 5000]),
        "actor": st.sampled_from([None, "bob"]),
    },
)  # fmt: skip
SAID = st.lists(
    st.sampled_from(
        [
            ("edit_persistence", KEPT), ("edit_persistence", REVERTED), ("follow_up", "That is wrong."), ("follow_up", "hm"),
            ("rating", True), ("rating", -0.5), ("undo", True), ("undo", False), ("tool_call", {"name": "t", "ok": False}),
            ("latency", 30.0), ("task_success", True), ("comment", "so so"), ("declared_by_the_product", 3.0),
            ("rating", "great"), ("edit_persistence", None), ("tool_call", {}), ("latency", "soon"),
        ]
    ),
    max_size=5,
)  # fmt: skip


@given(st.lists(st.tuples(CHANGES, SAID), min_size=1, max_size=20))
def test_every_turn_ends_with_exactly_one_label_and_the_counts_add_up(
    mix: list[tuple[dict[str, object], list[tuple[str, object]]]],
) -> None:
    turns = [due(*(observed(*what, id_=f"o{k}") for k, what in enumerate(said)), **changes) for changes, said in mix]
    rule_set = parse_rule_set(DEFAULT)
    made = [label(turn, config=POLICY, rule_set=rule_set, now=NOON) for turn in turns]
    dispositions = Counter(one.exclusion for one in made)
    assert dispositions.total() == len(turns)
    for turn, one in zip(turns, made, strict=True):
        assert one.reward == pytest.approx(sum(term.weight * term.value for term in one.terms if term.value is not None))
        assert len(one.terms) == len(rule_set.terms)
        assert all((term.value is None) == (term.abstained is not None) for term in one.terms)
        assert one.revision == 1
        assert (one.exclusion is Exclusion.ERASED) == turn.facts.erased
        if one.exclusion is None:
            assert turn.facts.train_consent
            assert turn.facts.has_logprobs
            assert turn.facts.source == "gateway"
            assert turn.facts.finish_reason is not FinishReason.ERROR


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"erased": True, "train_consent": False}, Exclusion.ERASED),
        ({"source": "import:sharegpt", "has_logprobs": False}, Exclusion.IMPORTED),
        ({"train_consent": False}, Exclusion.NO_CONSENT),
        ({"finish_reason": FinishReason.ERROR}, Exclusion.ENGINE_FAULT),
        ({"completion_tokens": 0}, Exclusion.EMPTY_COMPLETION),
        ({"has_logprobs": False}, Exclusion.NO_LOGPROBS),
        ({"has_logprobs": False, "tags": {"mixed_versions": "sampled by more than one version"}}, Exclusion.MIXED_VERSIONS),
        ({"tags": {"unscorable": "drawn under masks of another make"}}, Exclusion.NO_RATIO),
        ({}, Exclusion.NO_SIGNAL),
        ({"tool_calls": BROKEN_CALL}, None),
        ({"finish_reason": FinishReason.TIMEOUT}, None),
        ({"finish_reason": FinishReason.ABORTED}, None),
        ({"completion": "Which file?"}, None),
    ],
)
def test_what_is_left_out_says_why_and_a_failed_answer_is_not_left_out(changes: dict[str, object], reason: Exclusion | None) -> None:
    assert label(due(**changes), config=POLICY, rule_set=parse_rule_set(DEFAULT), now=NOON).exclusion is reason


@given(st.text(min_size=1), st.floats(0, 1))
def test_a_person_is_held_out_in_all_turns_or_none_and_more_people_as_the_share_grows(actor: str, share: float) -> None:
    config = PolicyConfig(model="m", base_name="b", base_model="B", held_out_share=share)
    assert is_held_out(facts(actor=actor), config) == is_held_out(facts(actor=actor, inference_id="j", episode_id="f"), config)
    assert not is_held_out(facts(actor=actor), PolicyConfig(model="m", base_name="b", base_model="B", held_out_share=0.0))


# --- length penalty and aggregation -----------------------------------------------------------------------------------------------

K, Q, X = st.floats(0.01, 10), st.floats(0, 4), st.floats(0, 100)


@given(K, Q, X, X)
def test_the_length_penalty_rises_from_zero_and_is_concave(k: float, q: float, x: float, y: float) -> None:
    assert length_penalty(0.0, k=k, q=q) == 0.0
    low, high = sorted((x, y))
    assert length_penalty(low, k=k, q=q) <= length_penalty(high, k=k, q=q) + 1e-9
    middle = length_penalty((x + y) / 2, k=k, q=q)
    assert middle >= (length_penalty(x, k=k, q=q) + length_penalty(y, k=k, q=q)) / 2 - 1e-9


@given(K, X)
def test_the_length_penalty_has_its_limits(k: float, x: float) -> None:
    assert length_penalty(x, k=k, q=0.0) == pytest.approx(x)
    assert length_penalty(x, k=k, q=1.0 + 1e-7) == pytest.approx(length_penalty(x, k=k, q=1.0), rel=1e-4, abs=1e-9)
    assert length_penalty(x, k=k, q=2.0) <= 1 / k


def test_length_penalty_by_hand() -> None:
    assert length_penalty(3.0, k=1.0, q=0.5) == pytest.approx(2.0)  # (√4 − 1) / 0.5


@pytest.mark.parametrize(
    ("how", "value"), [("earliest", 1.0), ("latest", 2.0), ("average", 3.0), ("median", 2.0), ("sum", 9.0), ("min", 1.0), ("max", 6.0)]
)
def test_several_observations_become_one_value(how: str, value: float) -> None:
    assert aggregate([1.0, 6.0, 2.0], Aggregation(how)) == value


# --- rule sets ------------------------------------------------------------------------------------------------------------------


class Politeness:
    """A term as a user would write it."""

    name = "politeness"

    def __init__(self, *, word: str) -> None:
        self._word = word

    def score(self, turn: TurnFacts, observations: Sequence[Observation], *, weight: float) -> TermScore:
        """1 where the answer has the word."""
        return TermScore(name=self.name, value=float(self._word in turn.completion), weight=weight)


def test_a_user_written_term_is_found_by_its_import_path() -> None:
    toml = f'name = "own"\n[[terms]]\nname = "{__name__}:Politeness"\nweight = 2.0\nparams = {{ word = "please" }}\n'
    rule_set = parse_rule_set(toml, allowed=(f"{__name__}:Politeness",))
    assert label(due(completion="here you are, please"), config=POLICY, rule_set=rule_set, now=NOON).reward == 2.0
    assert label(due(), config=POLICY, rule_set=rule_set, now=NOON).reward == 0.0


def test_reading_a_rule_set_runs_nothing_that_the_deployment_did_not_allow(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    toml = f'name = "x"\n[[terms]]\nname = "os:system"\nweight = 1\nparams = {{ command = "touch {trace}" }}\n'
    for allowed in ((), ("os:path", "another.package:Term")):
        with pytest.raises(BadConfig, match="allowed_terms"):
            parse_rule_set(toml, allowed=allowed)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("name = ", "the rule set: "),
        ('name = "x"\nterms = []', "it has no terms"),
        ('name = "x"\ncolour = 1\nterms = []', "unknown field `colour`"),
        ('name = "x"\n[[terms]]\nname = "vibes"\nweight = 1.0', "no term is named 'vibes'"),
        ('name = "x"\n[[terms]]\nname = "rating"\nweight = "much"', r"\$.terms\[0\].weight"),
        ('name = "x"\n[[terms]]\nname = "rating"\nweight = 1\n[[terms]]\nname = "rating"\nweight = 1', "terms twice: rating"),
        ('name = "x"\n[[terms]]\nname = "length"\nweight = 1\nparams = { k = 0 }', "term length: k and scale_tokens"),
        ('name = "x"\n[[terms]]\nname = "length"\nweight = 1\nparams = { m = 0 }', "term length: .*'m'"),
        ('name = "x"\n[[terms]]\nname = "nowhere.at_all:Term"\nweight = 1', "cannot be imported"),
    ],
)
def test_a_rule_set_that_makes_no_sense_is_refused_by_name(toml: str, message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        parse_rule_set(toml, allowed=("nowhere.at_all:Term",))


def test_the_digest_is_of_the_content_and_not_of_the_layout() -> None:
    assert parse_rule_set(DEFAULT).digest == parse_rule_set("# remark\n" + DEFAULT).digest
    assert parse_rule_set(DEFAULT).digest != parse_rule_set(DEFAULT.replace("0.05", "0.06")).digest


# --- single terms ---------------------------------------------------------------------------------------------------------------

VALID_CALL = (ToolCall(id="c", name="edit", arguments="{}", verdict=ToolVerdict.VALID),)


def value_of(term: str, turn: DueTurn, *, toml: str = DEFAULT, signals: dict[str, SignalConfig] | None = None) -> float | None:
    """What one term of a rule set says about the turn."""
    made = label(turn, config=POLICY, rule_set=parse_rule_set(toml, signals=signals), now=NOON)
    return next(score.value for score in made.terms if score.name == term)


@pytest.mark.parametrize(
    ("turn", "value"),
    [
        (due(tool_calls=VALID_CALL), 0.1),
        (due(observed("tool_call", {"name": "edit", "ok": True}), tool_calls=VALID_CALL), 0.1),
        (due(observed("tool_call", {"name": "edit", "ok": False}), tool_calls=VALID_CALL), -1.0),
        (
            due(
                observed("tool_call", {"name": "edit", "ok": False}, id_="a"), observed("tool_call", {"name": "edit", "ok": True}, id_="b")
            ),
            -1.0,
        ),
        (due(), None),
    ],
    ids=["parses", "succeeds", "fails in the product", "fails once", "no call"],
)
def test_a_tool_call_that_fails_in_the_product_is_a_broken_one(turn: DueTurn, value: float | None) -> None:
    assert value_of("tool_calls", turn) == value


@pytest.mark.parametrize(("said", "value"), [((True,), -1.0), ((True, False), 0.0), ((False, True), -1.0), ((True, False, True), -1.0)])
def test_of_several_undos_the_last_word_counts(said: tuple[bool, ...], value: float) -> None:
    turn = due(*(observed("undo", undone, id_=f"o{n}", second=n) for n, undone in enumerate(said)))
    assert value_of("undo", turn) == value


def test_a_question_beside_an_edit_costs_nothing_and_without_one_it_does() -> None:
    asked = "I changed it. Shall I do the other file too?"
    assert value_of("clarification", due(completion=asked)) == -0.3
    assert value_of("clarification", due(observed("edit_persistence", KEPT), completion=asked)) is None


def test_the_latest_word_on_the_task_counts() -> None:
    toml = 'name = "gold"\n[[terms]]\nname = "task_success"\nweight = 1.0\n'
    turn = due(observed("task_success", True, id_="a", second=1), observed("task_success", 0.25, id_="b", second=2))
    assert value_of("task_success", turn, toml=toml) == 0.25
    assert value_of("task_success", due(), toml=toml) is None


def test_every_term_about_the_turn_itself_says_so_and_no_other_does() -> None:
    made = label(due(), config=POLICY, rule_set=parse_rule_set(DEFAULT), now=NOON)
    process = {score.name for score in made.terms if score.credit is Credit.PROCESS}
    assert process == {"tool_calls", "clarification", "finish", "length", "latency"} == PROCESS_TERMS


# --- declared signals -------------------------------------------------------------------------------------------------------------

SIGNALS = {
    "rating": SignalConfig(type=SignalType.FLOAT, low=0, high=5),
    "user_score": SignalConfig(type=SignalType.FLOAT, low=0, high=1),
    "escalated": SignalConfig(type=SignalType.BOOLEAN, optimize=Direction.DOWN),
    "kept": SignalConfig(type=SignalType.FLOAT),
}
PAYING = """
name = "paying"
[[terms]]
name = "rating"
weight = 0.5
[[terms]]
name = "signal:user_score"
weight = 1.0
[[terms]]
name = "signal:escalated"
weight = 2.0
aggregation = "min"
"""


def test_a_declared_signal_pays_by_its_type_and_direction() -> None:
    turn = due(observed("user_score", 0.1, id_="a"), observed("escalated", True, id_="b"), observed("rating", 4.0, id_="c"))
    made = label(turn, config=POLICY, rule_set=parse_rule_set(PAYING, signals=SIGNALS), now=NOON)
    assert [score.value for score in made.terms] == pytest.approx([0.6, -0.8, -1.0])
    assert made.reward == pytest.approx(0.5 * 0.6 - 0.8 - 2.0)
    assert [score.evidence for score in made.terms] == [("c",), ("a",), ("b",)]
    assert made.exclusion is None


def test_a_thumb_stays_a_thumb_on_a_scale_of_stars() -> None:
    assert value_of("rating", due(observed("rating", False)), toml=PAYING, signals=SIGNALS) == -1.0


def test_where_nothing_is_known_of_the_policy_a_signal_abstains_and_says_why() -> None:
    made = label(due(observed("user_score", 1.0)), config=POLICY, rule_set=parse_rule_set(PAYING), now=NOON)
    assert [score.abstained for score in made.terms] == ["no_observation", "undeclared", "undeclared"]


@pytest.mark.parametrize(("name", "message"), [("stars", "no signal 'stars' is declared"), ("kept", "'kept' is float without a scale")])
def test_a_signal_that_cannot_pay_is_refused_with_the_cure(name: str, message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        parse_rule_set(f'name = "x"\n[[terms]]\nname = "signal:{name}"\nweight = 1.0', signals=SIGNALS)
