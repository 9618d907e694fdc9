"""Grafana dashboards as code: `python infra/grafana/dashboards.py` writes overview.json and engines.json beside this file.

Every metric in them is one of docs/metrics.md, or recorded in infra/prometheus/rules; a test holds them to that and to what is written.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 24, 8


@dataclass(frozen=True)
class Panel:
    """One graph, or with `number` one figure."""

    title: str
    says: str
    queries: tuple[tuple[str, str], ...]
    """PromQL and legend."""
    unit: str = "short"
    number: bool = False
    columns: int = 8


OF = "{{policy}}"
P = '{policy=~"$policy"}'
SWAPS = "sum by (le) (rate(ratchet_engine_swap_seconds_bucket[6h]))"


def steps(part: str) -> str:
    """A rate over the steps of cycles."""
    return f"sum by (step) (rate(ratchet_loop_step_seconds_{part}{P}[6h]))"


OVERVIEW = (
    Panel("Database", "1 while it answers the api.", (("max(ratchet_database_up)", ""),), number=True, columns=4),
    Panel("Waits for a standby", "0: a 202 means one machine.", (("max(ratchet_database_synchronous)", ""),), number=True, columns=4),
    Panel("Relay in office", "1 while one holds the lease.", (("max(ratchet_relay_in_office)", ""),), number=True, columns=4),
    Panel("Since the last backup", "", (("max(ratchet_backup_age_seconds)", ""),), "s", number=True, columns=4),
    Panel("Since the last drill", "", (("max(ratchet_drill_age_seconds)", ""),), "s", number=True, columns=4),
    Panel("Open alarms", "", (("sum(max by (policy, kind) (ratchet_alarms_open)) or vector(0)", ""),), number=True, columns=4),
    Panel("Turns served", "By arm.", ((f"ratchet:turns_served:rate5m{P}", "{{policy}} {{arm}}"),), "reqps"),
    Panel("Whole answers, p99", "", ((f"ratchet:answers:p99_5m{P}", OF),), "s"),
    Panel("First token, p99", "", ((f"ratchet:first_token:p99_5m{P}", OF),), "s"),
    Panel(
        "Events at the door", "By answer.", (("sum by (status) (rate(ratchet_api_events_total[5m]))", "{{status}}"),
        ("sum by (code) (rate(ratchet_api_refused_total[5m]))", "refused {{code}}")), "reqps",
    ),
    Panel(
        "Backlog", "Accepted and not applied; due and not labelled.",
        (("max(ratchet_inbox_unsent)", "unsent"), ("max(ratchet_inbox_unapplied)", "unapplied"), ("max(ratchet_stream_lag)", "in Kafka"),
         ("max(ratchet_labels_due)", "labels due"), ("max(ratchet_observations_parked)", "parked"), ("max(ratchet_dead_letters)", "dead")),
    ),
    Panel("Oldest event not applied", "", (("ratchet:inbox_age:seconds", "age"),), "s"),
    Panel(
        "Streams", "Rows per second.", (("sum(rate(ratchet_relay_sent_total[5m]))", "relayed"),
        ("sum(rate(ratchet_ingest_applied_total[5m]))", "applied"), ("sum(rate(ratchet_label_labelled_total[5m]))", "labelled")), "reqps",
    ),
    Panel("Cycles", "By what became of them.", ((f"max by (policy, status) (ratchet_cycles_total{P})", "{{policy}} {{status}}"),)),
    Panel("Held in a row", "", ((f"max by (policy) (ratchet_cycles_held_in_a_row{P})", OF),)),
    Panel(
        "Evidence of harm", "1 is none, 10 warns.", ((f"max by (policy, subject) (ratchet_harm_e_value{P})", "{{policy}} {{subject}}"),)
    ),
    Panel("Releases", "By state.", ((f"max by (policy, state) (ratchet_releases{P})", "{{policy}} {{state}}"),)),
    Panel(
        "Rollbacks, and until approval expires", "",
        ((f"max by (policy) (ratchet_rollbacks_total{P})", "{{policy}} rollbacks"),
         (f"min by (policy) (ratchet_approval_expires_seconds{P}) / 3600", "{{policy}} hours left")),
    ),
    Panel("Engine against trainer", "KL per token; the update refuses at 0.01.", ((f"max by (policy) (ratchet_run_mismatch{P})", OF),)),
    Panel("Effective sample size", "", ((f"max by (policy) (ratchet_run_effective_share{P})", OF),), "percentunit"),
    Panel("Way from the anchor", "Share of its budget.", ((f"max by (policy) (ratchet_run_anchor_budget_used{P})", OF),), "percentunit"),
    Panel("A cycle's steps, mean", "", (
        (f"{steps('sum')} / {steps('count')}", "{{step}}"),
    ), "s"),
    Panel("Long work", "", ((f"max by (policy, task) (ratchet_progress_ratio{P})", "{{policy}} {{task}}"),), "percentunit"),
    Panel("Clock skew", "", (("ratchet_clock_skew_seconds", "{{instance}}"),), "s"),
)  # fmt: skip
ENGINES = (
    Panel("Hold the champion", "", ((f"max by (policy) (ratchet_engines_holding_champion{P})", OF),), number=True, columns=6),
    Panel("Mismatched", "", ((f"max by (policy) (ratchet_engines_mismatched{P})", OF),), number=True, columns=6),
    Panel("Full", "", (("ratchet:engine_load:ratio", ""),), "percentunit", number=True, columns=6),
    Panel("Tokens", "", ((f"ratchet:tokens:rate5m{P}", "{{policy}} {{type}}"),), "short", number=True, columns=6),
    Panel("Load", "Answers in hand.", (("ratchet_engine_load", "{{instance}}"), ("ratchet_engine_capacity", "{{instance}} most"))),
    Panel("Sampled tokens", "", (("rate(ratchet_engine_sampled_tokens_total[5m])", "{{instance}}"),), "short"),
    Panel("Versions", "By state.", (("sum by (instance, state) (ratchet_engine_versions)", "{{instance}} {{state}}"),)),
    Panel(
        "Wanted to ready, p90", "", ((f"histogram_quantile(0.9, {SWAPS})", "p90"),), "s"
    ),
    Panel("GPU memory", "", (("ratchet_engine_gpu_memory_bytes", "{{instance}} {{device}} {{kind}}"),), "bytes"),
    Panel("Resident memory", "", (('process_resident_memory_bytes{job=~"ratchet.*"}', "{{job}} {{instance}}"),), "bytes"),
    Panel(
        "Regions behind", "For how long none of a region's engines has held the champion.",
        ((f"max by (policy, region) (ratchet_region_lag_seconds{P})", "{{policy}} {{region}}"),), "s",
    ),
    Panel(
        "Control plane silent", "As regions say it.",
        (("max by (region, part) (ratchet_control_plane_silent_seconds)", "{{region}} {{part}}"),), "s",
    ),
)  # fmt: skip
DASHBOARDS = {"overview": ("Ratchet: the loop", OVERVIEW), "engines": ("Ratchet: engines", ENGINES)}


def dashboard(uid: str, title: str, panels: tuple[Panel, ...]) -> dict[str, Any]:
    """A dashboard as Grafana imports it (schema 39, Grafana 10 and later)."""
    return {
        "uid": f"ratchet-{uid}", "title": title, "schemaVersion": 39, "version": 1, "editable": False, "refresh": "30s",
        "tags": ["ratchet"], "time": {"from": "now-24h", "to": "now"}, "timezone": "utc", "annotations": {"list": []},
        "templating": {"list": [_source(), _policy()]}, "panels": _placed(panels),
    }  # fmt: skip


def _source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _policy() -> dict[str, Any]:
    query = "label_values(ratchet_pointer_generation, policy)"
    return {
        "name": "policy", "type": "query", "datasource": SOURCE, "query": query, "definition": query, "refresh": 2, "multi": True,
        "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def _placed(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    """From left to right, row after row."""
    placed: list[dict[str, Any]] = []
    x = y = 0
    for number, panel in enumerate(panels, start=1):
        height = HEIGHT // 2 if panel.number else HEIGHT
        if x + panel.columns > WIDTH:
            x, y = 0, y + int(placed[-1]["gridPos"]["h"])
        placed.append(_panel(number, panel, {"x": x, "y": y, "w": panel.columns, "h": height}))
        x += panel.columns
    return placed


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend or "__auto", "datasource": SOURCE}
        for index, (expression, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number, "type": "stat" if panel.number else "timeseries", "title": panel.title, "description": panel.says,
        "datasource": SOURCE, "gridPos": place, "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []}, "targets": targets,
    }  # fmt: skip


def written() -> dict[Path, str]:
    """What is to stand in the files."""
    return {
        FOLDER / f"{name}.json": json.dumps(dashboard(name, title, panels), indent=1) + "\n" for name, (title, panels) in DASHBOARDS.items()
    }


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text)
