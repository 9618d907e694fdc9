"""Engines that fail are passed over for a while, and none is ever locked out."""

from app.domain.ports import Holder
from app.serving.replicas import EJECT_AFTER, FIRST_S, LONGEST_S, Replicas, far_from

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


def test_those_that_are_far_come_after_the_others_and_before_ejected_ones() -> None:
    replicas = Replicas(clock=Hand())
    assert {tuple(replicas.ordered(URLS, far={URLS[1]})) for _ in range(6)} == {(URLS[0], URLS[2], URLS[1]), (URLS[2], URLS[0], URLS[1])}
    failed(replicas, URLS[0])
    assert {tuple(replicas.ordered(URLS, far=URLS[1:])) for _ in range(6)} == {(URLS[1], URLS[2], URLS[0]), (URLS[2], URLS[1], URLS[0])}


def test_far_is_who_stands_in_another_region_for_whoever_stands_in_one() -> None:
    holders = {"a": Holder(region="eu"), "b": Holder(region="us"), "c": Holder()}
    assert (far_from("", holders), far_from("eu", holders)) == (set(), {"b", "c"})


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


def test_after_three_failures_in_a_row_the_time_doubles_from_one_second_to_thirty() -> None:
    clock, waited = Hand(), list[float]()
    replicas = Replicas(clock=clock)
    for _ in range(9):
        replicas.failed(URLS[0], "ConnectError")
        waited.append(max(0.0, replicas.health(URLS[0]).until - clock.at))
        clock.at += 100.0
    assert waited == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert (replicas.health(URLS[0]).failures, replicas.health(URLS[0]).fault) == (9, "ConnectError")


def test_an_engine_that_fails_for_hours_stays_ejected_and_breaks_nobody() -> None:
    clock = Hand()
    replicas = Replicas(clock=clock)
    for _ in range(2_000):
        replicas.failed(URLS[0], "ConnectError")
        assert replicas.health(URLS[0]).until <= clock.at + 30.0
        clock.at += 100.0
    assert replicas.health(URLS[0]).failures == 2_000


def test_one_that_is_silent_is_ejected_at_once_and_the_second_time_for_twice_as_long() -> None:
    clock, waited = Hand(), list[float]()
    replicas = Replicas(clock=clock)
    for _ in range(3):
        replicas.silent(URLS[0], "nothing heard")
        waited.append(replicas.health(URLS[0]).until - clock.at)
    assert waited == [1.0, 2.0, 4.0]
    replicas.leaves(URLS[1])
    assert (replicas.health(URLS[1]).until, replicas.health(URLS[1]).failures) == (101.0, 0)
    assert replicas.health(URLS[1]).fault == "it is going away"
    clock.at = 100.999
    assert replicas.ejected(URLS[1])
    clock.at = 101.0
    assert not replicas.ejected(URLS[1])


def test_of_one_that_was_never_asked_nothing_bad_is_known_and_turns_go_round() -> None:
    replicas = Replicas(clock=Hand())
    assert (replicas.health("http://x").failures, replicas.health("http://x").until, replicas.health("http://x").fault) == (0, 0.0, None)
    assert [replicas.ordered(URLS)[0] for _ in range(4)] == [URLS[1], URLS[2], URLS[0], URLS[1]]
    assert replicas.ordered(URLS) == [URLS[2], URLS[0], URLS[1]]
