"""Versions: who descends from whom, what was live when, any two side by side, and what is barred."""

from collections.abc import Mapping
from typing import Any

from app.console.charts import Line, Point, over_time
from app.console.sheets import Cell, Sheet, cell
from app.console.views.asked import Asked
from app.console.views.tables import measure_cell, role_of, version_cell, version_sheet
from app.console.wording import short
from app.domain.errors import NotFound
from app.domain.people import Action
from app.domain.release.holdouts import WEEK, Holdout, told_difference
from app.domain.release.releases import Pin
from app.domain.release.sums import Sums
from app.domain.views.pages import Barred, Moved, Page, VersionInfo

DRAWN = ("task_success", "reward")
"""Of the long-term holdout, where it has them."""
NEWEST_MOVES = 20
"""Beside the versions; the rest is on a page of its own."""


def versions(asked: Asked) -> dict[str, Any]:
    """Values of the list."""
    sight, policy = asked.sight, asked.policy
    page, pointer = sight.versions(policy, after=asked.word("after")), sight.pointer(policy)
    sums = sight.sums(policy, [version.digest for version in page.rows])
    moves, barred, pins = sight.history(policy, limit=NEWEST_MOVES), sight.quarantined(policy), sight.pins(policy)
    held = sight.holdout(policy)
    names = sight.names(policy, _named(moves) | {row.digest for row in barred} | set(pins) | ({held.digest} if held else set()))
    return {
        "pointer": pointer, "tree": tree(page.rows), "role_of": role_of, "barred": barred,
        "held": held, "held_course": _held_course(held),
        "choices": page.rows, "a": asked.word("a"), "b": asked.word("b"), "names": names,
        "sheets": {
            "versions": version_sheet(asked, page, sums, pointer, pins), "live": _move_sheet(asked, Page(rows=tuple(moves.rows)), names),
            "pinned": _pin_sheet(asked, pins, names), "quarantine": _barred_sheet(asked, barred, names),
            "holdout": _holdout_sheet(held), **_comparison(asked),
        },
    }  # fmt: skip


def history(asked: Asked) -> dict[str, Any]:
    """Values of the page with every move of the pointer."""
    moves = asked.sight.history(asked.policy, after=asked.word("after"))
    return {"sheets": {"live": _move_sheet(asked, moves, asked.sight.names(asked.policy, _named(moves)))}}


def _named(moves: Page[Moved]) -> set[str]:
    return {digest for move in moves.rows for digest in (move.digest, move.previous) if digest}


def tree(rows: tuple[VersionInfo, ...]) -> list[tuple[VersionInfo, int]]:
    """Versions of a page as they descend from each other, each with its depth; children below their parent, newest first."""
    known = {version.digest for version in rows}
    children: dict[str | None, list[VersionInfo]] = {}
    for version in rows:
        children.setdefault(version.parent if version.parent in known else None, []).append(version)
    found: list[tuple[VersionInfo, int]] = []
    waiting = [(version, 0) for version in reversed(children.get(None, []))]
    while waiting:
        version, depth = waiting.pop()
        found.append((version, depth))
        below = children.get(version.digest, [])
        deeper = depth + (len(below) > 1)  # a straight line of descent stays straight
        waiting += [(child, deeper if n else depth) for n, child in enumerate(reversed(below))]
    return found


def version(asked: Asked, digest: str) -> dict[str, Any]:
    """Values of one version's page."""
    sight, policy = asked.sight, asked.policy
    found, pointer = sight.version(policy, digest), sight.pointer(policy)
    if found is None:
        raise NotFound(f"no version {digest[:60]} of policy {policy}; /console/versions lists those there are")
    by_segment = sight.segments(policy, [digest])
    rows = [
        (cell(segment or "none"), cell(name), cell(sums.n), measure_cell(sums.measure()))
        for (_, segment, name), sums in sorted(by_segment.items())
    ]
    barred = next((row for row in sight.quarantined(policy) if row.digest == digest), None)
    columns = ("segment", "measure", "labels", "mean")
    return {
        "version": found, "pointer": pointer, "role": role_of(digest, pointer), "barred": barred,
        "run": sight.run_of(policy, digest), "pinned": sight.pins(policy).get(digest), "may_pin": asked.viewer.may(Action.PIN, policy),
        "sheets": {"measures": Sheet(name="measures", title="What people did with its answers", columns=columns, rows=rows[:400])},
    }  # fmt: skip


def _digest(asked: Asked, wanted: str | None) -> str | None:
    """Of the version that is called so: by its name, its digest, or the beginning of one. Raises `NotFound`."""
    if wanted is None:
        return None
    found = asked.sight.digest_of(asked.policy, wanted)
    if found is None:
        raise NotFound(f"no version of {asked.policy} is called {wanted!r}: type a name, or the beginning of a digest")
    return found


