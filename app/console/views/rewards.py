"""Rewards: rule sets and what changed between them, labels one by one with their time line, and what is left out of training."""

import difflib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from app.console.sheets import Sheet, cell
from app.console.views.asked import Asked
from app.console.views.replays import proposal_sheet, replay_sheet
from app.console.views.tables import measure_cell, version_cell
from app.domain.errors import NotFound
from app.domain.ids import utc_now
from app.domain.learning.rewards import Exclusion
from app.domain.people import Action
from app.domain.release.sums import Sums
from app.domain.views.pages import Inspected, LabelLine, Page, RuleSetInfo

WEEK = timedelta(days=7)
LONGEST_DIFF = 2_000


def rewards(asked: Asked) -> dict[str, Any]:
    """Values of the page."""
    sight, policy = asked.sight, asked.policy
    sets, totals = sight.rule_sets(policy), sight.totals(policy, since=utc_now() - WEEK)
    exclusion = asked.word("exclusion")
    known = exclusion if exclusion in set(Exclusion) else None
    page = sight.labels(policy, after=asked.word("after"), exclusion=known)
    names = sight.names(policy, {line.version for line in page.rows})
    agreed = sight.agreed(policy)
    return {
        "to_read": sight.to_read(policy), "sure": agreed.share(unsure=False), "kappa": agreed.kappa(),
        "may_change": asked.viewer.may(Action.CHANGE_RULES, policy),
        "sets": sets, "diff": _diff(sets, asked.word("a"), asked.word("b")), "a": asked.word("a"), "b": asked.word("b"),
        "exclusions": [one.value for one in Exclusion], "exclusion": known,
        "sheets": {
            "terms": _term_sheet(totals), "excluded": _excluded_sheet(asked, totals), "labels": _label_sheet(asked, page, names),
            "rule_sets": _set_sheet(sets), "replays": replay_sheet(asked, sight.replays(policy)),
            "proposals": proposal_sheet(sight.proposals(policy)),
        },
    }  # fmt: skip


def label(asked: Asked, inference_id: str) -> dict[str, Any]:
    """Values of one label's page."""
    found = asked.sight.inspect(inference_id)
    if found is None or found.policy != asked.policy:
        raise NotFound(f"no turn {inference_id[:80]} of policy {asked.policy}; /console/rewards lists labels")
    names = asked.sight.names(asked.policy, [found.version])
    current = found.revisions[0] if found.revisions else None
    return {
        "turn": found, "version": version_cell(asked, found.version, names), "current": current,
        "sheets": {"terms": _breakdown(current), "timeline": _timeline(found)},
    }  # fmt: skip


def _diff(sets: list[RuleSetInfo], a: str | None, b: str | None) -> list[tuple[str, str]]:
    """Lines of the change from one rule set to another: (` `, `+`, `-` or `@`, the line)."""
    texts = {one.digest: one.toml for one in sets}
    if a not in texts or b not in texts:
        return []
    changed = difflib.unified_diff(texts[a].splitlines(), texts[b].splitlines(), lineterm="", n=2)
    return [(line[:1] or " ", line[1:]) for line in list(changed)[2:LONGEST_DIFF]]


def _term_sheet(totals: Mapping[str, Sums]) -> Sheet:
    rows = [
        (cell(name.removeprefix("term:")), cell(sums.n), measure_cell(sums.measure()), cell(sums.below_zero.mean))
        for name, sums in sorted(totals.items())
        if not name.startswith("excluded:")
    ]
    columns = ("term", "labels in which it spoke", "mean", "share below zero")
    return Sheet(name="terms", title="Terms, the last seven days", columns=columns, rows=rows, empty="no label within seven days")


def _excluded_sheet(asked: Asked, totals: Mapping[str, Sums]) -> Sheet:
    every = totals.get("reward", Sums()).n
    left_out = sorted(((name.removeprefix("excluded:"), sums.n) for name, sums in totals.items() if name.startswith("excluded:")))
    rows = [
        (cell(reason, href=asked.link("/rewards", exclusion=reason) + "#labels"), cell(n), cell(round(n / every, 4) if every else None))
        for reason, n in sorted(left_out, key=lambda pair: -pair[1])
    ]
    columns = ("reason", "labels", "share")
    title = "Left out of training, the last seven days"
    return Sheet(name="excluded", title=title, columns=columns, rows=rows, empty="nothing was left out")


def _label_sheet(asked: Asked, page: Page[LabelLine], names: Mapping[str, str]) -> Sheet:
    rows = [
        (
            cell(line.inference_id, href=asked.link(f"/labels/{line.inference_id}")), cell(line.labelled_at), cell(line.reward),
            cell(line.exclusion or ""), version_cell(asked, line.version, names), cell(line.segment or "none"), cell(line.revision),
        )
        for line in page.rows
    ]  # fmt: skip
    columns = ("turn", "labelled", "reward", "left out for", "version", "segment", "revision")
    return Sheet(name="labels", title="Labels", columns=columns, rows=rows, after=page.after, empty="no label: a turn waits for its time")


def _set_sheet(sets: list[RuleSetInfo]) -> Sheet:
    rows = [(cell(one.name), cell(one.digest, kind="code"), cell(one.activated_by), cell(one.activated_at)) for one in sets]
    empty = "none was activated: the default one is in force (`ratchet rules show`)"
    columns = ("rule set", "digest", "put in force by", "when")
    return Sheet(name="rule_sets", title="Rule sets", columns=columns, rows=rows, empty=empty)


def _breakdown(line: LabelLine | None) -> Sheet:
    terms = () if line is None else line.terms
    rows = [
        (
            cell(term.get("name")), cell(term.get("value")), cell(term.get("weight")), cell(term.get("abstained") or ""),
            cell(term.get("credit") or ""), cell(str(term.get("detail") or "")),
        )
        for term in terms
    ]  # fmt: skip
    columns = ("term", "value", "weight", "abstained because", "credit", "detail")
    return Sheet(name="terms", title="What each term said", columns=columns, rows=rows, empty="not labelled yet")


def _timeline(turn: Inspected) -> Sheet:
    """Everything that happened to the turn, in order."""
    found: list[tuple[Any, str, str, str]] = [
        (turn.started_at, "asked", "", ""), (turn.finished_at, "answered", turn.finish_reason, ""),
    ]  # fmt: skip
    for seen in turn.observed:
        found.append(
            (seen["occurred_at"], f"{seen['name']}", str(seen["value"]), f"{seen['status']}, received {seen['received_at']:%H:%M:%S}")
        )
        if seen["retracted_at"] is not None:
            found.append((seen["retracted_at"], f"{seen['name']} taken back", str(seen["value"]), ""))
    for line in turn.revisions:
        said = f"left out: {line.exclusion}" if line.exclusion else f"in batch {line.batch_id}" if line.batch_id else ""
        found.append((line.labelled_at, f"label, revision {line.revision}", f"{line.reward:.4g}", said))
    if turn.erased_at is not None:
        found.append((turn.erased_at, "erased", "", "its person was forgotten"))
    rows = [(cell(at), cell(what), cell(value), cell(note)) for at, what, value, note in sorted(found, key=lambda row: row[0])]
    return Sheet(name="timeline", title="Its time line", columns=("when", "what", "value", ""), rows=rows)
