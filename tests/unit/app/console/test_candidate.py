"""A candidate's page in pieces: its sentence, its buttons, its curves; and how versions descend from each other."""

from datetime import UTC, datetime, timedelta
from typing import Any, cast
from xml.etree import ElementTree

import pytest

from app.console.views.asked import Asked
from app.console.views.candidate import acts, evidence_chart, tiles, verdict, word_sheet
from app.console.views.figures import effect_sheet, gate_sheet, health_sheet
from app.console.views.inbox import items, who_can
from app.console.views.tables import figures, measure_cell, role_of
from app.console.views.versions import tree
from app.domain.people import Person, Role, Visitor, actions_of
from app.domain.release.gates import GateName
from app.domain.release.releases import IN_FLIGHT, Approval, Pointer, Release, ReleaseState
from app.domain.release.sums import Sums
from app.domain.views.measures import Measure
from app.domain.views.pages import Needs, Sight, VersionInfo
from app.domain.views.rows import GateRow

S = ReleaseState
AT = datetime(2026, 11, 24, 6, tzinfo=UTC)
HOUR = timedelta(hours=1)


def release(state: ReleaseState, **changes: Any) -> Release:
    values: dict[str, Any] = {
        "id": "r2", "policy": "tab", "digest": "v2", "version_name": "tab-v2", "generation": 4, "stage": 1, "champion_digest": "v1",
        "champion_generation": 1, "evidence_digest": None, "reason": None, "created_at": AT, "changed_at": AT, "initiator": "user:ini",
    }  # fmt: skip
    return Release(state=state, **{**values, **changes})


def gate(name: GateName = GateName.CANARY, verdict: str = "pass", *, hours: int = 0, reason: str = "as good", **evidence: Any) -> GateRow:
    return GateRow(gate=name, verdict=verdict, action=None, reason=reason, decided_at=AT + hours * HOUR, evidence=evidence)


@pytest.mark.parametrize(
    ("state", "changes", "gates", "colour", "words"),
    [
        (S.JUDGING, {}, [], "wait", "Nobody is served by it. Judged by people, not by traffic."),
        (S.JUDGING, {"reason": "sixty votes are needed"}, [], "wait", "Nobody is served by it. Sixty votes are needed."),
        (S.READY, {"approvals_needed": 2}, [], "go", "Safe by every gate: needs 1 more approval, –."),
        (
            S.READY, {"approvals_needed": 3, "config": {"by_people": "small"}}, [], "go",
            "Passed by people's blind votes, judged by people, not by traffic: needs 2 more approvals, –.",
        ),
        (S.READY, {}, [], "go", "Safe by every gate: needs 0 more approvals, –."),
        (S.APPROVED, {}, [], "go", "Approved: the pointer moves"), (S.PROMOTING, {}, [], "go", "Approved: the pointer moves"),
        (S.CHAMPION, {}, [], "go", "Live since 2026-11-24 06:00:00 UTC"),
        (S.CANARY, {}, [], "wait", "Under test at stage 1: no decision yet."),
        (S.CANARY, {}, [gate(reason="first"), gate(reason="last")], "wait", "Under test at stage 1: last."),
        (S.QUEUED, {}, [], "wait", "Before its canary: it waits."), (S.OFFLINE, {"reason": "busy"}, [], "wait", "Before its canary: busy."),
        (
            S.TRAINED, {"reason": "busy"}, [gate(GateName.OFFLINE, "fail"), gate(GateName.LICENCE, "fail"), gate()], "wait",
            "Before its canary: offline suites, licence failed.",
        ),
        (S.SUPERSEDED, {}, [], "go", "Was champion; a newer one took over."),
        (S.ROLLED_BACK, {"reason": "rude"}, [], "stop", "Rolled back: rude."),
        (S.REJECTED, {}, [], "stop", "Rejected: no reason given."),
    ],
)  # fmt: skip
def test_a_candidate_is_told_in_one_sentence(
    state: ReleaseState, changes: dict[str, Any], gates: list[GateRow], colour: str, words: str
) -> None:
    found = verdict(release(state, **changes), gates, {"user:ada"})
    assert (found[0], found[1][: len(words)]) == (colour, words)


