"""Whether whoever reads follow-ups reads them as people do, and a classifier made of a judge's readings."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from app.domain.errors import BadConfig, BadRequest
from app.domain.learning.rewards import Labelled
from pipelines.labelling.follow_up.agreement import (
    Message,
    agreement,
    apart,
    distil,
    draw,
    kappa,
    messages_of,
    open_model,
    read_annotated,
    write_messages,
)
from pipelines.labelling.follow_up.classifier import Judgement, Mood, Unread
from tests.fakes.labelling import due, observed

ANGRY, GLAD, NEXT = Mood.DISSATISFIED, Mood.SATISFIED, Mood.NEUTRAL


def reader(text: str, answer: str) -> Judgement:
    """Sure of one word: whoever writes "bad" is dissatisfied, "good" satisfied, and "?" cannot be read."""
    if text == "?":
        raise Unread("no")
    mood = ANGRY if "bad" in text else GLAD if "good" in text else NEXT
    return Judgement(probabilities={m: 0.97 if m is mood else 0.01 for m in Mood}, by="test")


def message(number: int, text: str, mood: str = "") -> Message:
    return Message(id=f"m{number}", episode=f"e{number}", text=text, answer="answer", mood=mood)


def test_kappa_by_hand() -> None:
    # 10 pairs, 7 alike: observed .7; people say a 6 and b 4 times, the reader 5 and 5: expected (30 + 20)/100 = .5; (.7 − .5)/.5 = .4
    pairs = [("a", "a")] * 4 + [("b", "b")] * 3 + [("a", "b")] * 2 + [("b", "a")]
    assert kappa(pairs) == pytest.approx(0.4)
    assert kappa([("a", "a")] * 3) == 1.0
    assert kappa([("a", "b"), ("b", "a")]) == -1.0


def test_agreement_counts_what_is_punished_and_what_could_not_be_read() -> None:
    said = [(0, "bad", "dissatisfied"), (1, "bad", "neutral"), (2, "good", "satisfied"), (3, "so so", "dissatisfied"), (4, "?", "neutral")]
    found = agreement([message(*one) for one in said], reader)
    assert (found.messages, found.unread) == (4, 1)
    assert (found.precision_punished, found.recall_punished) == (0.5, 0.5)
    assert found.confusion == {"dissatisfied": {"dissatisfied": 1, "other": 1}, "other": {"dissatisfied": 1}, "satisfied": {"satisfied": 1}}
    assert found.interval[0] <= found.kappa <= found.interval[1]


def test_messages_of_one_conversation_are_no_witnesses_of_each_other() -> None:
    """Ten messages of a conversation that are read alike say as much as one: the interval is as wide as with one of each."""
    said = [("bad", "dissatisfied"), ("good", "satisfied"), ("so so", "dissatisfied"), ("bad", "neutral")] * 8
    once = agreement([message(number, *one) for number, one in enumerate(said)], reader)
    often = agreement([replace(message(n, *one), id=f"m{n}/{again}") for n, one in enumerate(said) for again in range(10)], reader)
    assert (often.messages, often.kappa) == (320, pytest.approx(once.kappa))
    assert often.interval == pytest.approx(once.interval)
    apart = agreement([message(number, *one) for number, one in enumerate(said * 10)], reader)
    assert apart.interval[1] - apart.interval[0] < 0.5 * (once.interval[1] - once.interval[0])


def test_follow_ups_are_drawn_by_lot_and_once_each(tmp_path: Path) -> None:
    one, two = observed("follow_up", "bad"), observed("follow_up", "good", id_="p")
    turns = [
        Labelled(due(one, two, observed("rating", True, id_="r")), 0.0, ()),
        Labelled(due(one), 0.0, ()),
        Labelled(due(observed("follow_up", "x", id_="q"), erased=True), 0.0, ()),
    ]
    found = messages_of(turns)
    assert {m.text for m in found} == {"bad", "good"}
    many = [message(number, "x") for number in range(50)]
    assert draw(many, 10) == draw(list(reversed(many)), 10)
    assert draw([*many, message(99, "later")], 50)[:1] in ([draw(many, 1)[0]], [message(99, "later")])


def test_a_classifier_is_made_of_other_conversations_than_people_read() -> None:
    many = [replace(message(number, "x"), episode=f"e{number % 20}") for number in range(100)]
    people, learned = draw(many, 10), apart(many, 60, sampled=10)
    assert not {m.episode for m in people} & {m.episode for m in learned}
    theirs = len({m.episode for m in people})
    assert len(learned) == min(60, 5 * (20 - theirs)), "all of the other conversations, as far as they are wanted"
    assert apart(many, 100, sampled=0) == draw(many, 100)


def test_an_annotated_file_is_read_back_and_faults_are_named(tmp_path: Path) -> None:
    file = tmp_path / "sample.jsonl"
    write_messages([message(0, "bad", "dissatisfied"), message(1, "later")], file)
    assert [m.id for m in read_annotated(file)] == ["m0"]
    write_messages([message(0, "bad", "angry")], file)
    with pytest.raises(BadRequest, match="line 1: mood is 'angry': write one of dissatisfied, neutral"):
        read_annotated(file)
    write_messages([message(0, "bad")], file)
    with pytest.raises(BadRequest, match="no line has a mood"):
        read_annotated(file)
    file.write_text("{")
    with pytest.raises(BadRequest, match="line 1"):
        read_annotated(file)


def test_a_message_with_what_else_ends_a_line_is_one_line_of_the_file(tmp_path: Path) -> None:
    said = message(0, "one\u2028two\u2029three\x85four", "dissatisfied")
    file = tmp_path / "sample.jsonl"
    file.write_bytes(msgspec.json.encode(said) + b"\r\n\n")
    assert read_annotated(file) == [said]
    file.write_bytes(msgspec.json.encode(said) + b'\n{"id": "\xff"}\n')
    with pytest.raises(BadRequest, match="line 2: "):
        read_annotated(file)


def test_a_classifier_is_distilled_and_reads_as_the_judge_does(tmp_path: Path) -> None:
    words = ("bad thing", "good thing", "some thing", "other thing")

    def judge(text: str, answer: str) -> Judgement:
        found = reader(text, answer)
        return found if "some" not in text else Judgement(probabilities={m: float(m is Mood.REFINEMENT) for m in Mood}, by="judge")

    own = [message(number, f"{words[number % 4]} {number}") for number in range(300)]
    file = tmp_path / "model.json"
    file.write_bytes(msgspec.json.encode(distil(own, judge)))
    read = open_model(file)
    assert [read(f"{word} 999", "answer").mood for word in words] == [ANGRY, GLAD, Mood.REFINEMENT, NEXT]
    assert read("bad", "").by.startswith("classifier:")


def test_too_few_messages_and_files_of_something_else_are_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"the judge read 20 follow-ups, and of some kinds too few .* a classifier needs 300"):
        distil([message(number, "bad") for number in range(20)], reader)
    file = tmp_path / "model.json"
    file.write_text("{}")
    with pytest.raises(BadConfig, match=r"follow_up_model: .*make one with `ratchet labels distil`"):
        open_model(file)


def test_a_classifier_needs_three_hundred_messages_and_ten_of_each_kind() -> None:
    def judge(text: str, answer: str) -> Judgement:
        found = reader(text, answer)
        return found if "some" not in text else Judgement(probabilities={m: float(m is Mood.REFINEMENT) for m in Mood}, by="judge")

    even = [message(number, f"{('bad', 'good', 'some', 'other')[number % 4]} {number}") for number in range(299)]
    with pytest.raises(BadConfig, match=r"the judge read 299 follow-ups: a classifier needs 300, 10 of each kind"):
        distil([*even, message(299, "?")], judge)
    rare = [message(number, "some" if number < 9 else ("bad", "good", "other")[number % 3]) for number in range(320)]
    with pytest.raises(BadConfig, match=r"too few \(9 refinement\)"):
        distil(rare, judge)


def test_nothing_punished_and_nobody_dissatisfied_have_no_share() -> None:
    quiet = agreement([message(0, "so", "neutral"), message(1, "good", "satisfied")], reader)
    assert (quiet.precision_punished, quiet.recall_punished, quiet.kappa, quiet.unread) == (None, None, 1.0, 0)
    with pytest.raises(BadRequest, match="none of the messages could be read"):
        agreement([message(0, "?", "neutral")], reader)


@pytest.mark.parametrize(("sure", "punished"), [(0.6, 1.0), (0.599, None)])
def test_sixty_in_a_hundred_are_sure_enough_to_punish(sure: float, punished: float | None) -> None:
    def read(text: str, answer: str) -> Judgement:
        rest = (1.0 - sure) / 3
        return Judgement(probabilities={m: sure if m is ANGRY else rest for m in Mood}, by="test")

    assert agreement([message(0, "bad", "dissatisfied")], read).precision_punished == punished


def test_the_interval_of_an_agreement_leaves_out_a_fortieth_at_each_end() -> None:
    """Of two conversations, one read alike and one not, a quarter of the draws has the one twice, and a quarter the other."""
    found = agreement([message(0, "bad", "dissatisfied"), message(1, "good", "dissatisfied")], reader)
    assert found.interval == (0.0, 1.0)
    # one of forty that is read wrongly: it is in 63 % of the draws, so an end is with it and the other one without
    many = [message(n, "good" if n % 2 else "bad", "satisfied" if n % 2 else "dissatisfied") for n in range(39)]
    low, high = agreement([*many, message(39, "bad", "satisfied")], reader).interval
    assert (low < 0.95, high) == (True, 1.0)
