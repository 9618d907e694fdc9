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
