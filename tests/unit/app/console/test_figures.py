"""What a gate measured, as rows for people."""

from datetime import UTC, datetime
from typing import Any

from app.console.views.figures import gate_sheet
from app.domain.release.gates import GateName
from app.domain.views.rows import GateRow


def row(gate: GateName, evidence: dict[str, Any]) -> GateRow:
    return GateRow(
        gate=gate, verdict="pass", reason="as good", action="", evidence=evidence, decided_at=datetime(2026, 11, 22, 12, tzinfo=UTC)
    )  # fmt: skip


def test_best_of_k_stands_below_the_mean_of_its_suite() -> None:
    suite = {
        "difference": 0.01, "low": -0.02, "high": 0.04, "margin": 0.05, "class": "core", "tasks": 164, "passed": True, "samples": 4,
        "champion_best_of_k": 0.5, "candidate_best_of_k": 0.625,
        "best_of_k_difference": 0.125, "best_of_k_low": 0.05, "best_of_k_high": 0.2,
    }  # fmt: skip
    shown = [[cell.text for cell in line] for line in gate_sheet([row(GateName.OFFLINE, {"coding": suite, "sandbox": {"a": 1}})]).rows]
    assert [line[2] for line in shown] == ["in a sentence", "coding", "coding, best of 4"]
    assert shown[1][3:6] == ["+0.0100 [-0.0200, +0.0400]", "0.05", "core suite, 164 tasks: passed"]
    assert shown[2][3:6] == ["+0.1250 [+0.0500, +0.2000]", "", "0.5 → 0.625; told, not judged"]


def test_evidence_from_before_there_was_a_best_of_k_is_shown_as_it_is() -> None:
    shown = gate_sheet([row(GateName.SEALED, {"coding": {"difference": 0.0, "margin": 0.05}})]).rows
    assert [line[2].text for line in shown] == ["in a sentence", "coding"]
