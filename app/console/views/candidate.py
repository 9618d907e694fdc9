"""A candidate: one sentence, then everything that it rests on."""

from collections.abc import Mapping, Sequence
from typing import Any

from app.console.charts import Line, Point, over_time
from app.console.sheets import Cell, Sheet, cell
from app.console.views.asked import Asked
from app.console.views.figures import effect_sheet, gate_name, gate_sheet, health_sheet
from app.console.views.inbox import who_can
from app.console.views.tables import REWARD, SUCCESS, SURVIVAL, measure_cell, release_sheet, step_sheet, version_cell
from app.console.wording import age, clock_time, left, plural
from app.domain.errors import NotFound
from app.domain.release.by_people import BY_PEOPLE
from app.domain.release.releases import IN_FLIGHT, Approval, Release, ReleaseState, approvers
from app.domain.release.sums import Sums
from app.domain.views.pages import Course, Served
from app.domain.views.rows import GateRow

S = ReleaseState
TITLES = {REWARD: "reward", SURVIVAL: "share of an edit still there", SUCCESS: "task success"}
MOST_TILES = 8
GENERATIONS = 8
"""Ancestors that are shown."""


def candidates(asked: Asked) -> dict[str, Any]:
    """Values of the list."""
    return {"sheets": {"releases": release_sheet(asked, asked.sight.releases(asked.policy, after=asked.word("after")))}}


def find(asked: Asked, release_id: str) -> Release:
    """The release, where whoever asks may see it. Raises `NotFound`."""
    found = asked.sight.release(release_id)
    if found is None or found.policy != asked.policy:
        raise NotFound(f"no release {release_id} of policy {asked.policy}; /console/releases lists those there are")
    return found


def candidate(asked: Asked, release_id: str) -> dict[str, Any]:
    """Values of the page."""
    sight, release = asked.sight, find(asked, release_id)
    gates, decisions, said = sight.gates(release.id), sight.decisions(release.id), sight.approvals(release.id)
    versions = [release.champion_digest, release.digest]
    names = sight.names(asked.policy, versions) | {release.digest: release.version_name}
    course = sight.course(asked.policy, versions, since=release.created_at, measures=_measures(asked, release))
    yes = approvers(release, said)
    served, run = sight.served(release.id), sight.run_of(asked.policy, release.digest)
    live = decisions[-1].evidence if decisions else {}
    return {
        "release": release, "pointer": sight.pointer(asked.policy), "verdict": verdict(release, gates, yes), "gates": gates,
        "gate_name": gate_name, "who_can": who_can(asked, release, yes), "said": said, "yes": yes, "exposed": _exposed(served),
        "tiles": tiles(release, course), "evidence_chart": evidence_chart(decisions), "alarms": sight.alarms(asked.policy, release.id),
        "champion_name": names.get(release.champion_digest, release.champion_digest[:12]), "run": run, "frozen_at": None,
        "preference": sight.preference(release.id), "story": sight.story(release), "by_people": release.config.get("by_people"),
        "lineage": _lineage(asked, release), "acts": acts(release),
        "sheets": {
            "gates": gate_sheet(gates), "exposed": _served_sheet(served), "effects": effect_sheet(live),
            "segments": _segment_sheet(asked, release), "training": health_sheet({} if run is None else run.metrics),
            "approvals": word_sheet(said), "history": step_sheet(sight.steps(release.id)),
        },
    }  # fmt: skip


def acts(release: Release) -> list[tuple[str, str]]:
    """(act, what its button says) that make sense in this state; who may do them, the desk says."""
    match release.state:
        case S.READY:
            return [("approve", "Approve"), ("reject", "Reject"), ("abort", "Abort")]
        case S.CHAMPION:
            return [("roll_back", "Roll back")]
        case S.SUPERSEDED:
            return [("roll_back", "Quarantine")]
        case state if state in IN_FLIGHT:
            return [("reject", "Reject"), ("abort", "Abort")]
        case _:
            return []


def verdict(release: Release, gates: Sequence[GateRow], yes: set[str]) -> tuple[str, str]:
    """(go, wait or stop; one sentence)."""
    failed = [gate_name(gate.gate) for gate in gates if gate.verdict == "fail"]
    match release.state:
        case S.JUDGING:
            return "wait", f"Nobody is served by it. {(release.reason or BY_PEOPLE)[:1].upper()}{(release.reason or BY_PEOPLE)[1:]}."
        case S.READY:
            missing = (release.approvals_needed or 1) - len(yes)
            return "go", f"{_passed(release)}: needs {plural(missing, 'more approval')}, {left(release.approval_expires_at)}."
        case S.APPROVED | S.PROMOTING:
            return "go", "Approved: the pointer moves as soon as the watch has asked every condition again."
        case S.CHAMPION:
            return "go", f"Live since {clock_time(release.changed_at)} UTC, and watched against its holdback."
        case S.CANARY:
            return "wait", f"Under test at stage {release.stage}: {gates[-1].reason if gates else 'no decision yet'}."
        case S.TRAINED | S.OFFLINE | S.QUEUED:
            said = f"{', '.join(failed)} failed" if failed else release.reason or "it waits"
            return "wait", f"Before its canary: {said}."
        case S.SUPERSEDED:
            return "go", f"Was champion; {release.reason or 'a newer one took over'}."
        case _:
            return "stop", f"{release.state.value.replace('_', ' ').capitalize()}: {release.reason or 'no reason given'}."


