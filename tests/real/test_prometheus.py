"""The alert rules decide what they are meant to, as Prometheus itself computes them."""

import subprocess

import pytest

from tests.real.parts import ROOT, debian

PROMETHEUS = ROOT / "infra" / "prometheus"
pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def promtool() -> str:
    """Prometheus' own checker."""
    return debian("promtool", "prometheus")


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=PROMETHEUS, capture_output=True, text=True, check=False)


def test_the_rules_are_rules(promtool: str) -> None:
    checked = run(promtool, "check", "rules", "rules/recording.yml", "rules/alerts.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_fires_on_what_it_is_for_and_is_silent_beside_it(promtool: str) -> None:
    tested = run(promtool, "test", "rules", "tests/alerts.test.yml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_a_rule_that_decides_otherwise_is_found(promtool: str) -> None:
    """The test above sees what it is there for."""
    rules = (PROMETHEUS / "rules" / "alerts.yml").read_text().replace("> 10'", "> 100'")
    broken = PROMETHEUS / "rules" / "alerts.broken.yml"
    cases = (PROMETHEUS / "tests" / "alerts.test.yml").read_text().replace("rules/alerts.yml", "rules/alerts.broken.yml")
    beside = PROMETHEUS / "tests" / "broken.test.yml"
    broken.write_text(rules)
    beside.write_text(cases)
    try:
        tested = run(promtool, "test", "rules", "tests/broken.test.yml")
    finally:
        broken.unlink()
        beside.unlink()
    assert tested.returncode != 0
    assert "RatchetHarm" in tested.stderr + tested.stdout
