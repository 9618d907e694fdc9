"""What waits, how the loop goes, and how much of a candidate is shown: every line of the inbox, and each bound of a candidate's page."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.console.views.candidate import candidate
from app.console.views.inbox import inbox, items
from app.domain.ids import utc_now
from app.domain.learning.cycles import Cycle, CycleStatus
from app.domain.people import Role
from app.domain.release.alarms import Alarm, AlarmKind
from app.domain.release.releases import Pointer, Release, ReleaseState
from app.domain.release.sums import Sums
from app.domain.views.pages import EngineRow, Needs, Served, VersionInfo
from tests.fakes.sights import Canned, canned, looking, texts

S = ReleaseState
AT = datetime(2026, 11, 24, 6, tzinfo=UTC)
SLOT = int(AT.timestamp())


def release(state: ReleaseState = S.READY, **changes: Any) -> Release:
    values: dict[str, Any] = {
        "id": "r2", "policy": "tab", "digest": "v2", "version_name": "tab-v2", "generation": 4, "stage": 1, "champion_digest": "v1",
        "champion_generation": 1, "evidence_digest": None, "reason": None, "created_at": AT, "changed_at": AT, "initiator": "user:ini",
    }  # fmt: skip
    return Release(state=state, **{**values, **changes})


def needs(**changes: Any) -> Needs:
    nothing: dict[str, Any] = {
        "ready": (), "in_flight": (), "held": (), "engines": (), "troubles": (), "dead_letters": 0, "frozen": None, "unfreeze_votes": (),
        "alarms": (), "slots": (), "progress": (), "turns": (0, 0), "counters": {},
    }  # fmt: skip
    return Needs(**nothing | changes)


def slot(status: CycleStatus = CycleStatus.DONE, *, number: int = 0, reason: str | None = None) -> Cycle:
    return Cycle(
        policy="tab", slot=SLOT + 3600 * number, status=status, step="judge", reason=reason, owner=None, fencing_token=1, attempt=1,
        lease_expires_at=None, batch_id=None, run_id=None, release_id=None, timings={"train": 12.34, "judge": 1.0}, started_at=AT,
        finished_at=None,
    )  # fmt: skip


def waiting(of: str | None = None, **changes: Any) -> list[tuple[str, str, str]]:
    preference = canned(sentence="12 pairs, none judged yet")
    sight = {"approvals": [], "people": [], "preference": preference, "decisions": []}
    return [(one.kind, one.title, one.detail) for one in items(looking(of=of, **sight), needs(**changes))]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"dead_letters": 1}, [("data", "1 dead letter not replayed", "events that make no sense as they came")]),
        (
            {"held": (slot(number=2, reason="too few"), slot())},
            [("held", "2 slots in a row came to nothing", "since 11-24 06:00: too few")],
        ),
        ({"held": (slot(), slot(number=1))}, [("held", "2 slots in a row came to nothing", "since 11-24 07:00: no reason given")]),
        (
            {"frozen": "two rollbacks", "unfreeze_votes": ("user:bob",)},
            [("frozen", "Promotions are frozen", "two rollbacks; 1 vote of 2 to free them")],
        ),
    ],
)  # fmt: skip
def test_what_waits_is_told_with_its_reason(changes: dict[str, Any], found: list[tuple[str, str, str]]) -> None:
    assert waiting(**changes) == found


def test_dead_letters_are_not_for_who_sees_one_policy() -> None:
    assert waiting(of="tab", dead_letters=5) == []


def test_engines_and_processes_say_what_is_wrong_or_since_when_nothing_was_heard() -> None:
    ago = utc_now() - timedelta(hours=5, minutes=7, seconds=30)
    engines = [EngineRow(engine_id="e1", digest="v1", state="failed", detail=detail, seen_at=ago) for detail in ("no room", None)]
    told = waiting(engines=tuple(engines), troubles=(("ingestion", "no bucket", ago),))
    assert told == [
        ("engine", "Engine e1 is failed", "no room"), ("engine", "Engine e1 is failed", "not heard of since 5 h 7 min ago"),
        ("data", "ingestion waits, since 5 h 7 min ago", "no bucket"),
    ]  # fmt: skip


def test_alarms_lead_to_their_release_and_the_rest_to_the_versions() -> None:
    ago = utc_now() - timedelta(hours=5, minutes=7, seconds=30)
    alarms = tuple(
        Alarm(
            id=f"a{n}", policy="tab", kind=AlarmKind.BREAKER, release_id=release_id, reason="two rollbacks", raised_at=ago,
            raised_by="system:watch", generation=1, until="two people say so",
        )
        for n, release_id in enumerate(("r2", None))
    )  # fmt: skip
    found = items(looking(), needs(alarms=alarms))
    assert [one.href for one in found] == ["/console/releases/r2?policy=tab", "/console/versions?policy=tab"]
    assert found[0].title == f"Alarm: {AlarmKind.BREAKER.value}, 5 h 7 min ago"
    assert found[0].detail == "two rollbacks; it ends when two people say so"


def test_a_release_waits_for_approvals_or_for_votes_by_its_state() -> None:
    ready, judging, canary = release(approvals_needed=2), release(S.JUDGING), release(S.CANARY)
    told = waiting(ready=(ready,), in_flight=(canary, judging))
    assert [title for _, title, _ in told] == ["tab-v2 is ready", "tab-v2 waits for blind votes"]
    assert told[0][2].startswith("0 of 2 approvals, –; ")
    assert told[1][2].endswith(": 12 pairs, none judged yet")
    assert waiting(ready=(release(),))[0][2].startswith("0 of 1 approval, ")


def loop(totals: dict[str, Sums] | None = None, **changes: Any) -> tuple[dict[str, tuple[str, str]], dict[str, Any], Canned]:
    pointer = Pointer(
        policy="tab", digest="0123456789abcdef", generation=1, previous=None, anchor="x", holdback=0.0, release_id=None, changed_at=AT
    )
    deployed = changes.pop("deployed", True)
    sight = Canned(
        needs=needs(**changes), pointer=pointer if deployed else None, names={}, totals=totals or {}, approvals=[], people=[], decisions=[],
        preference=canned(sentence="none"),
    )  # fmt: skip
    page = inbox(looking(Role.OPERATOR, sight=sight))
    return {what: (much, lately) for what, much, lately in page["loop_"]}, page, sight


def test_the_picture_of_the_loop_counts_what_there_is() -> None:
    states = (S.TRAINED, S.OFFLINE, S.QUEUED, S.CANARY, S.JUDGING)
    told, page, sight = loop(
        {"reward": Sums(n=1234), "excluded:late": Sums(n=2), "excluded:early": Sums(n=3)}, turns=(5000, 4000),
        in_flight=tuple(release(state) for state in states), ready=(release(),),
        slots=(slot(CycleStatus.HELD, number=1, reason="too few"), slot()),
    )  # fmt: skip
    assert told == {
        "people use it": ("5,000 turns", "1,000 wait for their label"), "label": ("1,234 in a day", "5 not trained on"),
        "update": ("held", "slot 11-24 07:00"), "gates": ("3 candidates", "in the offline gates"), "canary": ("tab-v2", "stage 1"),
        "approval": ("1 candidate", "ready"),
    }  # fmt: skip
    assert page["champion"] == "0123456789ab"
    assert page["strip_told"] == "last 2 slots: 1 done, 1 held"
    assert [row[:4] for row in texts(page["sheets"]["slots"])] == [
        ["11-24 07:00", "held", "judge", "1"],
        ["11-24 06:00", "done", "judge", "1"],
    ]
    assert texts(page["sheets"]["slots"])[0][4:] == ["train 12.3 s · judge 1.0 s", "2026-11-24 06:00:00", "too few"]
    (since,) = [named["since"] for name, _, named in sight.heard if name == "totals"]
    assert abs(utc_now() - since - timedelta(days=1)) < timedelta(minutes=1)
    assert page["strip"].index("06:00 done") < page["strip"].index("07:00 held: too few"), "the oldest first"


def test_before_anything_happened_the_picture_says_so() -> None:
    told, page, _ = loop(deployed=False)
    assert (told["update"], told["canary"], told["approval"]) == (("none yet", ""), ("none", ""), ("0 candidates", "nothing to decide"))
    assert (told["label"][0], page["champion"], page["strip_told"]) == ("0 in a day", "nothing yet", "no slot was decided yet")


def sums(*values: float) -> Sums:
    return Sums(n=len(values), total=sum(round(v * 1e6) for v in values), squares=sum(round(v * v * 1e6) for v in values))


def candidate_page(**answers: Any) -> tuple[dict[str, Any], Canned]:
    some: dict[str, Any] = {
        "release": release(S.CANARY), "gates": [], "decisions": [], "approvals": [], "names": {}, "sums": {}, "course": {}, "served": [],
        "run_of": None, "pointer": None, "alarms": [], "preference": None, "story": [], "version": None, "segments": {}, "steps": [],
        "people": [],
    }  # fmt: skip
    sight = Canned(**some | answers)
    return candidate(looking(sight=sight), "r2"), sight


def test_of_a_candidate_s_measures_eight_are_drawn_the_known_ones_first() -> None:
    measures = [f"term:{letter}" for letter in "abcdefgh"] + ["reward", "survival", "excluded:late"]
    found: dict[tuple[str, str], Sums] = {("v2", name): sums(0.0) for name in measures}
    _, sight = candidate_page(sums=found | {("v1", "alone"): sums(0.0)})
    (asked,) = [named["measures"] for name, _, named in sight.heard if name == "course"]
    assert asked == ["reward", "survival", *(f"term:{letter}" for letter in "abcdef")]


def test_two_hundred_rows_of_segments_are_shown_with_the_difference_where_both_were_served() -> None:
    found: dict[tuple[str, str, str], Sums] = {("v2", f"s{n:03}", "reward"): sums(0.5) for n in range(201)}
    found |= {("v1", "s000", "reward"): sums(0.25), ("v2", "s000", "excluded:late"): sums(0.0), ("v1", "z", "reward"): sums(0.0)}
    page, _ = candidate_page(segments=found)
    rows = texts(page["sheets"]["segments"])
    assert (len(rows), rows[0][4], rows[1][4], rows[-1][0]) == (200, "+0.250", "–", "s199")
    assert page["sheets"]["segments"].rows[0][4].value == 0.25
    assert texts(candidate_page(segments={("v2", "", "reward"): sums(0.5)})[0]["sheets"]["segments"])[0][0] == "none"


def test_eight_generations_are_shown_and_fewer_where_the_line_ends() -> None:
    def version(_policy: str, digest: str) -> VersionInfo | None:
        number = int(digest.removeprefix("v"))
        parent = f"v{number + 1}" if number != 4 else None
        return VersionInfo(digest=digest, name=digest, kind="full", parent=parent, step=0, created_at=AT, licence="L", base_model="B")

    assert len(candidate_page(version=version)[0]["lineage"]) == 3, "v2, v3 and v4, which has no parent"
    assert len(candidate_page(version=version, release=release(digest="v5"))[0]["lineage"]) == 8
    assert candidate_page()[0]["lineage"] == []


def test_who_was_exposed_is_summed_and_the_widest_stage_told() -> None:
    served = [
        Served(stage="0", arm="candidate", digest="v2", requests=1_000, people=3),
        Served(stage="1", arm="candidate", digest="v2", requests=500, people=1),
        Served(stage="1", arm="champion", digest="v1", requests=9_000, people=90),
    ]  # fmt: skip
    page, _ = candidate_page(served=served)
    assert page["exposed"] == "1,500 requests; at most 3 people in one stage."
    assert texts(page["sheets"]["exposed"])[2] == ["1", "champion", "9,000", "90"]
    assert candidate_page(served=served[2:])[0]["exposed"] == "Nobody was served by it yet."
