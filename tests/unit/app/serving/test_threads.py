"""How many threads a decoding step takes, on a clock of our own."""

from collections.abc import Callable, Mapping

import pytest

from app.serving.threads import EVERY_S, Threads


class Machine:
    """Seconds a fed token takes with so many threads; they may change meanwhile."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self.seconds, self.now, self.count = seconds, 0.0, 0
        self.used: list[int] = []

    def use(self, count: int) -> None:
        self.count = count

    def step(self, fed: int = 8) -> Callable[[], int]:
        def act() -> int:
            self.used.append(self.count)
            self.now += max(fed, 1) * self.seconds[self.count]
            return fed

        return act


def run(threads: Threads, machine: Machine, *, seconds: float, fed: int = 8) -> list[int]:
    """The numbers that were used, step by step."""
    machine.used.clear()
    until = machine.now + seconds
    while machine.now < until:
        threads.round(machine.step(fed))
    return machine.used


def started(machine: Machine, most: int) -> Threads:
    threads = Threads(most, use=machine.use, clock=lambda: machine.now)
    threads.begin()
    return threads


def test_all_cores_are_used_while_they_are_faster() -> None:
    machine = Machine({1: 0.003, 2: 0.002})
    used = run(threads := started(machine, 2), machine, seconds=60)
    assert threads.count == 2
    assert used.count(1) / len(used) < 0.05


def test_one_thread_takes_over_while_others_want_the_cores_and_all_do_again_afterwards() -> None:
    machine = Machine({1: 0.003, 2: 0.002})
    threads = started(machine, 2)
    run(threads, machine, seconds=2 * EVERY_S)
    machine.seconds = {1: 0.004, 2: 0.006}
    run(threads, machine, seconds=2 * EVERY_S)
    assert threads.count == 1
    machine.seconds = {1: 0.003, 2: 0.002}
    run(threads, machine, seconds=2 * EVERY_S)
    assert threads.count == 2


def test_a_difference_of_little_adds_no_thread() -> None:
    machine = Machine({1: 0.001, 2: 0.002})
    run(threads := started(machine, 2), machine, seconds=1)
    machine.seconds = {1: 0.002, 2: 0.0019}
    run(threads, machine, seconds=60)
    assert threads.count == 1


@pytest.mark.parametrize("most", [3, 6, 8])
def test_of_many_cores_the_best_number_is_found_step_by_step(most: int) -> None:
    machine = Machine({count: 0.001 * (1 + abs(count - 2)) for count in range(1, most + 1)})
    run(threads := started(machine, most), machine, seconds=10 * EVERY_S)
    assert threads.count == 2


def test_rounds_that_say_nothing_decide_nothing() -> None:
    machine = Machine({1: 0.001, 2: 0.002})
    run(threads := started(machine, 2), machine, seconds=60, fed=0)
    assert threads.count == 2


def test_rounds_with_prompts_between_the_others_are_passed_over() -> None:
    machine = Machine({1: 0.003, 2: 0.002})
    threads = started(machine, 2)

    def prompt() -> int:
        machine.used.append(machine.count)
        machine.now += 0.0001  # by the token, quicker than anything
        return 0

    for _ in range(400):
        threads.round(prompt if machine.count == 1 and len(machine.used) % 3 else machine.step())
    assert threads.count == 2
    assert {1, 2} == set(machine.used)


def test_of_a_numbers_rounds_the_slowest_does_not_count() -> None:
    """One of four with two threads takes ten times as long: the others are faster than those with one."""
    machine = Machine({1: 0.003, 2: 0.002})
    threads, disturbed = started(machine, 2), iter([False, False, True])

    def act() -> int:
        machine.now += 8 * machine.seconds[machine.count] * (10 if machine.count == 2 and next(disturbed, False) else 1)
        return 8

    for _ in range(20):
        threads.round(act)
    assert threads.count == 2


def test_a_step_that_breaks_is_not_the_end() -> None:
    machine = Machine({1: 0.001, 2: 0.002})
    threads = started(machine, 2)

    def broken() -> int:
        raise RuntimeError("out of memory")

    for _ in range(4):
        with pytest.raises(RuntimeError, match="out of memory"):
            threads.round(broken)
    run(threads, machine, seconds=2 * EVERY_S)
    assert threads.count == 1


def test_one_core_is_left_alone() -> None:
    machine = Machine({1: 0.001})
    threads = started(machine, 1)
    run(threads, machine, seconds=1)
    assert set(machine.used) == {1}


def test_four_rounds_each_are_compared_turn_and_turn_about_and_again_after_five_seconds() -> None:
    machine = Machine({1: 0.003, 2: 0.002})
    threads = started(machine, 2)
    used = list(run(threads, machine, seconds=6.0))
    assert used[:9] == [2, *[1, 2] * 4], "behind a round without a prompt"
    # a round with two threads takes 8 · 2 ms: 313 of them are the first to last five seconds
    assert used[9:322] == [2] * 313
    assert used[322:330] == [1, 2] * 4


def test_of_three_neighbours_each_has_its_four_rounds() -> None:
    machine = Machine({1: 0.004, 2: 0.002, 4: 0.0019, 8: 0.003})
    threads = started(machine, 8)
    assert list(run(threads, machine, seconds=0.19))[:9] == [8, *[4, 8] * 4]
    assert threads.count == 4, "0.0019 is far below nine tenths of 0.003"
    machine.now += 5.0
    assert list(run(threads, machine, seconds=0.2))[:9] == [2, 4, 8] * 3


@pytest.mark.parametrize(("seconds", "count"), [(0.00179, 2), (0.00181, 1)])
def test_more_threads_take_over_below_nine_tenths(seconds: float, count: int) -> None:
    machine = Machine({1: 0.002, 2: 0.002})
    run(threads := started(machine, 2), machine, seconds=1.0)
    assert threads.count == 1
    machine.seconds = {1: 0.002, 2: seconds}
    run(threads, machine, seconds=2 * EVERY_S)
    assert threads.count == count


@pytest.mark.parametrize(("seconds", "count"), [(0.002, 1), (0.00201, 2)])
def test_fewer_threads_take_over_when_they_are_no_slower(seconds: float, count: int) -> None:
    machine = Machine({1: seconds, 2: 0.002})
    run(threads := started(machine, 2), machine, seconds=1.0)
    assert threads.count == count


def test_forty_rounds_in_which_too_little_was_decoded_end_a_comparison() -> None:
    machine = Machine({1: 0.001, 2: 0.002})
    threads = started(machine, 2)
    run(threads, machine, seconds=0.001)
    machine.used.clear()
    for _ in range(60):
        threads.round(machine.step(0))
    assert machine.used == [1, *[2] * 59], "prompts are fed by the number in use, but the first, which nobody foresees"
    threads.round(machine.step())
    threads.round(machine.step(0))
    assert machine.used[-1] == 2, "forty were enough"
    assert threads.count == 2


def test_prompts_that_come_in_a_row_are_fed_on_as_many_threads_as_before() -> None:
    """Answers to eight prompts, again and again, whose first tokens take as long as all the others."""
    machine = Machine({1: 0.003, 2: 0.002})
    threads = started(machine, 2)
    feeding = list[int]()
    for _ in range(50):
        for number in range(40):
            if number < 8:
                threads.round(machine.step(0))
                feeding.append(machine.count)
            else:
                threads.round(machine.step(32))
    assert threads.count == 2
    assert 1 in machine.used, "it is tried nonetheless"
    assert feeding.count(1) <= 50, "the first of a row at most"
