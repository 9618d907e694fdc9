"""Follow-ups that people are asked to read: those the labeller's reader abstained on, and by lot some that it was sure of."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, select, update

from app.db.access.erasures import erase_actor
from app.db.engine import reading, writing
from app.db.learning import readings
from app.db.learning.labels import SqlLabels
from app.db.learning.readings import SqlReadings, drawn
from app.db.tables import audit, follow_up_readings, labels, observations, turns
from app.domain.errors import DoneAlready, NotFound, Refused
from app.domain.learning.readings import Agreed, Asked, Mood
from pipelines.commands.labels import labels as labels_command
from pipelines.labelling.follow_up.agreement import read_annotated
from pipelines.labelling.follow_up.classifier import Judgement
from pipelines.labelling.labeller import label_due
from pipelines.labelling.rule_set import parse_rule_set
from tests.fakes.served import at, erasure, observation, turn
from tests.integration.labelling.test_label_book import POLICY, Bench

TOML = 'name = "said"\n[[terms]]\nname = "follow_up"\nweight = 1.0\n'
SURE = {Mood.SATISFIED: 0.97, Mood.DISSATISFIED: 0.01, Mood.REFINEMENT: 0.01, Mood.NEUTRAL: 0.01}
TORN = {Mood.SATISFIED: 0.3, Mood.DISSATISFIED: 0.4, Mood.REFINEMENT: 0.2, Mood.NEUTRAL: 0.1}
LOT = next(f"lot-{n}" for n in range(10_000) if drawn(f"lot-{n}"))
PLAIN = next(f"plain-{n}" for n in range(10_000) if not drawn(f"plain-{n}"))


@pytest.fixture
def bench(engine: Engine) -> Bench:
    return Bench(engine)


def said(id_: str, of: str, words: str, **more: Any) -> Any:
    return observation(id_, of=of, name="follow_up", value=words, **more)


def label(bench: Bench, now: float, *, torn: tuple[str, ...] = ("hm",)) -> int:
    """With a reader that is torn about some words and sure of everything else."""

    def read(text: str, answer: str) -> Judgement:
        return Judgement(probabilities=TORN if text in torn else SURE, by="test")

    rules = parse_rule_set(TOML, read=read)
    return label_due(SqlLabels(bench.engine), policy="composer", config=POLICY, rule_set=rules, now=at(now), limit=100)


def rows(engine: Engine) -> list[tuple[Any, ...]]:
    r = follow_up_readings.c
    with reading(engine) as connection:
        query = select(r.inference_id, r.observation_id, r.leaned_to, r.unsure, r.mood).order_by(r.inference_id, r.observation_id)
        return [tuple(row) for row in connection.execute(query)]


def next_open(engine: Engine, **more: Any) -> Asked | None:
    with reading(engine) as connection:
        return readings.next_open(connection, "composer", before=more.get("before"))


def test_what_the_reader_abstains_on_is_asked_about_and_of_the_rest_a_lot(bench: Bench) -> None:
    bench.apply(turn("a"), said("o", "a", "hm"), turn("b"), said(LOT, "b", "great"), turn("c"), said(PLAIN, "c", "great"), turn("d"))
    assert label(bench, 60) == 4
    assert rows(bench.engine) == [("a", "o", "dissatisfied", True, None), ("b", LOT, "satisfied", False, None)]


def test_a_later_revision_asks_as_it_says_and_what_was_read_stays(bench: Bench) -> None:
    bench.apply(turn("a"), said("o", "a", "hm"), turn("b"), said("p", "b", "hm"))
    label(bench, 60)
    SqlReadings(bench.engine).say("composer", "a", "o", Mood.SATISFIED, by="user:ada", proven=True)
    with writing(bench.engine) as connection:
        connection.execute(update(turns).values(needs_relabel=True))
    assert label(bench, 70, torn=()) == 2
    assert rows(bench.engine) == [("a", "o", "dissatisfied", True, "satisfied")], "sure of it by now, and nobody had read it"


def test_the_message_comes_in_its_conversation_newest_first_and_later_goes_on(bench: Bench) -> None:
    bench.apply(
        turn("a", episode="e", finished=0), said("o1", "a", "no, shorter"), turn("b", episode="e", finished=10),
        said("o2", "b", "hm", occurred=12), turn("z", finished=1), said("o3", "z", "hm", occurred=3),
    )  # fmt: skip
    label(bench, 61)  # z's wait is over, b's is not
    label(bench, 71)
    newest = next_open(bench.engine)
    assert newest is not None
    assert (newest.message, newest.inference_id) == ("hm", "b")
    assert [(one.role, one.text) for one in newest.conversation] == [
        ("assistant", "answer a"), ("user", "no, shorter"), ("assistant", "answer b"),
    ]  # fmt: skip
    older = next_open(bench.engine, before=newest.labelled_at)
    assert older is not None
    assert older.inference_id == "z"
    assert next_open(bench.engine, before=older.labelled_at) is None


def test_what_is_said_of_a_whole_conversation_is_shown_after_its_last_answer(bench: Bench) -> None:
    bench.apply(turn("a", episode="e"), observation("o", episode="e", name="follow_up", value="hm"))
    label(bench, 60)
    found = next_open(bench.engine)
    assert found is not None
    assert (found.message, found.conversation[-1].text) == ("hm", "answer a")


def test_a_reading_is_stored_once_as_gold_and_nothing_is_paid_by_it(bench: Bench) -> None:
    bench.apply(turn("a"), said("o", "a", "hm"))
    label(bench, 60)
    book = SqlReadings(bench.engine)
    found = book.say("composer", "a", "o", Mood.DISSATISFIED, by="user:ada", proven=True)
    assert (found.mood, found.leaned_to, found.unsure) == (Mood.DISSATISFIED, Mood.DISSATISFIED, True)
    with pytest.raises(DoneAlready):
        book.say("composer", "a", "o", Mood.SATISFIED, by="user:ada", proven=True)
    with pytest.raises(Refused, match="user:ada read it as dissatisfied"):
        book.say("composer", "a", "o", Mood.SATISFIED, by="user:bob", proven=True)
    for policy, id_ in (("tab", "a"), ("composer", "b")):
        with pytest.raises(NotFound):
            book.say(policy, id_, "o", Mood.SATISFIED, by="user:bob", proven=True)
    with reading(bench.engine) as connection:
        (gold,) = connection.execute(select(observations).where(observations.c.source == "review")).all()
        (entry,) = connection.execute(select(audit).where(audit.c.action == "follow_up.read")).all()
        assert not connection.execute(select(turns.c.needs_relabel)).scalar_one()
    assert (gold.name, gold.inference_id, gold.actor, gold.tags) == ("follow_up_reading", "a", "user:ada", {"gold": "true"})
    assert gold.value == {"mood": "dissatisfied", "of": "o", "proven": True}
    assert (entry.actor, entry.subject) == ("user:ada", "a")
    with writing(bench.engine) as connection:
        connection.execute(update(turns).values(needs_relabel=True))
    assert label(bench, 70) == 1
    with reading(bench.engine) as connection:
        current = connection.execute(select(labels.c.reward, labels.c.exclusion).where(labels.c.current)).one()
    assert tuple(current) == (0.0, "no_signal")


def test_two_messages_of_a_turn_are_read_although_their_ids_begin_alike(bench: Bench) -> None:
    """An id from a client may have 190 characters, and one of ours has at most 200."""
    turned, ids = "t" * 36, [f"{'https://product.example/':x<189}{n}" for n in range(2)]
    bench.apply(turn(turned), *(said(id_, turned, "hm") for id_ in ids))
    label(bench, 60)
    for id_ in ids:
        SqlReadings(bench.engine).say("composer", turned, id_, Mood.NEUTRAL, by="user:ada", proven=True)
    with reading(bench.engine) as connection:
        gold = connection.execute(select(observations.c.value).where(observations.c.source == "review")).scalars()
        assert {value["of"] for value in gold} == {*ids}


def test_it_goes_with_the_person_it_is_about(bench: Bench) -> None:
    bench.apply(turn("a", actor="alice"), said("o", "a", "hm"), turn("b", actor="bob"), said("p", "b", "hm"))
    label(bench, 60)
    SqlReadings(bench.engine).say("composer", "a", "o", Mood.NEUTRAL, by="user:ada", proven=True)
    with writing(bench.engine) as connection:
        erase_actor(connection, erasure("alice"), now=at(100))
    assert [row[0] for row in rows(bench.engine)] == ["b"]
    with reading(bench.engine) as connection:
        assert connection.execute(select(observations.c.id).where(observations.c.source == "review")).all() == []


def test_people_and_the_reader_agree_as_they_do() -> None:
    """Of ten that it was sure of eight alike; chance agrees on 0.6·0.6 + 0.4·0.4 = 0.52, so kappa is (0.8 − 0.52) / 0.48."""
    counted = {
        ("satisfied", "satisfied", False): 5, ("neutral", "refinement", False): 3, ("satisfied", "neutral", False): 1,
        ("refinement", "satisfied", False): 1, ("unread", "satisfied", True): 2, ("dissatisfied", "dissatisfied", True): 1,
    }  # fmt: skip
    found = Agreed(counted=counted)
    assert (found.share(unsure=False), found.share(unsure=True)) == ((8, 10), (1, 3))
    assert found.kappa() == pytest.approx(0.28 / 0.48)
    assert Agreed(counted={}).kappa() is None


def test_what_people_read_is_written_for_the_comparison(sqlite_engine: Engine, sqlite_url: str, tmp_path: Path) -> None:
    bench = Bench(sqlite_engine)
    (tmp_path / "ratchet.toml").write_text('[policies.composer]\nmodel = "m"\nbase_name = "b"\nbase_model = "B"\n')
    environment = {"RATCHET_DATABASE_URL": sqlite_url, "RATCHET_DATA": str(tmp_path), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml")}
    words = ["reviewed", "composer", "--out", str(tmp_path / "read.jsonl")]
    none = CliRunner(env=environment).invoke(labels_command, words)
    assert (none.exit_code, "/console/readings" in none.output) == (1, True)
    bench.apply(turn("a"), said("o", "a", "hm"))
    label(bench, 60)
    SqlReadings(sqlite_engine).say("composer", "a", "o", Mood.DISSATISFIED, by="user:ada", proven=True)
    assert "1 follow-ups that people read" in CliRunner(env=environment).invoke(labels_command, words).output
    (read,) = read_annotated(tmp_path / "read.jsonl")
    assert (read.id, read.episode, read.text, read.answer, read.mood) == ("o", "episode-of-a", "hm", "answer a", "dissatisfied")
