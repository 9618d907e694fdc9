"""People, their problems and what they do are functions of a seed."""

import hashlib
import random
from dataclasses import replace
from typing import Any

import pytest

from pipelines.simulation.people import PANEL, person
from pipelines.simulation.problems import LONGEST_PROMPT, problems
from pipelines.simulation.product import Editor, _reaction
from pipelines.simulation.words import DISSATISFIED, NEXT_STEP, SATISFIED, follow_up


def test_the_same_seed_gives_the_same_person_and_another_seed_another() -> None:
    assert person(1, 7) == person(1, 7)
    assert person(1, 7) != person(2, 7)


def test_held_out_people_are_other_people_and_say_so_by_their_tier() -> None:
    assert person(1, 7, held_out=True).held_out
    assert person(1, 7, held_out=True).tier == PANEL
    assert not person(1, 7).held_out
    assert person(1, 7, held_out=True).name != person(1, 7).name


def test_people_differ() -> None:
    tastes = {person(1, index).taste for index in range(200)}
    assert len(tastes) >= 8


def test_held_out_problems_and_the_others_have_nothing_in_common() -> None:
    training, held_out = problems(held_out=False), problems(held_out=True)
    assert not {p.id for p in training} & {p.id for p in held_out}
    assert (len(training), len(held_out)) == (23, 8)
    assert all(len(p.prompt) <= LONGEST_PROMPT for p in (*training, *held_out))


def test_held_out_people_ask_held_out_problems_only() -> None:
    held_out = {p.prompt for p in problems(held_out=True)}
    asks = [Editor().ask(person(1, i, held_out=True), random.Random(i)) for i in range(30)]
    assert all(ask.prompt in held_out for ask in asks)


def test_an_answer_is_reacted_to_in_the_same_way_for_the_same_seed() -> None:
    somebody, editor = person(3, 4), Editor()
    ask = editor.ask(somebody, random.Random(1))
    answer = "    return None"
    assert editor.react(somebody, ask, answer, random.Random(2)) == editor.react(somebody, ask, answer, random.Random(2))


def test_who_keeps_everything_is_mostly_content_and_who_keeps_nothing_mostly_is_not() -> None:
    draw = random.Random(5)
    happy = [follow_up(1.0, draw) for _ in range(400)]
    angry = [follow_up(0.0, draw) for _ in range(400)]
    assert sum(text in SATISFIED for text in happy) > sum(text in DISSATISFIED for text in happy) * 5
    assert sum(text in DISSATISFIED for text in angry) > sum(text in SATISFIED for text in angry) * 5


@pytest.mark.parametrize(("kept", "at_least", "at_most"), [(1.0, 0.9, 1.0), (0.6, 0.9, 1.0), (0.5, 0.0, 0.1), (0.0, 0.0, 0.1)])
def test_whoever_keeps_more_than_half_got_the_task_done_but_for_one_in_twenty(kept: float, at_least: float, at_most: float) -> None:
    somebody, draw, answer = replace(person(3, 4), carelessness=0.0), random.Random(7), "x" * 100
    made = [_reaction(somebody, answer[: int(100 * kept)], answer, draw) for _ in range(400)]
    assert at_least <= sum(one.success for one in made) / 400 <= at_most
    assert {one.edits for one in made} == {(answer[: int(100 * kept)],) * 2}
    assert (0.05 < sum(one.regenerate for one in made) / 400 < 0.15) is (kept == 0.0)
    assert not any(one.undo for one in made)


def test_the_careless_revert_what_they_kept_at_first() -> None:
    somebody = replace(person(3, 4), carelessness=1.0, talkativeness=0.0)
    made = _reaction(somebody, "kept", "kept and more", random.Random(1))
    assert (made.edits, made.undo, made.follow_up) == (("kept", ""), True, None)
    assert not _reaction(somebody, "", "nothing good", random.Random(1)).undo, "there is nothing to take back"


def test_the_people_of_a_seed_are_the_same_for_ever() -> None:
    made = [person(1, number) for number in range(24)]
    likes = ["".join(letter for letter, one in zip("dcpw", (t.docstrings, t.comments, t.prints, t.prose), strict=True) if one)
             for t in (each.taste for each in made)]  # fmt: skip
    assert " ".join(like or "-" for like in likes) == (
        "- c d - pw cp - cp c p cp dcp - dc p p cp cp - cp p cp dcp cp"
    )  # fmt: skip
    assert [number for number in range(160) if person(1, number).taste.prose] == [4, 39, 54, 62, 76, 118, 127, 145, 148]
    assert " ".join(each.tier for each in made[:6]) == "free team free pro free team"
    assert [round(each.carelessness, 3) for each in made[:6]] == [0.079, 0.081, 0.059, 0.002, 0.089, 0.087]
    assert [round(each.talkativeness, 3) for each in made[:6]] == [0.481, 0.331, 0.436, 0.237, 0.531, 0.717]
    assert (person(1, 7).name, person(1, 7, held_out=True).name) == ("dev-1-00007", "panel-1-00007")


