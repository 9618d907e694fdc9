"""What people did with an answer, read as what it should have been."""

from datetime import timedelta
from typing import Any

import pytest

from app.domain.learning.corrections import CorrectionKind, Reaction
from app.domain.learning.rewards import DueTurn
from app.domain.telemetry.events import Observation
from pipelines.labelling.corrections import correction_of
from pipelines.labelling.rule_set import default_toml, parse_rule_set
from tests.fakes.labelling import NOON, due, observed

RULES = parse_rule_set(default_toml())
ANSWER = "Here:\ndef f(): return 1\nDone."
EDIT = {"horizon_s": 30.0, "before": "pass", "inserted": "def f(): return 1", "after": "def f(x: int) -> int: return x + 1"}


def read(*observations: Observation, retries: tuple[DueTurn, ...] = (), newcomers: frozenset[str] = frozenset()) -> object:
    reaction = Reaction(turn=due(*observations, completion=ANSWER), retries=retries, newcomers=newcomers)
    found = correction_of(reaction, RULES)
    return None if found is None else (found.kind, found.said, found.wanted)


def test_a_demonstration_is_the_whole_answer_the_latest_counts_and_it_goes_before_an_edit() -> None:
    found = read(observed("edit_persistence", EDIT), observed("demonstration", "one"), observed("demonstration", "two", id_="p"))
    assert found == (CorrectionKind.DEMONSTRATION, "two", "two")
    assert read(observed("demonstration", f" {ANSWER}\n")) is None  # nothing was changed


def test_a_rewritten_edit_teaches_what_stands_there_now() -> None:
    now = str(EDIT["after"])
    later = EDIT | {"horizon_s": 300.0, "after": now + "  # checked"}
    said = now + "  # checked"
    found = read(observed("edit_persistence", later), observed("edit_persistence", EDIT, id_="p"))
    assert found == (CorrectionKind.EDIT, said, f"Here:\n{said}\nDone.")


def test_an_edit_in_a_file_is_found_where_it_stands() -> None:
    value = {"horizon_s": 30.0, "before": "a = 1\npass\nb = 2\n", "start": 6, "replaced": 4, "inserted": "def f(): return 1",
             "after": "a = 1\ndef f(): return 41\nb = 2\n"}  # fmt: skip
    assert read(observed("edit_persistence", value)) == (CorrectionKind.EDIT, "def f(): return 41", "Here:\ndef f(): return 41\nDone.")


@pytest.mark.parametrize("after", ["def f(): return 1", "pass", "", "  "])
def test_kept_taken_back_and_deleted_edits_teach_nothing(after: str) -> None:
    assert read(observed("edit_persistence", EDIT | {"after": after})) is None


def test_measured_survival_without_texts_teaches_nothing() -> None:
    assert read(observed("edit_persistence", {"horizon_s": 30.0, "four_gram": 0.1})) is None


def retry(completion: str, *observations: Observation, **changes: Any) -> DueTurn:
    return due(*observations, inference_id="j", completion=completion, started_at=NOON + timedelta(seconds=20), **changes)


def test_of_answers_asked_for_again_the_last_one_that_was_kept_teaches() -> None:
    asked = observed("regenerate", True)
    assert read(asked, retries=(retry("first"), retry("second"))) == (CorrectionKind.REGENERATE, "second", "second")
    assert read(asked) is None
    assert read(observed("regenerate", False), retries=(retry("second"),)) is None
    refused = Observation(id="q", inference_id="j", name="undo", value=True, occurred_at=NOON, source="api")
    assert read(asked, retries=(retry("second", refused),)) is None


def test_an_answer_that_nobody_allowed_to_learn_from_teaches_nothing_by_way_of_another() -> None:
    asked = observed("regenerate", True)
    for changes in ({"train_consent": False}, {"erased": True}, {"source": "import:old"}):
        assert read(asked, retries=(retry("first"), retry("second", **changes))) is None


def test_a_complaint_teaches_by_its_words_and_a_next_step_does_not() -> None:
    complaint = "No, that is wrong, it still does not work"
    assert read(observed("follow_up", complaint)) == (CorrectionKind.FOLLOW_UP, complaint, None)
    assert read(observed("follow_up", "Thank you, that works perfectly!")) is None


def test_what_was_said_of_the_episode_shows_no_single_answer() -> None:
    said = Observation(id="q", episode_id="e", name="demonstration", value="two", occurred_at=NOON, source="api")
    assert read(said) is None


