"""What a worker knows of its own machine."""

from pipelines.training.ray_cluster import interface_of


def test_the_interface_of_an_address_is_found_by_the_address() -> None:
    """gloo and NCCL are told it: what a host's own name resolves to is loopback on many machines."""
    assert (interface_of("127.0.0.1") or "").startswith("lo")
    assert interface_of("192.0.2.7") is None
