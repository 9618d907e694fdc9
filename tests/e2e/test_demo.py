"""The demo with the tiny model is the end-to-end test: it ends with exit code 0 only if all that it promises happened."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.running import ROOT, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def demo(folder: Path) -> tuple["subprocess.CompletedProcess[str]", dict[str, Any]]:
    """It ends by itself: when all has happened, or when nothing moves any more. The limit here is for a demo that does neither."""
    command = [sys.executable, "-m", "pipelines", "demo", "--model", "tiny", "--data", str(folder), "--port", str(free_port()), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False)
    return done, json.loads(done.stdout.strip().splitlines()[-1])


def test_the_demo_promotes_shows_the_gain_catches_the_harm_and_ends_well(tmp_path: Path) -> None:
    done, summary = demo(tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert summary["failures"] == []
    assert summary["promoted"]
    assert summary["persistence"]["low"] > 0
    assert summary["harm"]["state"] in ("ABORTED", "REJECTED", "ROLLED_BACK")
    assert summary["harm"]["requests"] > 0
    assert len(summary["anchor_budget_used"]) == len(summary["promoted"])
    assert all(share < 1 for share in summary["anchor_budget_used"])
    # three answers side by side, and what comes next
    assert done.stdout.count("a held-out question by") == 3
    assert "Connect a product" in done.stdout
    # without a terminal: a line per event, a bar now and then, no boxes
    assert "[#" in done.stdout
    assert not set("│─┌┐└┘┃━") & set(done.stdout)
