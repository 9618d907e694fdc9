"""The lock against the registry: one for all platforms, and what docs/platforms.md says of each."""

import os
import subprocess
import sys

import pytest

from tests.real.parts import ROOT, from_wheels

pytestmark = pytest.mark.real

UV, PACKAGING = "uv==0.13.9", "packaging==26.2"
"""As `make lock` has them."""


def test_the_lock_resolves_for_every_platform_and_every_file_that_it_needs_there_is_a_wheel_with_its_hash() -> None:
    assert f"{UV} {PACKAGING}" in (ROOT / "Makefile").read_text()
    surroundings = {**os.environ, "PYTHONPATH": str(from_wheels("lock", UV, PACKAGING))}
    command = [sys.executable, str(ROOT / "infra" / "lock.py"), "--check"]
    checked = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "Without a wheel: none." in checked.stdout