def _passed(release: Release) -> str:
    by_people = release.config.get("by_people") is not None
    return f"Passed by people's blind votes, {BY_PEOPLE}" if by_people else "Safe by every gate"


def _measures(asked: Asked, release: Release) -> list[str]:
    found = asked.sight.sums(asked.policy, [release.digest, release.champion_digest], since=release.created_at)
    named = sorted({name for version, name in found if version == release.digest and not name.startswith("excluded:")})
    return sorted(named, key=lambda name: (name not in TITLES, name))[:MOST_TILES]


def tiles(release: Release, course: Course) -> list[dict[str, Any]]:
    """Difference of the candidate to the champion over the same hours, added up, with a confidence sequence."""
    found: list[dict[str, Any]] = []
    for measure in sorted({key[1] for key in course}, key=lambda name: (name not in TITLES, name)):
        points = _difference(course, measure, champion=release.champion_digest, candidate=release.digest)
        if points:
            title = TITLES.get(measure, measure.removeprefix("term:").replace("_", " "))
            last = points[-1]
            line = Line(name="candidate − champion", points=points, dashed=True)
            found.append({"title": title, "last": last, "chart": over_time([line], title=f"{title}, difference", threshold=0.0)})
    return found


def _difference(course: Course, measure: str, *, champion: str, candidate: str) -> list[Point]:
    hours = sorted({at for _, name, at in course if name == measure})
    points: list[Point] = []
    ours, theirs = Sums(), Sums()
    for at in hours:
        mine, other = course.get((candidate, measure, at)), course.get((champion, measure, at))
        if mine is None or other is None:
            continue  # an hour in which only one of them was served says nothing about the difference
        ours, theirs = ours + mine, theirs + other
        if ours.n >= 2 and theirs.n >= 2:
            half = ours.sequence_half_width(alpha=0.025) + theirs.sequence_half_width(alpha=0.025)
            value = ours.mean - theirs.mean
            points.append(Point(at=at, value=value, low=value - half, high=value + half))
    return points


def evidence_chart(decisions: Sequence[GateRow]) -> str:
    """The log e-value of harm over the recorded decisions, against what stops the canary."""
    points: list[Point] = []
    needed: float | None = None
    for decision in decisions:
        harm: Mapping[str, Any] = decision.evidence.get("harm") or {}
        if isinstance(harm.get("log_e"), int | float):
            points.append(Point(at=decision.decided_at, value=float(harm["log_e"])))
            needed = harm.get("needed", needed)
    return over_time([Line(name="log E of harm", points=points)], title="evidence of harm, log E", threshold=needed, zero=True)


def _exposed(served: Sequence[Served]) -> str:
    mine = [row for row in served if row.arm == "candidate"]
    if not mine:
        return "Nobody was served by it yet."
    widest = max(row.people for row in mine)
    return f"{sum(row.requests for row in mine):,} requests; at most {plural(widest, 'person', 'people')} in one stage."


def _served_sheet(served: Sequence[Served]) -> Sheet:
    rows = [(cell(row.stage), cell(row.arm), cell(row.requests), cell(row.people)) for row in served]
    empty = "nobody was assigned yet: a canary does that"
    return Sheet(name="exposed", title="Who was exposed", columns=("stage", "arm", "requests", "people"), rows=rows, empty=empty)


def _segment_sheet(asked: Asked, release: Release) -> Sheet:
    """Per segment and measure, both versions since the release was opened."""
    found = asked.sight.segments(asked.policy, [release.digest, release.champion_digest], since=release.created_at)
    keys = sorted({(segment, name) for version, segment, name in found if version == release.digest and not name.startswith("excluded:")})
    rows: list[Sequence[Cell]] = []
    for segment, name in keys[:200]:
        ours, theirs = (found.get((version, segment, name), Sums()) for version in (release.digest, release.champion_digest))
        difference = Cell(text=f"{ours.mean - theirs.mean:+.3f}", value=ours.mean - theirs.mean, kind="n") if theirs.n else cell(None)
        rows.append((cell(segment or "none"), cell(name), measure_cell(theirs.measure()), measure_cell(ours.measure()), difference))
    columns = ("segment", "measure", "champion", "candidate", "difference")
    empty = "no label of the candidate yet"
    return Sheet(name="segments", title="Reward shift, per term and segment", columns=columns, rows=rows, empty=empty)


def word_sheet(said: Sequence[Approval]) -> Sheet:
    """Who said what, to which evidence."""
    rows = [
        (
            cell(w.approver),
            cell("yes" if w.approved else "no"),
            cell(w.evidence_digest, kind="code"),
            cell(w.reason or ""),
            cell(w.decided_at),
        )
        for w in said
    ]
    columns = ("who", "said", "to this evidence", "why", "when")
    return Sheet(name="approvals", title="Approvals", columns=columns, rows=rows, empty="nobody has said anything yet")


def _lineage(asked: Asked, release: Release) -> list[dict[str, Any]]:
    """The candidate and its ancestors, newest first."""
    found: list[dict[str, Any]] = []
    digest: str | None = release.digest
    while digest is not None and len(found) < GENERATIONS:
        version = asked.sight.version(asked.policy, digest)
        if version is None:
            break
        shown = version_cell(asked, version.digest, {version.digest: version.name})
        found.append({"cell": shown, "licence": version.licence, "base": version.base_model, "made": age(version.created_at)})
        digest = version.parent
    return found
