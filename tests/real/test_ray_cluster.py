"""Training on a Ray cluster of two machines that share no folder, one of which is killed in mid-update (`make bench-cluster`)."""

import subprocess
from pathlib import Path

import pytest

from tests.bench import cluster
from tests.bench.training_cluster.machines import HOMES, refusal
from tests.real.parts import missing

pytestmark = [pytest.mark.real, pytest.mark.machine, pytest.mark.timeout(1800)]


def test_an_update_survives_one_of_two_machines_and_nothing_is_left_of_them() -> None:
    if (why := refusal()) is not None:
        missing("machines of a Ray cluster", why)
    found = cluster.measure()
    assert not cluster.missed(found), found
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert "-ray-" not in spaces
    assert not list(Path("/tmp").glob(f"{HOMES}*"))
