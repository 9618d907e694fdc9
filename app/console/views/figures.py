"""What a gate measured against what it allows: rows from the evidence that each gate leaves behind."""

from collections.abc import Iterator, Mapping
from typing import Any

from app.console.sheets import Cell, Sheet, cell
from app.domain.release.gates import GateName
from app.domain.views.rows import GateRow

Row = tuple[str, Cell, Cell, str]
"""(what, measured, margin or limit, what follows)."""
NAMES = {
    GateName.TRAINING_HEALTH: "training health", GateName.OFFLINE: "offline suites", GateName.SEALED: "sealed suites",
    GateName.OFF_POLICY: "off-policy estimate", GateName.CANARY: "canary", GateName.HOLDBACK: "holdback", GateName.LICENCE: "licence",
    GateName.PEOPLE: "people's blind votes, no traffic",
}  # fmt: skip


def gate_name(gate: str) -> str:
    """What people call it."""
    return NAMES.get(gate, gate)  # pyright: ignore[reportArgumentType, reportCallIssue] - StrEnum keys equal their text


def gate_sheet(gates: list[GateRow]) -> Sheet:
    """Every figure of every gate."""
    rows = [
        (
            cell(gate_name(gate.gate)), cell(gate.verdict, kind="state"), cell(what), measured, margin, cell(said),
            cell(gate.decided_at),
        )
        for gate in gates for what, measured, margin, said in _rows(gate)
    ]  # fmt: skip
    columns = ("gate", "verdict", "what", "measured", "margin", "why", "decided")
    return Sheet(name="gates", title="Gates, number by number", columns=columns, rows=rows, empty="no gate has answered yet")


def _rows(gate: GateRow) -> Iterator[Row]:
    evidence = gate.evidence
    yield ("in a sentence", cell(gate.action or gate.verdict), cell(""), gate.reason)
    if gate.gate == GateName.TRAINING_HEALTH:
        yield from _health(evidence)
    elif gate.gate in (GateName.OFFLINE, GateName.SEALED):
        yield from _suites(evidence)
    elif gate.gate in (GateName.CANARY, GateName.HOLDBACK):
        yield from _live(evidence)
    elif gate.gate == GateName.PEOPLE:
        yield from _people(evidence)


def _health(evidence: Mapping[str, Any]) -> Iterator[Row]:
    limits = evidence.get("limits") or {}
    for name, value in (evidence.get("figures") or {}).items():
        yield name, _number(value), _number(limits.get(name)), "not measured" if value is None else ""


def _suites(evidence: Mapping[str, Any]) -> Iterator[Row]:
    for name, suite in evidence.items():
        if isinstance(suite, dict) and "difference" in suite:
            found: dict[str, Any] = suite
            measured = f"{found['difference']:+.4f} [{found.get('low', 0.0):+.4f}, {found.get('high', 0.0):+.4f}]"
            said = f"{found.get('class', '')} suite, {found.get('tasks', 0)} tasks: {'passed' if found.get('passed') else 'not passed'}"
            yield name, Cell(text=measured, value=found["difference"], kind="n"), _number(found.get("margin")), said
            if "best_of_k_difference" in found:
                yield _best_of_k(name, found)


def _best_of_k(name: str, suite: Mapping[str, Any]) -> Row:
    """Beside the mean: whether a candidate solves more when it may try again."""
    measured = f"{suite['best_of_k_difference']:+.4f} [{suite['best_of_k_low']:+.4f}, {suite['best_of_k_high']:+.4f}]"
    said = f"{_text(suite.get('champion_best_of_k'))} → {_text(suite.get('candidate_best_of_k'))}; told, not judged"
    return f"{name}, best of {suite.get('samples')}", Cell(text=measured, value=suite["best_of_k_difference"], kind="n"), cell(""), said


def _people(evidence: Mapping[str, Any]) -> Iterator[Row]:
    needed: Mapping[str, Any] = evidence.get("needed") or {}
    yield "votes that count", _number(len(evidence.get("said") or [])), _number(needed.get("votes")), "at least"
    yield "people", _number(evidence.get("people")), _number(needed.get("people")), "at least, none whose credential another one made"
    said = f"[{_text(evidence.get('low'))}, {_text(evidence.get('high'))}], {needed.get('rule', '')}"
    yield "preference", _number(evidence.get("net")), _number(needed.get("above")), f"the whole interval has to lie above: {said}"


def _live(evidence: Mapping[str, Any]) -> Iterator[Row]:
    harm: Mapping[str, Any] = evidence.get("harm") or {}
    if harm:
        found = "found" if harm.get("found") else "not found"
        yield "harm, log E", _number(harm.get("peak_log_e")), _number(harm.get("needed")), f"{found}; it stops the canary at the margin"
    for one in evidence.get("required") or []:
        said = "non-inferior" if one.get("non_inferior") else "not yet shown to be non-inferior"
        margin = Cell(text=f"{_text(one.get('needed'))} (worse by {_text(one.get('margin'))})", value=one.get("needed"), kind="n")
        yield f"{one.get('metric')}, log E", _number(one.get("peak_log_e")), margin, said
    for doubt in evidence.get("doubts") or []:
        yield "data in doubt", cell(""), cell(""), str(doubt)
    live: Mapping[str, Any] = evidence.get("live_aa") or {}
    if live:
        yield "champion against itself", cell(live.get("alarms")), cell(""), str(live.get("told", ""))


def effect_sheet(evidence: Mapping[str, Any]) -> Sheet:
    """Means per arm of every metric at the newest live decision: harm's metrics and the behaviour mix."""
    effects: Mapping[str, Mapping[str, float]] = (evidence.get("harm") or {}).get("effects") or {}
    rows = [
        (
            cell(name), _number(one.get("control")), _number(one.get("treated")),
            _number((one.get("treated") or 0.0) - (one.get("control") or 0.0)), cell(int(one.get("n_control") or 0)),
            cell(int(one.get("n_treated") or 0)),
        )
        for name, one in sorted(effects.items())
    ]  # fmt: skip
    columns = ("metric (good is up)", "champion", "candidate", "difference", "units, champion", "units, candidate")
    return Sheet(name="effects", title="Behaviour and effects, per arm", columns=columns, rows=rows, empty="no live decision yet")


def health_sheet(metrics: Mapping[str, Any]) -> Sheet:
    """Numbers that the run recorded."""
    rows = [(cell(name), _number(value)) for name, value in sorted(metrics.items()) if isinstance(value, int | float)]
    return Sheet(name="training", title="Training run", columns=("figure", "value"), rows=rows, empty="no run is on record")


def _number(value: object) -> Cell:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return cell(value)
    return Cell(text=_text(value), value=value, kind="n")


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"
