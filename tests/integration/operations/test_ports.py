"""A deployment's ports: free ones, refused in words where a person named a taken one, never those of one that starts beside it."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from app.domain.errors import BadConfig
from pipelines.preflight import ClaimedPort, choose_port

HOST = "127.0.0.1"


@pytest.fixture
def choose() -> Iterator[Callable[[int], ClaimedPort]]:
    """Chooses a port that nobody insists on, and gives it back after the test; 0 for any."""
    with ExitStack() as claims:

        def chosen(wanted: int) -> ClaimedPort:
            port = choose_port(HOST, wanted, insisted=False)
            claims.enter_context(port.claim)
            return port

        yield chosen


def test_two_deployments_that_start_in_the_same_second_choose_different_ports(choose: Callable[[int], ClaimedPort]) -> None:
    first = choose(0)  # nothing listens there yet
    assert choose(first.number).number != first.number


def test_a_claim_ends_with_its_holder(choose: Callable[[int], ClaimedPort]) -> None:
    first = choose(0)
    first.claim.close()
    assert choose(first.number).number == first.number


def test_a_taken_port_is_replaced_unless_a_person_named_it(choose: Callable[[int], ClaimedPort]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((HOST, 0))
        listener.listen()
        taken = listener.getsockname()[1]
        assert choose(taken).number != taken
        with pytest.raises(BadConfig, match="choose another with --port"):
            choose_port(HOST, taken, insisted=True)
