"""What is looked at in a follow-up beside its words, each feature by hand."""

import pytest

from pipelines.labelling.follow_up.features import LOG, NAMES, NUMERIC, features, own_words


def found(text: str, *, answer: str = "") -> dict[str, float]:
    return dict(zip(NAMES, features(text, answer=answer), strict=True))


PLAIN = {
    "short": 1.0, "long": 0.0, "shouts": 0.0, "exclaims": 0.0, "has_code": 0.0, "has_log": 0.0, "quotes_answer": 0.0, "lower_case": 0.0,
    "many_lines": 0.0, "asks": 0.0, "questions": 0.0, "trails_off": 0.0, "characters": 0.014, "answer_has_code": 0.0,
    "answer_apologises": 0.0, "answer_asks": 0.0, "answer_breaks_off": 0.0, "answer_declines": 0.0, "answer_characters": 0.0,
}  # fmt: skip


def test_a_plain_message_has_nothing_but_its_length() -> None:
    assert {name: found("Next, a chart.")[name] for name in NUMERIC} == PLAIN


@pytest.mark.parametrize(
    ("text", "name", "value", "other"),
    [
        ("One two three four five", "short", 1.0, 0.0),
        ("One two three four five six", "short", 0.0, 0.0),
        ("word " * 60, "long", 0.0, 0.0),
        ("word " * 61, "long", 1.0, 0.0),
        ("THIS IS BAD AND", "shouts", 0.0, 0.0),  # twelve letters
        ("THIS IS BAD ANDY", "shouts", 1.0, 0.0),  # thirteen
        ("THIS IS not so loud", "shouts", 0.0, 0.0),  # 6 of 16
        ("Good!", "exclaims", 1.0, 0.0),
        ("a" * 240 + "!", "exclaims", 0.0, 0.0),
        ("Look ```print(1, 2, 3)``` there", "has_code", 1.0, 0.0),
        ("A long sentence about what `x` does in the whole of it", "has_code", 0.0, 0.0),
        ("It says\n  at main (a.js)", "has_log", 1.0, 0.0),
        ("fix it", "lower_case", 1.0, 0.0),
        ("a\nb\nc\nd", "many_lines", 0.0, 0.0),
        ("a\nb\nc\nd\ne", "many_lines", 1.0, 0.0),
        ("Why?", "asks", 1.0, 0.0),
        ("Why?", "questions", 1 / 3, 0.0),
        ("Why? Who? When? Where?", "questions", 1.0, 0.0),
        ("Hm...", "trails_off", 1.0, 0.0),
        ("a" * 500, "characters", 0.5, 0.0),
        ("a" * 2000, "characters", 1.0, 0.0),
    ],
)
def test_the_shape_of_a_message(text: str, name: str, value: float, other: float) -> None:
    assert found(text)[name] == pytest.approx(value)
    assert found("Next, a chart, and then all of it.")[name] == pytest.approx(other if name != "characters" else 0.034)


@pytest.mark.parametrize(
    ("answer", "on"),
    [
        ("Here: ```x = 1```", {"answer_has_code"}),
        ("I apologize. Done.", {"answer_apologises"}),
        ("x" * 120 + " sorry.", set[str]()),
        ("Shall I?", {"answer_asks"}),
        ("and then the", {"answer_breaks_off"}),
        ("I cannot do that.", {"answer_declines"}),
        ("x" * 300 + " I cannot do that.", set[str]()),
    ],
)
def test_the_answer_before_it_is_looked_at_as_well(answer: str, on: set[str]) -> None:
    said = found("Next, a chart.", answer=answer)
    names = {"answer_has_code", "answer_apologises", "answer_asks", "answer_breaks_off", "answer_declines"}
    assert {name for name in names if said[name] == 1.0} == on
    assert said["answer_characters"] == pytest.approx(len(answer) / 3000)
    assert found("Next.", answer="y." * 9000)["answer_characters"] == 1.0


def test_phrases_are_looked_for_where_a_judgement_stands() -> None:
    assert found("Thanks a lot")["thanks"] == found("Thanks a lot")["opening_thanks"] == 1.0
    late = found("x" * 50 + " thanks")
    assert (late["thanks"], late["opening_thanks"]) == (1.0, 0.0)
    assert found("x" * 250 + " thanks")["thanks"] == 0.0, "that far down stands the next task's material"
    assert found("x" * 1900 + " TypeError: no")["error_code"] == 1.0, "a pasted failure stands anywhere"
    assert found("x" * 2000 + " TypeError: no")["error_code"] == 0.0
    assert (found("Fine. " * 60 + "Is it?")["question"], found("Is it? Fine.")["question"]) == (1.0, 0.0)


def test_code_is_not_what_the_user_said() -> None:
    assert own_words("Look: ```print('wrong')``` and `error` there") == "Look:   and   there"
    assert found("Look: ```print('wrong')```")["wrong"] == 0.0


@pytest.mark.parametrize("before", ["", "\n", "no\n\n\n", "no\r\n\r\n", " \n \x0b\n", "no\u2028\n"])
@pytest.mark.parametrize("line", ["\tat f (a.js)", ' File "x"', " 3 | x", "a.ts:3:14", "npm ERR!", " [WARN"])
def test_a_line_of_a_log_is_found_below_blank_lines_and_looked_for_within_its_line(before: str, line: str) -> None:
    line_of = LOG.search(before + line + "\nyes")
    assert line_of is not None
    assert "\n" not in line_of.group()
    assert found(before + line)["has_log"] == 1.0
    assert found("no" + "\n" * 9 + "yes: at")["has_log"] == 0.0


@pytest.mark.parametrize(
    ("text", "opens"),
    [
        ("good", 1.0),
        ("... , nice", 1.0),
        ("ok, very good", 1.0),
        ("That's, , really\n great", 1.0),
        ("so  right", 1.0),
        ("sogood", 1.0),
        ("very ! good", 0.0),
        ("right for me", 0.0),
        ("This good", 0.0),
        ("ok,", 0.0),
    ],
)
def test_praise_opens_a_message_after_no_more_than_two_words_that_lead_to_it(text: str, opens: float) -> None:
    assert found(text)["praise_opens"] == opens