@pytest.mark.parametrize("state", sorted(ReleaseState))
def test_the_buttons_are_those_that_make_sense(state: ReleaseState) -> None:
    found = [act for act, _ in acts(release(state))]
    if state is S.READY:
        assert found == ["approve", "reject", "abort"]
    elif state in (S.CHAMPION, S.SUPERSEDED):
        assert found == ["roll_back"]
    else:
        assert found == (["reject", "abort"] if state in IN_FLIGHT else [])


def of(*values: float) -> Sums:
    return Sums(n=len(values), total=sum(round(v * 1e6) for v in values), squares=sum(round(v * v * 1e6) for v in values))


def test_a_tile_adds_up_the_hours_in_which_both_were_served() -> None:
    course = {
        ("v2", "reward", AT): of(0.5), ("v1", "reward", AT): of(0.0, 0.25),
        ("v2", "reward", AT + HOUR): of(1.0), ("v1", "reward", AT + HOUR): of(0.25),
        ("v2", "reward", AT + 2 * HOUR): of(9.0),
        ("v2", "reward", AT + 3 * HOUR): of(0.0), ("v1", "reward", AT + 3 * HOUR): of(0.5, 0.5),
        ("v2", "term:tool_call", AT): of(1.0, 0.0), ("v1", "term:tool_call", AT): of(0.0, 1.0), ("v1", "alone", AT): of(1.0, 1.0),
    }  # fmt: skip
    first, second = tiles(release(S.CANARY), course)
    assert (first["title"], second["title"]) == ("reward", "tool call")
    last, half = first["last"], sum(one.sequence_half_width(alpha=0.025) for one in (of(0.5, 1.0, 0.0), of(0.0, 0.25, 0.25, 0.5, 0.5)))
    assert (last.at, last.value) == (AT + 3 * HOUR, pytest.approx(0.5 - 0.3))
    assert (last.low, last.high) == (pytest.approx(0.2 - half), pytest.approx(0.2 + half))
    drawn = ElementTree.fromstring(first["chart"])
    points = [e.get("points") or "" for e in drawn.iter("polyline")]
    assert [len(one.split()) for one in points] == [2], "not the hour with one value, nor that of the candidate alone"
    assert [e.get("class") for e in drawn.iter("polyline")] == ["line s0 dashed"]
    assert [e for e in drawn.iter("line") if e.get("class") == "threshold"]
    assert tiles(release(S.CANARY), {}) == []


def test_evidence_of_harm_is_drawn_against_what_stops_it() -> None:
    decisions = [
        gate(harm={"log_e": 1.0, "needed": 3.0}), gate(hours=1), gate(hours=2, harm={"log_e": 2, "needed": 4.0}),
        gate(hours=3, harm={"log_e": None}),
    ]  # fmt: skip
    drawn = ElementTree.fromstring(evidence_chart(decisions))
    assert drawn.get("aria-label") == "evidence of harm, log E: log E of harm 2"
    assert [len((e.get("points") or "").split()) for e in drawn.iter("polyline")] == [2]
    (rule,) = [e for e in drawn.iter("line") if e.get("class") == "threshold"]
    assert rule.get("y1") == "16.3", "4, the newest, above everything from 0 on"
    assert evidence_chart([]) == ""


def version(name: str, parent: str | None) -> VersionInfo:
    return VersionInfo(digest=name, name=name, kind="full", parent=parent, step=0, created_at=AT, licence="", base_model="")


def test_versions_stand_below_what_they_descend_from_and_a_straight_line_stays_straight() -> None:
    rows = [version(*one) for one in (("e", "c"), ("d", "b"), ("c", "a"), ("b", "a"), ("a", "gone"), ("z", None))]
    assert [(one.name, depth) for one, depth in tree(tuple(rows))] == [("a", 0), ("c", 1), ("e", 1), ("b", 0), ("d", 0), ("z", 0)]


def test_what_the_pointer_says_of_a_version() -> None:
    pointer = Pointer(policy="tab", digest="a", generation=1, previous="b", anchor="a", holdback=0.1, release_id=None, changed_at=AT)
    assert [role_of(one, pointer) for one in "abc"] == ["champion, anchor", "previous", ""]
    assert role_of("a", None) == ""