def test_the_author_is_who_said_it_else_who_asked() -> None:
    shown = observed("demonstration", "two")
    by_other = Observation(id="q", inference_id="i", name="demonstration", value="two", occurred_at=NOON, source="api", actor="bob")
    own = correction_of(Reaction(turn=due(shown)), RULES)
    other = correction_of(Reaction(turn=due(by_other), newcomers=frozenset({"bob"})), RULES)
    assert own is not None
    assert other is not None
    assert (own.author, own.newcomer, other.author, other.newcomer) == ("alice", False, "bob", True)


# --- each bound from both sides ---------------------------------------------------------------------------------------------------

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def edited(inserted: str, after: str, *, before: str = "", **more: Any) -> Observation:
    return observed("edit_persistence", {"horizon_s": 30.0, "before": before, "inserted": inserted, "after": after, **more})


@pytest.mark.parametrize(("characters", "is_lesson"), [(23, False), (22, True)])
def test_an_edit_of_which_nineteen_in_twenty_parts_stand_is_as_good_as_kept(characters: int, is_lesson: bool) -> None:
    # another last letter changes one of 20 four-grams (sim4 .95), or of 19
    written = LETTERS[:characters]
    assert (read(edited(written, written[:-1] + "!")) is not None) is is_lesson


@pytest.mark.parametrize(("characters", "is_lesson"), [(13, False), (12, True)])
def test_an_edit_after_which_nine_in_ten_parts_stand_of_what_was_there_was_taken_back(characters: int, is_lesson: bool) -> None:
    there = LETTERS[:characters]
    assert (read(edited("0123456789", there[:-1] + "!", before=there)) is not None) is is_lesson


def test_of_several_looks_the_last_and_of_several_edits_the_longest_teaches() -> None:
    early, late = edited("first words", "early", edit="a"), edited("first words", "late", edit="a", horizon_s=600.0)
    assert read(late, early) == (CorrectionKind.EDIT, "late", None)
    assert read(early, edited("first words", "again", edit="a")) == (CorrectionKind.EDIT, "again", None)
    assert read(early, edited("many more words", "longer", edit="b")) == (CorrectionKind.EDIT, "longer", None)
    assert read(edited("many more words", "many more words", edit="b"), early) == (CorrectionKind.EDIT, "early", None)


def test_an_edit_is_put_in_the_place_that_it_has_in_the_answer_where_it_has_one() -> None:
    value, now = str(EDIT["inserted"]), "def g(): return 2"
    twice = due(edited(value, now), completion=f"{value}\n{value}")
    found = correction_of(Reaction(turn=twice), RULES)
    assert found is not None
    assert (found.said, found.wanted) == (now, None)
    assert read(edited("not in the answer", now)) == (CorrectionKind.EDIT, now, None)


def test_an_empty_demonstration_shows_nothing() -> None:
    assert read(observed("demonstration", " \n")) is None
    assert read(observed("demonstration", "shown", id_="p"), observed("demonstration", " ")) == (
        CorrectionKind.DEMONSTRATION, "shown", "shown",
    )  # fmt: skip


@pytest.mark.parametrize("completion", ["", "  \n", ANSWER, f" {ANSWER}\n"])
def test_a_retry_that_says_nothing_or_the_same_teaches_nothing(completion: str) -> None:
    assert read(observed("regenerate", True), retries=(retry(completion),)) is None


def test_a_retry_that_was_undone_and_redone_teaches() -> None:
    redone = Observation(id="q", inference_id="j", name="undo", value=False, occurred_at=NOON, source="api")
    asked = observed("regenerate", True)
    assert read(asked, retries=(retry("second", redone),)) == (CorrectionKind.REGENERATE, "second", "second")
    for name in ("undo", "regenerate"):
        again = Observation(id="q", inference_id="j", name=name, value=True, occurred_at=NOON, source="api")
        assert read(asked, retries=(retry("second", again),)) is None


def test_a_rule_set_that_does_not_read_follow_ups_learns_nothing_from_them() -> None:
    rules = parse_rule_set('name = "x"\n[[terms]]\nname = "rating"\nweight = 1.0\n')
    turn = due(observed("follow_up", "No, that is wrong, it still does not work"), completion=ANSWER)
    assert correction_of(Reaction(turn=turn), rules) is None
    assert correction_of(Reaction(turn=turn), RULES) is not None
