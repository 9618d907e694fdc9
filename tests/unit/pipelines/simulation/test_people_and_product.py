"""People, their problems and what they do are functions of a seed."""

import random
from dataclasses import replace

import pytest

from pipelines.simulation.people import PANEL, person
from pipelines.simulation.problems import LONGEST_PROMPT, problems
from pipelines.simulation.product import Editor, _reaction
from pipelines.simulation.words import DISSATISFIED, SATISFIED, follow_up


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