def _comparison(asked: Asked) -> Mapping[str, Sheet]:
    """Any two versions, measure by measure."""
    a, b = _digest(asked, asked.word("a")), _digest(asked, asked.word("b"))
    if not a or not b:
        return {}
    sums = asked.sight.sums(asked.policy, [a, b])
    names = asked.sight.names(asked.policy, [a, b])
    rows: list[tuple[Cell, ...]] = []
    for name in sorted({measure for _, measure in sums}):
        first, second = sums.get((a, name), Sums()), sums.get((b, name), Sums())
        difference = Cell(text=f"{second.mean - first.mean:+.3f}", value=second.mean - first.mean, kind="n")
        both = first.n > 0 and second.n > 0
        rows.append((cell(name), measure_cell(first.measure()), measure_cell(second.measure()), difference if both else cell(None)))
    columns = ("measure", names.get(a, short(a)), names.get(b, short(b)), "difference")
    return {"compared": Sheet(name="compared", title="Side by side", columns=columns, rows=rows, empty="neither has labels")}


def _move_sheet(asked: Asked, moves: Page[Moved], names: Mapping[str, str]) -> Sheet:
    rows = [
        (
            cell(move.generation), cell(move.occurred_at), cell(move.action), version_cell(asked, move.digest, names),
            cell(names.get(move.previous or "", short(move.previous))), cell(move.actor), cell(move.reason or ""),
        )
        for move in moves.rows
    ]  # fmt: skip
    columns = ("generation", "from", "by", "live", "before it", "who", "why")
    empty = "nothing was deployed yet"
    return Sheet(name="live", title="What was live when", columns=columns, rows=rows, after=moves.after, empty=empty)


def _pin_sheet(asked: Asked, pins: Mapping[str, Pin], names: Mapping[str, str]) -> Sheet:
    rows = [
        (
            version_cell(asked, pin.digest, names), cell(pin.pinned_at), cell(pin.pinned_by), cell(pin.reason),
            cell("unpin it", href=asked.link(f"/act/unpin/{pin.digest}")),
        )
        for pin in pins.values()
    ]  # fmt: skip
    empty = "nothing is pinned: a version's page pins it, and its weights stay until it is unpinned"
    return Sheet(name="pinned", title="Pinned", columns=("version", "since", "by", "why", ""), rows=rows, empty=empty)


def _holdout_sheet(holdout: Holdout | None) -> Sheet:
    """What the releases since its beginning have brought, over all of its weeks and in the newest."""
    rows: list[tuple[Cell, ...]] = []
    for one in () if holdout is None else holdout.told:
        difference, interval = told_difference(one)
        week = "all" if one.week is None else f"week {one.week}"
        means = (cell(one.held.mean), cell(one.beside.mean), Cell(text=difference, value=one.difference, kind="n"), cell(interval))
        rows.append((cell(one.metric), cell(week), *means, cell(one.held.people), cell(one.beside.people)))
    columns = ("metric, good is up", "of", "held", "everybody else", "difference", "95 %", "people held", "beside")
    empty = "nothing was read yet" if holdout is not None else "no long-term holdout: set share under [gates.holdout]"
    return Sheet(name="holdout", title="Long-term holdout", columns=columns, rows=rows, empty=empty)


def _held_course(holdout: Holdout | None) -> str:
    """The difference by week of the metrics that have one, as a picture; nothing before there are two weeks."""
    lines = dict[str, list[Point]]()
    for one in () if holdout is None else holdout.readings:
        if holdout is not None and one.week is not None and one.difference is not None:
            at = holdout.began_at + one.week * WEEK
            lines.setdefault(one.metric, []).append(Point(at=at, value=one.difference, low=one.low, high=one.high))
    drawn = [Line(name=name, points=points) for name, points in lines.items() if name in DRAWN and len(points) > 1]
    return over_time(drawn, title="difference by week, everybody else minus held", threshold=0.0)


def _barred_sheet(asked: Asked, barred: list[Barred], names: Mapping[str, str]) -> Sheet:
    rows = [
        (
            version_cell(asked, row.digest, names), cell(row.since), cell(row.reason), cell(", ".join(row.votes)),
            cell("lift it", href=asked.link(f"/act/lift/{row.digest}")),
        )
        for row in barred
    ]  # fmt: skip
    columns = ("version", "since", "why", "votes to lift it", "")
    return Sheet(name="quarantine", title="Quarantine", columns=columns, rows=rows, empty="nothing is quarantined")
