"""Engines that fail are passed over for a while, and none is ever locked out."""

from app.serving.replicas import EJECT_AFTER, FIRST_S, LONGEST_S, Replicas

URLS = ("http://a", "http://b", "http://c")


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def failed(replicas: Replicas, url: str, times: int = EJECT_AFTER) -> None:
    for _ in range(times):
        replicas.failed(url, "ConnectError")


def test_equal_engines_take_turns() -> None:
    replicas = Replicas()
    assert {replicas.ordered(URLS)[0] for _ in URLS} == set(URLS)
    assert replicas.ordered(()) == []


def test_one_failure_more_or_less_is_no_reason() -> None:
    replicas = Replicas(clock=Hand())
    failed(replicas, URLS[0], EJECT_AFTER - 1)
    assert not replicas.ejected(URLS[0])
    replicas.answered(URLS[0])
    failed(replicas, URLS[0], EJECT_AFTER - 1)
    assert not replicas.ejected(URLS[0]), "in a row"


def test_an_ejected_engine_comes_last_and_gets_one_trial_when_its_time_is_over() -> None:
    clock = Hand()
    replicas = Replicas(clock=clock)
    failed(replicas, URLS[1])
    assert [replicas.ordered(URLS)[-1] for _ in range(6)] == [URLS[1]] * 6
    clock.at += FIRST_S
    assert not replicas.ejected(URLS[1])
    replicas.failed(URLS[1], "ConnectError")
    clock.at += FIRST_S
    assert replicas.ejected(URLS[1]), "twice as long the second time"
    clock.at += FIRST_S
    replicas.answered(URLS[1])
    assert replicas.health(URLS[1]).failures == 0


def test_the_time_has_an_end() -> None:
    clock = Hand()
    replicas = Replicas(clock=clock)
    failed(replicas, URLS[0], 50)
    clock.at += LONGEST_S
    assert not replicas.ejected(URLS[0])


def test_one_that_goes_away_is_passed_over_at_once() -> None:
    clock = Hand()
    replicas = Replicas(clock=clock)
    replicas.leaves(URLS[2])
    assert replicas.ordered(URLS)[-1] == URLS[2]
    clock.at += FIRST_S
    assert not replicas.ejected(URLS[2])
