"""Waits for the first token: how many wait, and the 95th percentile of the last ten seconds."""

from app.api.pressure import Waits


class Clock:
    """Seconds by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_of_twenty_waits_the_second_longest_is_the_95th_percentile() -> None:
    clock = Clock()
    waits = Waits(now=clock)
    for n in range(20):
        waits.begin(f"i{n}", "composer")
    for n in range(20):
        clock.now = 100.0 + n / 10
        waits.end(f"i{n}")
    assert waits.read("composer") == {"waiting": 0, "first_token_p95_s": 1.9000000000000057}  # place 19 of 0 … 19
    assert waits.read("other") == {"waiting": 0, "first_token_p95_s": None}


def test_who_still_waits_has_waited_that_long_at_least_and_policies_are_told_apart() -> None:
    clock = Clock()
    waits = Waits(now=clock)
    waits.begin("a", "composer")
    clock.now += 2
    waits.begin("b", "tab")
    clock.now += 1
    assert waits.read("composer") == {"waiting": 1, "first_token_p95_s": 3.0}
    assert waits.read("tab") == {"waiting": 1, "first_token_p95_s": 1.0}
    assert waits.read(None) == {"waiting": 2, "first_token_p95_s": 3.0}
    waits.end("a")
    waits.end("a")
    waits.end("never began")
    assert waits.read("composer") == {"waiting": 0, "first_token_p95_s": 3.0}


def test_a_wait_is_remembered_for_ten_seconds() -> None:
    clock = Clock()
    waits = Waits(now=clock)
    waits.begin("a", "composer")
    clock.now += 0.5
    waits.end("a")
    clock.now += 10.0
    assert waits.read(None)["first_token_p95_s"] == 0.5
    clock.now += 0.1
    assert waits.read(None)["first_token_p95_s"] is None


def test_of_many_waits_the_newest_two_thousand_count() -> None:
    """Place 1900 of 2,000 is the first that is two seconds long; with the oldest among them it would be the last of one second."""
    clock = Clock()
    waits = Waits(now=clock)
    for wait, count in ((0.0, 1), (1.0, 1900), (2.0, 100)):
        for n in range(count):
            waits.begin(f"{wait} {n}", "composer")
        clock.now += wait
        for n in range(count):
            waits.end(f"{wait} {n}")
    assert waits.read("composer") == {"waiting": 0, "first_token_p95_s": 2.0}
