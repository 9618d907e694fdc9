"""Alerts, runbooks and dashboards name metrics that exist, and each other; what the rules decide is tested with promtool (tests/real)."""

import importlib.util
import json
import re
from typing import Any

import jsonschema
import pytest
import yaml

from app.telemetry.catalogue import CATALOGUE, Kind
from pipelines.__main__ import COMMANDS, ratchet
from tests.architecture.sources import ROOT

PROMETHEUS, RUNBOOKS, GRAFANA = ROOT / "infra" / "prometheus", ROOT / "docs" / "runbooks", ROOT / "infra" / "grafana"
SERIES = {
    series
    for name, described in CATALOGUE.items()
    for series in ([name] if described.kind is not Kind.HISTOGRAM else [f"{name}_bucket", f"{name}_sum", f"{name}_count"])
}
OTHERS = {"up", "process_resident_memory_bytes"}
PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos", "targets", "datasource", "fieldConfig"],
    "properties": {
        "type": {"enum": ["stat", "timeseries"]},
        "gridPos": {
            "type": "object",
            "properties": {"x": {"minimum": 0, "maximum": 23}, "w": {"minimum": 1, "maximum": 24}},
            "required": ["x", "y", "w", "h"],
        },
        "targets": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["refId", "expr", "datasource"]}},
    },
}
DASHBOARD = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "panels", "templating", "time"],
    "properties": {"panels": {"type": "array", "items": PANEL}, "uid": {"type": "string", "maxLength": 40}},
}


def rules(file: str) -> list[dict[str, Any]]:
    loaded = yaml.safe_load((PROMETHEUS / "rules" / file).read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


RECORDED = {rule["record"] for rule in rules("recording.yml")}
ALERTS = {rule["alert"]: rule for rule in rules("alerts.yml")}


def metrics_in(expression: str) -> set[str]:
    """Names of series in PromQL: what stands before a selector, a bracket or an operator, and is no function, label or keyword."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\b(?:by|without|on|offset)\s*\([^)]*\)', "", expression)
    return set(re.findall(r"\b((?:ratchet|gen_ai|process)[a-z0-9_:]+|up)\b", bare))


@pytest.mark.parametrize("rule", [*rules("recording.yml"), *ALERTS.values()], ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_reads_metrics_that_are_shown(rule: dict[str, Any]) -> None:
    assert metrics_in(rule["expr"]) <= SERIES | RECORDED | OTHERS


def test_every_alert_has_its_page_and_every_page_its_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"} == ALERTS.keys()
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook"] == f"docs/runbooks/{name}.md"
        page = (RUNBOOKS / f"{name}.md").read_text()
        assert all(heading in page for heading in ("## Look", "## Do", "**It ends**")), name
        assert f"**When:** `{rule['expr']}`" in page, f"{name}: the page tells another rule"
        assert f"[{name}]({name}.md) | {rule['labels']['severity']}" in (RUNBOOKS / "README.md").read_text()


def test_every_alert_is_tested_on_what_it_is_for_and_beside_it() -> None:
    cases = yaml.safe_load((PROMETHEUS / "tests" / "alerts.test.yml").read_text())["tests"]
    fires = {t["alertname"] for case in cases for t in case["alert_rule_test"] if t["exp_alerts"]}
    silent = {t["alertname"] for case in cases for t in case["alert_rule_test"] if not t["exp_alerts"]}
    assert (fires, silent) == (ALERTS.keys(), ALERTS.keys() - {"RatchetWatchdog"})


def test_the_commands_of_the_runbooks_exist() -> None:
    for path in RUNBOOKS.glob("*.md"):
        for first, second in re.findall(r"`ratchet ([a-z]+) ?([a-z-]*)", path.read_text()):
            assert first in COMMANDS, f"{path.name}: ratchet {first}"
            command = ratchet.get_command(None, first)  # type: ignore[arg-type] - the table needs no context
            assert not second or second in getattr(command, "commands", {}), f"{path.name}: ratchet {first} {second}"


@pytest.mark.parametrize("name", ["overview", "engines"])
def test_a_dashboard_is_what_the_code_says_and_reads_metrics_that_are_shown(name: str) -> None:
    spec = importlib.util.spec_from_file_location("dashboards", GRAFANA / "dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    text = (GRAFANA / f"{name}.json").read_text()
    assert code.written()[GRAFANA / f"{name}.json"] == text, "run python infra/grafana/dashboards.py"
    dashboard = json.loads(text)
    jsonschema.validate(dashboard, DASHBOARD)
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert {metric for expression in expressions for metric in metrics_in(expression)} <= SERIES | RECORDED | OTHERS
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in dashboard["panels"])
