"""Blind pairs and follow-ups to read: who is shown what, what reaches the jury, and that nothing is revealed before it was said."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.console.views import pairs, reading
from app.domain.errors import BadRequest, DoneAlready, NotFound, Refused
from app.domain.learning.readings import Agreed, Mood
from app.domain.learning.readings import Asked as Message
from app.domain.learning.readings import Reading as Read
from app.domain.people import Role
from app.domain.release.pairs import BlindPair, BlindVote, Choice, Favoured
from app.release.jury import Jury
from tests.fakes.sights import Canned, looking

AT = datetime(2026, 11, 24, 6, tzinfo=UTC)


def pair(id_: str = "p1", **changes: Any) -> BlindPair:
    values: dict[str, Any] = {
        "champion_score": 0.0, "candidate_score": 1.0, "release_id": "r1", "policy": "tab", "suite": "s", "task": "t", "cluster": "",
        "messages": [{"role": "user", "content": "hello"}], "champion_answer": "old", "candidate_answer": "new", "salt": "salt",
    }  # fmt: skip
    return BlindPair(id=id_, **{**values, **changes})


def vote(pair_id: str, voter: str = "user:ada", *, left: bool = True) -> BlindVote:
    return BlindVote(pair_id=pair_id, voter=voter, favoured=Favoured.CHAMPION, candidate_left=left, counted=True, proven=True, voted_at=AT)


def pairs_page(
    *roles: Role, kept: int = 3, votes: Any = (), actor: str = "user:ada", shown: BlindPair | None = None, **query: str
) -> dict[str, Any]:
    def found(id_: str) -> BlindPair:
        if id_ == "gone":
            raise NotFound("its words went")
        return shown or pair(id_)

    release = SimpleNamespace(id="r1", policy="tab", config={}, version_name="tab-v2")
    judging = ([f"p{n}" for n in range(kept)], list(votes))
    return pairs.page(looking(*roles, actor=actor, query=query, release=release, judging=judging, pair=found), "r1")


def test_a_pair_is_shown_to_who_may_judge_and_those_judged_are_counted() -> None:
    page = pairs_page()
    assert page["pair"]["id"] == "p0"
    assert {page["pair"]["left"], page["pair"]["right"]} == {"old", "new"}
    assert (page["allowed"], page["named"], page["kept"], page["mine"], page["revealed"]) == (True, True, 3, 0, None)
    assert pairs_page(votes=[vote("p0"), vote("p1", "user:bob")])["mine"] == 1
    idle = pairs_page(Role.VIEWER)
    assert (idle["pair"], idle["allowed"]) == (None, False)


@pytest.mark.parametrize(
    ("kept", "mine", "why"),
    [(0, 0, "No pairs were kept"), (2, 2, "You have judged all 2 pairs"), (2, 1, "You have judged 1 of 2 pairs. The rest waits")],
)
def test_why_no_pair_is_shown(kept: int, mine: int, why: str) -> None:
    assert pairs_page(kept=kept, votes=[vote(f"p{n}") for n in range(mine)])["why_none"].startswith(why)


@pytest.mark.parametrize("left", [True, False])
def test_a_pair_is_revealed_side_by_side_to_whoever_voted_on_it(*, left: bool) -> None:
    page = pairs_page(votes=[vote("p0", left=left), vote("p1", "user:bob")], seen="p0")
    sides = [("candidate", "tab-v2", "new"), ("champion", "the champion", "old")]
    assert page["revealed"]["sides"] == (sides if left else sides[::-1])
    assert (page["revealed"]["said"], page["revealed"]["counted"]) == ("the champion's", True)
    for seen in ("p1", "p2"):
        assert pairs_page(votes=[vote("p0"), vote("p1", "user:bob")], seen=seen)["revealed"] is None
    assert pairs_page(votes=[vote("gone")], seen="gone")["revealed"] is None


def test_on_an_open_deployment_votes_are_found_by_the_name_that_was_said_and_nobody_else_takes_another_one_s() -> None:
    votes = [vote("p0", "user:bob")]
    said = pairs_page(actor="anonymous", votes=votes, who="bob")
    assert (said["mine"], said["named"], said["who"]) == (1, False, "bob")
    assert (pairs_page(actor="anonymous", votes=votes)["mine"], pairs_page(votes=votes, who="bob")["mine"]) == (0, 0)
    assert pairs_page()["who"] == ""


def test_of_a_question_the_last_eight_messages_are_shown_and_of_a_text_twelve_thousand_characters() -> None:
    messages: list[dict[str, Any]] = [{"role": f"{n}{'r' * 40}", "content": f"m{n}"} for n in range(9)]
    messages[8]["content"] = [{"text": "a"}, {"image": 1}, "b"]
    messages[7]["content"] = {"odd": 1}
    shown = pairs_page(shown=pair(messages=messages))["pair"]["question"]
    assert [text for _, text in shown] == ["m1", "m2", "m3", "m4", "m5", "m6", "", "a\n\nb"]
    assert {len(role) for role, _ in shown} == {40}
    assert pairs.cut("x" * 12_000) == "x" * 12_000
    assert pairs.cut("x" * 12_001) == "x" * 12_000 + "\n[cut after 12,000 characters]"


class Juror:
    """Writes votes down; says of the second that it was there."""

    def __init__(self) -> None:
        self.took: list[tuple[Any, ...]] = []

    def vote(self, release_id: str, pair_id: str, choice: Choice, *, voter: str, shown_to: str, proven: bool) -> None:
        self.took.append((release_id, pair_id, choice, voter, shown_to, proven))
        if len(self.took) > 1:
            raise DoneAlready("it was")


@pytest.mark.parametrize(
    ("actor", "who", "voter", "more"), [("user:ada", "bob", "user:ada", ""), ("anonymous", "bob", "user:bob", "&who=bob")]
)
def test_a_vote_is_stored_with_who_it_was_and_whether_that_is_proven(actor: str, who: str, voter: str, more: str) -> None:
    jury, asked = Juror(), looking(actor=actor, release=SimpleNamespace(id="r1", policy="tab"))
    form = {"pair": "p" * 65, "choice": "left", "who": who}
    to = pairs.vote(asked, "r1", form, cast("Jury", jury))
    assert jury.took == [("r1", "p" * 64, Choice.LEFT, voter, actor, actor != "anonymous")]
    assert to == f"/console/pairs/r1?policy=tab&seen={'p' * 64}{more}"
    assert pairs.vote(asked, "r1", form, cast("Jury", jury)) == f"{to}&done=again"


def test_no_vote_is_taken_without_the_right_or_a_choice() -> None:
    jury = Juror()
    with pytest.raises(Refused, match="ada may not judge answers: admin, operator may"):
        pairs.vote(looking(Role.VIEWER), "r1", {"pair": "p", "choice": "left"}, cast("Jury", jury))
    for form in ({"pair": "p"}, {"pair": "p", "choice": "middle"}):
        with pytest.raises(BadRequest, match="there is no choice") as refused:
            pairs.vote(looking(release=SimpleNamespace(id="r1", policy="tab")), "r1", form, cast("Jury", jury))
        assert refused.value.param == "choice"
    assert jury.took == []


def message(read: Read | None = None) -> Message:
    return Message(inference_id="i1", observation_id="o1", episode_id="e", labelled_at=AT, message="hm", conversation=(), reading=read)


def readings_page(*roles: Role, waits: Message | None = None, about: Any = None, **query: str) -> tuple[dict[str, Any], Canned]:
    counted = {("satisfied", "satisfied", True): 5, ("satisfied", "dissatisfied", False): 1}
    sight = Canned(next_to_read=waits, asked_about=about, agreed=Agreed(counted=counted), to_read=4)
    return reading.page(looking(*roles, query=query, sight=sight)), sight


def test_a_follow_up_is_shown_to_who_may_judge_with_the_place_where_older_ones_begin() -> None:
    page, _ = readings_page(waits=message())
    assert page["later"] == "/console/readings?policy=tab&before=2026-11-24T06%3A00%3A00%2B00%3A00"
    assert (page["unsure"], page["sure"], page["waiting"], page["named"], page["who"]) == ((5, 5), (0, 1), 4, True, "")
    assert readings_page(who="bob")[0]["who"] == "bob"
    empty, _ = readings_page()
    assert (empty["later"], empty["message"], empty["seen"]) == ("", None, None)
    idle, sight = readings_page(Role.VIEWER, waits=message(), about=message(), seen="i1:o1")
    assert (idle["message"], idle["allowed"], idle["seen"]) == (None, False, None)
    assert {name for name, _, _ in sight.heard} == {"agreed", "to_read"}


def test_what_the_reader_had_made_of_a_message_is_told_once_it_was_read() -> None:
    read = message(Read(mood=Mood.NEUTRAL, leaned_to=None, unsure=True, by="user:ada", at=AT))
    page, sight = readings_page(about=read, seen="i1:o1:x")
    assert page["seen"] == read
    assert ("asked_about", ("tab", "i1", "o1:x"), {}) in sight.heard
    assert readings_page(about=message(), seen="i1:o1")[0]["seen"] is None, "not read yet"
    for half in ("i1:", ":o1", "i1", ""):
        assert readings_page(about=read, seen=half)[0]["seen"] is None
    _, sight = readings_page(about=read, seen=f"i1:{'o' * 300}")
    assert ("asked_about", ("tab", "i1", "o" * 297), {}) in sight.heard


def test_the_queue_goes_on_before_a_moment_with_a_zone() -> None:
    _, sight = readings_page(before="2026-11-24T06:00:00+00:00")
    assert ("next_to_read", ("tab",), {"before": AT}) in sight.heard
    for before, why in (("yesterday", "is no place in the queue"), ("2026-11-24T06:00:00", "has no time zone")):
        with pytest.raises(BadRequest, match=why) as refused:
            readings_page(before=before)
        assert refused.value.param == "before"


class Readings:
    """Writes down what is said; of the second that it was there."""

    def __init__(self) -> None:
        self.took: list[tuple[Any, ...]] = []

    def say(self, policy: str, inference_id: str, observation_id: str, mood: Mood, *, by: str, proven: bool) -> Read:
        self.took.append((policy, inference_id, observation_id, mood, by, proven))
        if len(self.took) > 1:
            raise DoneAlready("it was")
        return Read(mood=mood, leaned_to=None, unsure=True, by=by, at=AT)


@pytest.mark.parametrize(("actor", "by", "more"), [("user:ada", "user:ada", ""), ("anonymous", "user:bob", "&who=bob")])
def test_a_reading_is_stored_once_with_who_it_was_and_whether_that_is_proven(actor: str, by: str, more: str) -> None:
    readings, asked = Readings(), looking(actor=actor)
    form = {"turn": "t" * 65, "message": "m1", "mood": "neutral", "who": "bob"}
    to = reading.say(asked, form, readings)
    assert readings.took == [("tab", "t" * 64, "m1", Mood.NEUTRAL, by, actor != "anonymous")]
    assert to == f"/console/readings?policy=tab&seen={'t' * 64}%3Am1{more}"
    assert reading.say(asked, form, readings) == f"{to}&done=again"


@pytest.mark.parametrize(
    ("actor", "role", "mood", "error", "why"),
    [
        ("user:ada", Role.VIEWER, "neutral", Refused, "ada may not read follow-ups: admin, operator may"),
        ("user:deploy-bot", Role.ADMIN, "neutral", Refused, "that takes a person"),
        ("user:ada", Role.ADMIN, "furious", BadRequest, "there is no reading 'furious'"),
    ],
)  # fmt: skip
def test_no_reading_is_taken_of_a_program_or_without_the_right_or_a_mood(
    actor: str, role: Role, mood: str, error: type[Exception], why: str
) -> None:
    readings = Readings()
    with pytest.raises(error, match=why):
        reading.say(looking(role, actor=actor), {"turn": "t", "message": "m", "mood": mood}, readings)
    assert readings.took == []
