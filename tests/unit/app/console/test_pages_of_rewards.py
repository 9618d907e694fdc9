"""Labels, rule sets and replays: what the pages make of them, word by word and at every bound."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.console.views import replays, rewards
from app.domain.errors import NotFound
from app.domain.ids import utc_now
from app.domain.learning.readings import Agreed
from app.domain.learning.rule_sets import AskedReplay, Mover, Proposal, Replay, Shift
from app.domain.people import Role
from app.domain.release.sums import Sums
from app.domain.views.pages import Inspected, LabelLine, Page, RuleSetInfo
from tests.fakes.sights import Canned, looking, texts

AT = datetime(2026, 11, 24, 6, tzinfo=UTC)
TOLD = "2026-11-24 06:00:00"


def sums(*values: float) -> Sums:
    return Sums(
        n=len(values), total=sum(round(v * 1e6) for v in values), squares=sum(round(v * v * 1e6) for v in values),
        negative=sum(v < 0 for v in values),
    )  # fmt: skip


def line(id_: str = "i1", **changes: Any) -> LabelLine:
    values: dict[str, Any] = {
        "revision": 1, "version": "v1", "segment": "", "reward": 0.5, "exclusion": None, "terms": (), "labelled_at": AT, "batch_id": None,
    }  # fmt: skip
    return LabelLine(inference_id=id_, **{**values, **changes})


def rule_set(digest: str, *lines: str) -> RuleSetInfo:
    return RuleSetInfo(digest=digest, name=f"set {digest}", activated_by="user:ada", activated_at=AT, toml="\n".join(lines))


def rewards_page(*roles: Role, totals: dict[str, Sums] | None = None, sets: Any = (), **query: str) -> tuple[dict[str, Any], Canned]:
    labels = Page(rows=(line(exclusion="late", segment="long", revision=2), line("i2")), after="x")
    sight = Canned(
        rule_sets=list(sets), totals=totals or {}, labels=labels, names={"v1": "tab-v1"}, to_read=3, replays=[], proposals=[],
        agreed=Agreed(counted={("satisfied", "satisfied", True): 5, ("satisfied", "dissatisfied", False): 1}),
    )  # fmt: skip
    return rewards.rewards(looking(*roles, query=query, sight=sight)), sight


def test_rewards_are_those_of_the_last_seven_days() -> None:
    _, sight = rewards_page()
    (since,) = [named["since"] for name, _, named in sight.heard if name == "totals"]
    assert abs(utc_now() - since - timedelta(days=7)) < timedelta(minutes=1)


def test_terms_and_what_is_left_out_are_told_apart_and_the_largest_share_is_first() -> None:
    totals = {
        "term:edit": sums(0.5, -0.5, 1.0, -1.0), "reward": sums(*[0.25] * 8), "excluded:late": sums(0.0),
        "excluded:early": sums(*[0.0] * 3), "excluded:rude": sums(0.0),
    }  # fmt: skip
    page, _ = rewards_page(totals=totals)
    assert [(row[0], row[1], row[3]) for row in texts(page["sheets"]["terms"])] == [("reward", "8", "0"), ("edit", "4", "0.5")]
    assert texts(page["sheets"]["excluded"]) == [["early", "3", "0.375"], ["late", "1", "0.125"], ["rude", "1", "0.125"]]
    assert page["sheets"]["excluded"].rows[0][0].href == "/console/rewards?policy=tab&exclusion=early#labels"
    third, _ = rewards_page(totals={"reward": sums(*[0.0] * 7), "excluded:late": sums(0.0)})
    assert third["sheets"]["excluded"].rows[0][2].value == 0.1429, "four digits"
    none, _ = rewards_page(totals={"excluded:late": sums(0.0)})
    assert texts(none["sheets"]["excluded"]) == [["late", "1", "–"]]


def test_labels_are_those_of_an_exclusion_that_there_is() -> None:
    page, sight = rewards_page(exclusion="actor_cap", after="k")
    assert page["exclusion"] == "actor_cap"
    assert ("labels", ("tab",), {"after": "k", "exclusion": "actor_cap"}) in sight.heard
    other, sight = rewards_page(exclusion="lazy")
    assert other["exclusion"] is None
    assert ("labels", ("tab",), {"after": None, "exclusion": None}) in sight.heard
    assert [row[2:] for row in texts(page["sheets"]["labels"])] == [
        ["0.5", "late", "tab-v1", "long", "2"], ["0.5", "", "tab-v1", "none", "1"],
    ]  # fmt: skip


def test_what_the_reader_was_sure_of_is_what_agreement_is_told_of() -> None:
    page, _ = rewards_page()
    assert (page["sure"], page["kappa"]) == ((0, 1), None)
    assert page["may_change"] is True
    assert rewards_page(Role.OPERATOR)[0]["may_change"] is False


def test_rule_sets_are_compared_line_by_line_with_two_lines_around() -> None:
    one, two = rule_set("a", "1", "2", "3", "4", "", "x"), rule_set("b", "1", "2", "3", "4", "", "y")
    page, _ = rewards_page(sets=[one, two], a="a", b="b")
    assert page["diff"] == [("@", "@ -4,3 +4,3 @@"), (" ", "4"), (" ", ""), ("-", "x"), ("+", "y")]
    assert (page["a"], page["b"]) == ("a", "b")
    for a, b in (("", ""), ("a", ""), ("", "b"), ("a", "c"), ("c", "b")):
        assert rewards_page(sets=[one, two], a=a, b=b)[0]["diff"] == []
    long, _ = rewards_page(sets=[rule_set("a"), rule_set("b", *["x"] * 3_000)], a="a", b="b")
    assert len(long["diff"]) == 1_998


def turn(**changes: Any) -> Inspected:
    values: dict[str, Any] = {
        "inference_id": "i1", "episode_id": "e", "version": "v1", "policy": "tab", "arm": "champion", "segment": "", "started_at": AT,
        "finished_at": AT + timedelta(seconds=1), "finish_reason": "stop", "completion": "", "erased_at": None, "revisions": (),
        "observed": (),
    }  # fmt: skip
    return Inspected(**{**values, **changes})


def label_page(found: Inspected | None) -> dict[str, Any]:
    return rewards.label(looking(inspect=found, names={"v1": "tab-v1"}), "i1")


def test_a_turn_s_time_line_is_in_order_with_all_that_happened_to_it() -> None:
    def at(seconds: int) -> datetime:
        return AT + timedelta(seconds=seconds)

    seen = {"name": "rating", "value": -1, "occurred_at": at(5), "received_at": at(6), "status": "joined", "retracted_at": at(9)}
    later = {**seen, "value": 1, "occurred_at": at(4), "retracted_at": None}
    newest = line(revision=3, labelled_at=at(12), exclusion="late", batch_id="b1", reward=0.123456)
    others = (line(revision=2, labelled_at=at(11), batch_id="b1"), line(revision=1, labelled_at=at(10)))
    page = label_page(turn(observed=(seen, later), revisions=(newest, *others), erased_at=at(20)))
    assert [[row[0][-2:], *row[1:]] for row in texts(page["sheets"]["timeline"])] == [
        ["00", "asked", "", ""], ["01", "answered", "stop", ""], ["04", "rating", "1", "joined, received 06:00:06"],
        ["05", "rating", "-1", "joined, received 06:00:06"], ["09", "rating taken back", "-1", ""],
        ["10", "label, revision 1", "0.5", ""], ["11", "label, revision 2", "0.5", "in batch b1"],
        ["12", "label, revision 3", "0.1235", "left out: late"], ["20", "erased", "", "its person was forgotten"],
    ]  # fmt: skip
    assert page["current"] == newest
    bare = label_page(turn())
    assert bare["current"] is None
    assert len(bare["sheets"]["timeline"].rows) == 2
    assert texts(bare["sheets"]["terms"]) == []


def test_each_term_says_its_value_or_why_it_has_none() -> None:
    terms = ({"name": "edit", "value": 0.5, "weight": 2.0, "detail": {"kept": 1}}, {"name": "tool", "abstained": "none", "credit": "half"})
    page = label_page(turn(revisions=(line(terms=terms),)))
    assert texts(page["sheets"]["terms"]) == [["edit", "0.5", "2", "", "", "{'kept': 1}"], ["tool", "–", "–", "none", "half", ""]]


@pytest.mark.parametrize("found", [None, turn(policy="composer")])
def test_a_turn_of_another_policy_is_not_there(found: Inspected | None) -> None:
    with pytest.raises(NotFound, match="no turn i1 of policy tab"):
        label_page(found)


OUTCOME = Replay(
    turns=40, changed=5, before=(-1.0, 0.0, 0.25, 0.5, 1.0), after=(-0.5, 0.0, 0.5, 0.5, 0.75), name="gentle",
    segments={"long": (3, 0.5, 0.25), "": (1, 0.0, 1.0)}, excluded={"late": 1, "early": 3, "rude": 1},
    terms={"edit": Shift(spoke_before=10, mean_before=0.5, spoke_after=20, mean_after=0.75)},
    movers=(
        Mover(inference_id="i1", segment="long", before=0.5, after=0.25, paid_before={"tool": 1.0, "edit": -0.5}, paid_after={}),
        Mover(inference_id="i2", segment="", before=0.0, after=0.0, paid_before={}, paid_after={}),
    ),
)  # fmt: skip


def asked_replay(**changes: Any) -> AskedReplay:
    return AskedReplay(id="q1", policy="tab", toml="", asked_by="user:ada", asked_at=AT, **changes)


def test_a_replay_says_what_would_move_and_by_how_much() -> None:
    page = replays.replay(looking(replay=asked_replay(settled_at=AT, outcome=OUTCOME)), "q1")
    assert page["verdict"] == ("go", "5 of the newest 40 labels would move (12.5 %).")
    assert page["title"] == "Replay of gentle"
    sheets = {name: texts(sheet) for name, sheet in page["sheets"].items()}
    assert sheets["terms"] == [["edit", "10", "+0.500", "20", "+0.750", "+0.250"]], "(20 x 0.75 - 10 x 0.5) / 40"
    assert sheets["movers"] == [
        ["i1", "long", "+0.500", "+0.250", "-0.250", "edit -0.50, tool +1.00", "nothing spoke"],
        ["i2", "none", "+0.000", "+0.000", "+0.000", "nothing spoke", "nothing spoke"],
    ]
    assert [row[0] for row in sheets["quantiles"]] == ["lowest", "25 %", "median", "75 %", "highest"]
    assert sheets["quantiles"][0][1:] == ["-1.000", "-0.500"]
    assert sheets["segments"] == [["long", "3", "+0.500", "+0.250", "-0.250"], ["none", "1", "+0.000", "+1.000", "+1.000"]]
    assert sheets["excluded"] == [["early", "3"], ["late", "1"], ["rude", "1"]], "the most first, then as they came"


def test_two_hundred_segments_of_a_replay_are_shown_and_none_where_there_was_no_label() -> None:
    many = {f"s{n:03}": (1, 0.0, 0.0) for n in range(201)}
    outcome = Replay(turns=0, changed=0, before=(), after=(), segments=many, terms={}, movers=(), excluded={}, name="n")
    page = replays.replay(looking(replay=asked_replay(outcome=outcome)), "q1")
    assert [row[0] for row in texts(page["sheets"]["segments"])][-1] == "s199"
    assert texts(page["sheets"]["quantiles"]) == []
    assert page["verdict"] == ("wait", "There is no label to replay it over yet.")


def test_a_replay_waits_is_refused_or_is_not_there() -> None:
    waiting = replays.replay(looking(Role.VIEWER, replay=asked_replay()), "q1")
    assert (waiting["verdict"][0], waiting["title"], waiting["sheets"], waiting["may_propose"]) == ("wait", "Replay", {}, False)
    refused = replays.replay(looking(replay=asked_replay(refused="no such term")), "q1")
    assert refused["verdict"] == ("stop", "The labeller cannot score by it: no such term")
    assert refused["may_propose"] is True
    with pytest.raises(NotFound, match="no replay q1 of policy tab"):
        replays.replay(looking(replay=None), "q1")


def test_replays_and_proposals_say_how_far_they_are() -> None:
    some = [asked_replay(), asked_replay(settled_at=AT, refused="no"), asked_replay(settled_at=AT, outcome=OUTCOME)]
    assert [row[1:] for row in texts(replays.replay_sheet(looking(), some))] == [
        ["user:ada", "waiting", ""], ["user:ada", "refused", "no"], ["user:ada", "replayed", ""],
    ]  # fmt: skip
    mine = Proposal(id="p", policy="tab", toml="", proposed_by="user:ada", proposed_at=AT)
    taken = Proposal(id="p", policy="tab", toml="", proposed_by="user:ada", proposed_at=AT, settled_at=AT, digest="d1")
    gone = Proposal(id="p", policy="tab", toml="", proposed_by="user:ada", proposed_at=AT, settled_at=AT, refused="no")
    assert [row[2:] for row in texts(replays.proposal_sheet([mine, taken, gone]))] == [
        ["waiting", "", ""], ["in force", "d1", ""], ["refused", "", "no"],
    ]  # fmt: skip
