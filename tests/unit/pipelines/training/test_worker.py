"""What a worker knows of its own machine."""

import resource

import pytest

from pipelines.training.ray_cluster import interface_of
from pipelines.training.worker import TrainingWorker


def test_the_interface_of_an_address_is_found_by_the_address() -> None:
    """gloo and NCCL are told it: what a host's own name resolves to is loopback on many machines."""
    assert (interface_of("127.0.0.1") or "").startswith("lo")
    assert interface_of("192.0.2.7") is None


def test_its_peak_is_told_in_bytes() -> None:
    peak = TrainingWorker(0, 1).peak_memory_bytes()
    assert peak == pytest.approx(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, rel=0.01)