def test_a_mean_is_shown_and_its_numbers_are_in_the_file() -> None:
    found = measure_cell(Measure(n=3, mean=0.5, low=0.25, high=0.75))
    assert (found.text, found.value, found.kind) == ("0.500 [0.250, 0.750]", {"n": 3, "mean": 0.5, "low": 0.25, "high": 0.75}, "n")
    assert (measure_cell(None).text, measure_cell(None).value) == ("–", None)


def test_what_somebody_said_is_a_row() -> None:
    said = [
        Approval(release_id="r", approver="user:ada", approved=yes, evidence_digest="e", reason=None, decided_at=AT)
        for yes in (True, False)
    ]
    assert [[cell.text for cell in row] for row in word_sheet(said).rows] == [
        ["user:ada", word, "e", "", "2026-11-24 06:00:00"] for word in ("yes", "no")
    ]


def shown(rows: list[GateRow]) -> list[list[str]]:
    return [[cell.text for cell in row][2:6] for row in gate_sheet(rows).rows]


def test_figures_of_each_kind_of_gate() -> None:
    health = gate(GateName.TRAINING_HEALTH, figures={"kl": 0.12345, "loss": None}, limits={"kl": 1})
    assert shown([health])[1:] == [["kl", "0.1235", "1", ""], ["loss", "–", "–", "not measured"]]
    needed = {"votes": 60, "people": 2, "above": 0.0, "rule": "superior"}
    people = gate(GateName.PEOPLE, said=["same"] * 3, people=2, net=0.5, low=-0.1, high=0.9, needed=needed)
    assert shown([people])[1:] == [
        ["votes that count", "3", "60", "at least"], ["people", "2", "2", "at least, none whose credential another one made"],
        ["preference", "0.5", "0", "the whole interval has to lie above: [-0.1, 0.9], superior"],
    ]  # fmt: skip
    live = gate(
        harm={"found": True, "peak_log_e": 3.25, "needed": 3.0},
        required=[{"metric": "reward", "needed": 2.5, "margin": 0.05, "peak_log_e": 1}],
        doubts=["late"], live_aa={"alarms": 0, "told": "none of 20"},
    )  # fmt: skip
    assert shown([live])[1:] == [
        ["harm, log E", "3.25", "3", "found; it stops the canary at the margin"],
        ["reward, log E", "1", "2.5 (worse by 0.05)", "not yet shown to be non-inferior"], ["data in doubt", "", "", "late"],
        ["champion against itself", "0", "", "none of 20"],
    ]  # fmt: skip
    calm = gate(GateName.HOLDBACK, harm={"found": False}, required=[{"metric": "reward", "non_inferior": True}])
    assert [row[3] for row in shown([calm])[1:]] == ["not found; it stops the canary at the margin", "non-inferior"]
    assert shown([gate(GateName.LICENCE, licence="x")]) == [["in a sentence", "pass", "", "as good"]]


def test_effects_and_the_run_are_numbers_and_nothing_else() -> None:
    effects = {"reward": {"control": 0.25, "treated": 0.5, "n_control": 9.0, "n_treated": 3}, "none": {}}
    found = [[cell.value for cell in row] for row in effect_sheet({"harm": {"effects": effects}}).rows]
    assert found == [["none", None, None, 0.0, 0, 0], ["reward", 0.25, 0.5, 0.25, 9, 3]]
    assert [[cell.text for cell in row] for row in health_sheet({"b": 1, "a": 0.5, "text": "x"}).rows] == [["a", "0.5"], ["b", "1"]]


def person(name: str, *roles: Role, policy: str | None = None, disabled: bool = False) -> Person:
    return Person(
        id=name, name=name, roles=frozenset(roles), policy=policy, created_at=AT, made_by="user:root", disabled_at=AT if disabled else None
    )


class Deployment:
    """As much of a sight as the inbox's first lines ask for."""

    def __init__(self, *people: Person, decisions: list[GateRow] | None = None) -> None:
        self._people, self._decisions = people, decisions or []

    def people(self) -> list[Person]:
        return list(self._people)

    def decisions(self, release_id: str, newest: int = 100) -> list[GateRow]:
        return self._decisions[-newest:]