class Given(random.Random):
    """Draws what it is given, and of a choice the first."""

    def __init__(self, *drawn: float) -> None:
        super().__init__(0)
        self.drawn = [*drawn]

    def random(self) -> float:
        return self.drawn.pop(0)

    def choice(self, seq: Any) -> Any:
        return seq[0]


@pytest.mark.parametrize(
    ("kept", "mood", "words"),
    [
        (0.6, 0.549, SATISFIED), (0.6, 0.55, NEXT_STEP), (0.6, 0.949, NEXT_STEP), (0.6, 0.95, DISSATISFIED),
        (0.599, 0.199, SATISFIED), (0.599, 0.2, NEXT_STEP), (0.599, 0.699, NEXT_STEP), (0.599, 0.7, DISSATISFIED),
        (0.201, 0.0, SATISFIED), (0.2, 0.0, DISSATISFIED),
        (0.2, 0.749, DISSATISFIED), (0.2, 0.75, NEXT_STEP), (0.2, 0.969, NEXT_STEP), (0.2, 0.97, SATISFIED),
    ],
)  # fmt: skip
def test_what_people_write_follows_from_what_they_kept_and_their_mood(kept: float, mood: float, words: tuple[str, ...]) -> None:
    assert follow_up(kept, Given(mood)) == words[0]


@pytest.mark.parametrize(
    ("kept", "drawn", "regenerate", "success"),
    [
        (9, (0.5, 0.9, 0.099, 0.05), True, False), (9, (0.5, 0.9, 0.1, 0.05), False, False), (10, (0.5, 0.9, 0.05), False, False),
        (50, (0.5, 0.9, 0.05), False, False), (51, (0.5, 0.9, 0.05), False, True), (51, (0.5, 0.9, 0.049), False, False),
        (50, (0.5, 0.9, 0.049), False, True),
    ],
)  # fmt: skip
def test_regenerating_and_success_turn_at_a_tenth_and_at_a_half(
    kept: int, drawn: tuple[float, ...], regenerate: bool, success: bool
) -> None:
    somebody = replace(person(3, 4), carelessness=0.5, talkativeness=0.9)
    made = _reaction(somebody, "x" * kept, "x" * 100, Given(*drawn))
    assert (made.regenerate, made.success, made.undo, made.follow_up) == (regenerate, success, False, None)


def test_who_is_talkative_says_what_the_last_look_left() -> None:
    somebody = replace(person(3, 4), carelessness=0.5, talkativeness=0.9)
    careless = _reaction(somebody, "xx", "xx", Given(0.49, 0.89, 0.0, 0.5, 0.5))
    assert (careless.edits, careless.undo, careless.follow_up) == (("xx", ""), True, DISSATISFIED[0])
    content = _reaction(somebody, "xx", "xx", Given(0.5, 0.89, 0.0, 0.5))
    assert (content.edits, content.undo, content.follow_up, content.success) == (("xx", "xx"), False, SATISFIED[0], True)
    nothing = _reaction(somebody, "", "", Given(0.5, 0.9, 0.5, 0.5))
    assert (nothing.success, nothing.regenerate) == (False, False)


def test_a_quarter_of_the_problems_by_their_number_is_held_out() -> None:
    kept, held = ([int(p.id.partition("/")[2]) for p in problems(held_out=side)] for side in (False, True))
    share = {number: hashlib.sha256(f"HumanEval/{number}".encode()).digest()[0] for number in (*kept, *held)}
    assert max(share[number] for number in held) < 64 <= min(share[number] for number in kept)
    assert max(len(p.prompt) for p in (*problems(held_out=False), *problems(held_out=True))) <= 245


def test_what_people_ask_for_is_one_function_of_the_problem_and_says_so_to_the_model() -> None:
    ask = Editor().ask(person(1, 7), random.Random(3))
    system, user = ask.messages
    assert system == {"role": "system", "content": "You complete Python code in an editor."}
    assert user == {"role": "user", "content": f"Complete this Python function.\n\n{ask.prompt}"}
    assert (ask.task, ask.language) == ("complete", "python")
    assert ask.prompt in {problem.prompt for problem in problems(held_out=False)}


def test_what_is_kept_of_an_answer_follows_from_the_taste_of_whoever_asked() -> None:
    somebody, editor = replace(person(1, 7), carelessness=0.0, talkativeness=0.0), Editor()
    ask = editor.ask(somebody, random.Random(3))
    reaction = editor.react(somebody, ask, "```\n    # why\n    return 1\n```", random.Random(1))
    likes = somebody.taste.comments
    assert reaction.edits[0] == ("    # why\n    return 1" if likes else "    return 1")
    assert editor.react(somebody, ask, "no code at all", random.Random(1)).edits == ("", "")


def test_problems_are_in_the_order_of_their_ids_and_name_what_has_to_be_written() -> None:
    for side in (False, True):
        found = problems(held_out=side)
        assert [p.id for p in found] == sorted(p.id for p in found)
        assert {p.held_out for p in found} == {side}
        assert all(f"def {p.entry_point}(" in p.prompt and p.prompt == p.prompt.strip() for p in found)
