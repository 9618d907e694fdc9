"""A rule set over stored labels: what would move, what each term would pay, and the labels that would move most."""

from collections.abc import Mapping
from typing import Any

from app.console.sheets import Cell, Sheet, cell
from app.console.views.asked import Asked
from app.console.wording import plural
from app.domain.errors import NotFound
from app.domain.learning.rule_sets import AskedReplay, Proposal, Replay
from app.domain.people import Action

SHARES = ("lowest", "25 %", "median", "75 %", "highest")


def replay(asked: Asked, replay_id: str) -> dict[str, Any]:
    """Values of the page."""
    found = asked.sight.replay(asked.policy, replay_id)
    if found is None:
        raise NotFound(f"no replay {replay_id[:80]} of policy {asked.policy}; /console/rewards lists the newest")
    outcome = found.outcome
    sheets = {} if outcome is None else {
        "terms": _term_sheet(outcome), "movers": _mover_sheet(asked, outcome), "quantiles": _quantile_sheet(outcome),
        "segments": _segment_sheet(outcome), "excluded": _excluded_sheet(outcome),
    }  # fmt: skip
    return {
        "replay": found, "verdict": verdict(found), "may_propose": asked.viewer.may(Action.CHANGE_RULES, asked.policy), "sheets": sheets,
        "title": "Replay" if outcome is None else f"Replay of {outcome.name}",
    }  # fmt: skip


def verdict(found: AskedReplay) -> tuple[str, str]:
    """(go, wait or stop; one sentence)."""
    if found.refused is not None:
        return "stop", f"The labeller cannot score by it: {found.refused}"
    if found.outcome is None:
        return (
            "wait",
            "It waits for the labeller (`ratchet label`), which takes it up between two rounds; this page shows what comes of it.",
        )
    outcome = found.outcome
    if not outcome.turns:
        return "wait", "There is no label to replay it over yet."
    share = 100 * outcome.changed / outcome.turns
    return "go", f"{outcome.changed:,} of the newest {plural(outcome.turns, 'label')} would move ({share:.1f} %)."


def replay_sheet(asked: Asked, replays: list[AskedReplay]) -> Sheet:
    """The newest replays of a policy."""
    rows = [
        (
            cell(one.asked_at, href=asked.link(f"/replays/{one.id}")),
            cell(one.asked_by),
            cell(one.state, kind="state"),
            cell(one.refused or ""),
        )
        for one in replays
    ]
    empty = "none yet: a rule set is replayed before it is proposed"
    return Sheet(name="replays", title="Replays", columns=("asked", "by", "state", "what is wrong"), rows=rows, empty=empty)


def proposal_sheet(proposals: list[Proposal]) -> Sheet:
    """What was proposed, and what became of it."""
    rows = [
        (
            cell(one.proposed_at), cell(one.proposed_by), cell(one.state, kind="state"), cell(one.digest or "", kind="code"),
            cell(one.refused or ""),
        )
        for one in proposals
    ]  # fmt: skip
    columns = ("proposed", "by", "state", "digest", "what is wrong")
    return Sheet(name="proposals", title="Proposals", columns=columns, rows=rows, empty="nobody proposed a rule set here yet")


def _term_sheet(outcome: Replay) -> Sheet:
    rows = [
        (
            cell(name), cell(shift.spoke_before), _signed(shift.mean_before), cell(shift.spoke_after), _signed(shift.mean_after),
            _signed((shift.mean_after * shift.spoke_after - shift.mean_before * shift.spoke_before) / outcome.turns),
        )
        for name, shift in outcome.terms.items()
    ]  # fmt: skip
    columns = ("term", "spoke in", "paid on average", "would speak in", "would pay", "reward shift per label")
    return Sheet(name="terms", title="Reward shift per term", columns=columns, rows=rows, empty="no term spoke")


def _mover_sheet(asked: Asked, outcome: Replay) -> Sheet:
    rows = [
        (
            cell(one.inference_id, href=asked.link(f"/labels/{one.inference_id}")), cell(one.segment or "none"), _signed(one.before),
            _signed(one.after), _signed(one.change), cell(_told(one.paid_before)), cell(_told(one.paid_after)),
        )
        for one in outcome.movers
    ]  # fmt: skip
    columns = ("turn", "segment", "before", "after", "change", "what paid", "what would pay")
    return Sheet(name="movers", title="Labels that would move most", columns=columns, rows=rows, empty="none would move")


def _quantile_sheet(outcome: Replay) -> Sheet:
    rows = [
        (cell(name), _signed(before), _signed(after)) for name, before, after in zip(SHARES, outcome.before, outcome.after, strict=False)
    ]
    return Sheet(name="quantiles", title="Distribution of rewards", columns=("", "as labelled", "replayed"), rows=rows, empty="no label")


def _segment_sheet(outcome: Replay) -> Sheet:
    rows = [
        (cell(segment or "none"), cell(count), _signed(before), _signed(after), _signed(after - before))
        for segment, (count, before, after) in outcome.segments.items()
    ]
    columns = ("segment", "labels", "mean as labelled", "mean replayed", "shift")
    return Sheet(name="segments", title="Per segment", columns=columns, rows=rows[:200], empty="no label")


def _excluded_sheet(outcome: Replay) -> Sheet:
    rows = [(cell(reason), cell(count)) for reason, count in sorted(outcome.excluded.items(), key=lambda pair: -pair[1])]
    return Sheet(name="excluded", title="Would be left out of training", columns=("reason", "labels"), rows=rows, empty="none of them")


def _signed(value: float) -> Cell:
    return Cell(text=f"{value:+.3f}", value=value, kind="n")


def _told(paid: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:+.2f}" for name, value in sorted(paid.items())) or "nothing spoke"
