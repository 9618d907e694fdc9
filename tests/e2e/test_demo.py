"""The demo with the tiny model is the end-to-end test: it ends with exit code 0 only if all that it promises happened."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.running import ROOT, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1000)]


def demo(folder: Path, seed: int) -> tuple["subprocess.CompletedProcess[str]", dict[str, Any]]:
    command = [sys.executable, "-m", "pipelines", "demo", "--model", "tiny", "--data", str(folder), "--port", str(free_port())]
    patient = ["--minutes", "7"]  # a busy machine may take longer than the three minutes of an idle one; it may not come out differently
    command += [*patient, "--seed", str(seed), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=480, check=False)
    return done, json.loads(done.stdout.strip().splitlines()[-1])


def test_the_demo_promotes_twice_shows_the_gain_catches_the_harm_and_ends_well(tmp_path: Path) -> None:
    done, summary = demo(tmp_path / "first", 1)
    if summary["failures"]:
        # Its promises are statistical (an interval that excludes zero, a gate that may stay inconclusive): one miss is told, two fail.
        print(f"first population missed: {summary['failures']}")  # noqa: T201 - shown by pytest where the second one fails as well
        done, summary = demo(tmp_path / "second", 2)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert summary["failures"] == []
    assert len(summary["promoted"]) >= 2
    assert summary["persistence"]["low"] > 0
    assert summary["harm"]["state"] in ("ABORTED", "REJECTED", "ROLLED_BACK")
    assert summary["harm"]["requests"] > 0
    assert len(summary["anchor_budget_used"]) >= 2
    assert all(share < 1 for share in summary["anchor_budget_used"])