def asked(actor: str, *roles: Role, people: tuple[Person, ...] = (), decisions: list[GateRow] | None = None) -> Asked:
    viewer = Visitor(actor=actor, actions=actions_of(roles), policy=None)
    return Asked(sight=cast("Sight", Deployment(*people, decisions=decisions)), viewer=viewer, policy="tab", query={})


def test_who_can_approve_is_told_with_who_else_can() -> None:
    op, ready = Role.OPERATOR, release(S.READY, config={"edited_by": "user:edi"})
    some = (
        person("ada", op), person("bob", op, policy="tab"), person("cyd", op, policy="composer"), person("dan", op, disabled=True),
        person("eva", Role.VIEWER), person("ini", op), person("edi", op), person("yes", op),
    )  # fmt: skip
    yes = {"user:yes"}
    assert who_can(asked("user:ada", op, people=some), ready, yes) == "you can approve; bob can as well"
    assert who_can(asked("user:eva", Role.VIEWER, people=some), ready, yes) == "you cannot approve; ada, bob can as well"
    for name, why in (
        ("ini", "you asked for it: somebody else has to approve"), ("edi", "you last edited the gates: somebody else has to approve"),
        ("yes", "you approved it: somebody else has to as well"),
    ):  # fmt: skip
        assert who_can(asked(f"user:{name}", op, people=some), ready, yes) == f"{why}; ada, bob can as well"
    assert who_can(asked("anonymous", op, people=some), ready, yes) == "anybody but user:ini can approve"
    assert who_can(asked("user:ada", op), ready, yes) == "you can approve"
    assert who_can(asked("user:eva", Role.VIEWER), ready, yes).endswith("; nobody is there who can: add an operator")
    many = tuple(person(f"p{n}", op) for n in range(6))
    assert "p0, p1, p2, p3, p4 and others can as well" in who_can(asked("user:ada", op, people=many), ready, yes)
    assert "p0, p1, p2, p3, p4 can as well" in who_can(asked("user:ada", op, people=many[:5]), ready, yes)


@pytest.mark.parametrize(
    ("reached", "state", "told"), [(1.5, S.CANARY, True), (1.49, S.CANARY, False), (2.0, S.READY, False), (None, S.CANARY, False)]
)
def test_harm_is_told_from_half_of_what_stops_a_canary_on(reached: float | None, state: ReleaseState, told: bool) -> None:
    one = gate(harm={"peak_log_e": reached, "needed": 3.0, "cause": "reward"})
    needs = Needs(
        ready=(), in_flight=(release(state),), held=(), engines=(), troubles=(), dead_letters=0, frozen=None, unfreeze_votes=(), alarms=(),
        slots=(),
        progress=(), turns=(0, 0), counters={},
    )  # fmt: skip
    found = items(asked("user:ada", Role.OPERATOR, decisions=[gate(harm={"peak_log_e": 0.0, "needed": 3.0}), one]), needs)
    assert [item.title for item in found] == (["tab-v2 may do harm on reward"] if told else [])


def test_shares_of_a_version_lie_between_nothing_and_all_and_its_reward_wherever_it_is() -> None:
    """0.95 and 0.05 are the means; half an interval of two values 0.1 apart is 1.96 * 0.0707 / 1.414 = 0.098."""
    for values, low, high in (((0.9, 1.0), 0.852, 1.0), ((0.0, 0.1), 0.0, 0.148)):
        sums = {("v2", name): of(*values) for name in ("survival", "success", "reward")}
        survival, follow_up, success, reward = figures(sums, "v2")
        assert follow_up is None
        assert survival is not None
        assert (survival.low, survival.high) == (pytest.approx(low), pytest.approx(high))
        assert success == survival
        assert reward is not None
        assert reward.high - reward.low == pytest.approx(2 * 0.098)
    unhappy = {("v2", "term:follow_up"): Sums(n=2, total=0, squares=0, negative=1)}
    share = figures(unhappy, "v2")[1]
    assert share is not None
    assert (share.mean, share.low, share.high) == (0.5, 0.0, 1.0)
