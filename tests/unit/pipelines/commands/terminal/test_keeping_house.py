"""What is old goes when it is told to, which files people's readings end up in, and who reads follow-ups beside them."""

import sys
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from sqlalchemy import insert, select

from app.db.engine import reading, writing
from app.db.tables import dead_letters
from app.domain.learning.readings import Asked, Mood, Reading, Said
from app.domain.ports import CycleBook
from pipelines.commands.labels import _message, _readers
from pipelines.commands.maintenance.upkeep import keep_house
from pipelines.commands.running.drafting import drafting_beside
from pipelines.config import loop_config
from tests.fakes.releases import release_room
from tests.unit.pipelines.commands.terminal.at_a_terminal import CONFIG, Terminal


def bury(terminal: Terminal, *days: float) -> None:
    """Letters that were seen so long ago."""
    now = datetime.now(UTC)
    rows: list[dict[str, Any]] = [
        {
            "topic": "t", "partition": 0, "offset": number, "headers": {}, "payload": b"x", "reason": "torn", "attempts": 1,
            "first_seen_at": now - timedelta(days=old), "last_seen_at": now - timedelta(days=old), "replayed_at": None,
        }
        for number, old in enumerate(days)
    ]  # fmt: skip
    with writing(terminal.engine) as connection:
        connection.execute(insert(dead_letters), rows)


def offsets(terminal: Terminal) -> list[int]:
    with reading(terminal.engine) as connection:
        return list(connection.execute(select(dead_letters.c.offset).order_by(dead_letters.c.offset)).scalars())


def test_what_is_older_than_its_class_may_be_goes_and_is_counted(terminal: Terminal) -> None:
    bury(terminal, 31.0, 29.0, 40.0)
    assert "dead_letters  kept   30 days  oldest 40.0 days" in terminal.said("upkeep", "show").splitlines()
    assert terminal.said("upkeep", "run", "--no-retire") == "nothing was old\n"
    assert offsets(terminal) == [0, 1, 2]
    assert terminal.said("upkeep", "run", "--no-merge") == "           2  dead_letters\n"
    assert offsets(terminal) == [1]
    assert terminal.said("upkeep", "run") == "nothing was old\n"


def test_a_class_without_a_limit_is_kept_for_ever_and_another_limit_is_kept_to(terminal: Terminal) -> None:
    (terminal.folder / "ratchet.toml").write_text(f"{CONFIG}[retention]\ndead_letters_days = 2.5\n")
    bury(terminal, 2.4, 2.6)
    assert "dead_letters  kept  2.5 days  oldest 2.6 days" in terminal.said("upkeep", "show").splitlines()
    terminal.said("upkeep", "run")
    assert offsets(terminal) == [0]


def test_a_round_says_what_went_by_its_name(terminal: Terminal) -> None:
    bury(terminal, 40.0)
    settings = terminal.settings
    assert keep_house(settings, retire=False) == {}
    assert keep_house(settings, merge=False) == {"dead_letters": 1}
    assert keep_house(settings) == {}


NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
TALK = (Said(role="assistant", text="one"), Said(role="user", text="and"), Said(role="assistant", text="two"), Said(role="user", text="no"))


@pytest.mark.parametrize(
    ("talk", "mood", "answer", "written"),
    [
        (TALK, Mood.DISSATISFIED, "two", "dissatisfied"),
        (TALK, None, "two", ""),
        (TALK[1:2], Mood.NEUTRAL, "", "neutral"),
        ((), None, "", ""),
    ],
)
def test_a_message_that_somebody_read_is_written_with_the_answer_before_it(
    talk: tuple[Said, ...], mood: Mood | None, answer: str, written: str
) -> None:
    read = None if mood is None else Reading(mood=mood, leaned_to=None, unsure=False, by="user:ada", at=NOON)
    asked = Asked(
        inference_id="t", observation_id="o", episode_id="e", labelled_at=NOON, message="no", conversation=talk, reading=read,
    )  # fmt: skip
    found = _message(asked)
    assert (found.id, found.episode, found.text, found.answer, found.mood) == ("o", "e", "no", answer, written)


def test_who_reads_follow_ups_is_the_classifier_and_the_judge_where_there_is_one(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_DATA", str(terminal.folder))
    monkeypatch.setenv("RATCHET_CONFIG", str(terminal.folder / "ratchet.toml"))
    assert [*_readers()] == ["classifier"]
    judge = '[labelling]\njudge_url = "http://127.0.0.1:9"\njudge_model = "judge"\n'
    (terminal.folder / "ratchet.toml").write_text(CONFIG + judge)
    assert [*_readers()] == ["judge", "classifier"]


class Running:
    """A book of cycles in which some policies have one that runs."""

    def __init__(self, *policies: str) -> None:
        self.policies = policies

    def running(self, policy: str) -> str | None:
        return policy if policy in self.policies else None


@pytest.mark.parametrize(("running", "busy"), [((), False), (("composer",), True), (("tab", "composer"), True), (("other",), False)])
def test_a_head_is_asked_for_by_the_deployment_s_own_books(terminal: Terminal, running: tuple[str, ...], busy: bool) -> None:
    release_room(terminal.engine)
    config = loop_config({"drafting": {"after_answers": 30}}).drafting
    beside = drafting_beside(terminal.settings, ("tab", "composer"), cast("CycleBook", Running(*running)), config=config, owner="me")
    assert (beside.is_busy(), beside.after_answers, tuple(beside.policies)) == (busy, 30, ("tab", "composer"))
    assert (beside.champion("tab"), beside.answers("tab", "v1")) == ("v1", 0)
    assert beside.command("tab") == [sys.executable, "-m", "pipelines", "model", "draft", "--policy", "tab"]
    with beside.term() as renew:
        assert renew is not None
        renew()
