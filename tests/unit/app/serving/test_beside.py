"""Several versions' steps at the same time."""

import threading
from collections.abc import Callable

import pytest

from app.serving.beside import Beside


def names(beside: Beside, count: int) -> list[str | Exception]:
    return beside.run([lambda: threading.current_thread().name] * count)


@pytest.mark.parametrize(("cores", "versions"), [(2, 1), (1, 3), (1, 1)])
def test_one_version_or_one_core_is_stepped_by_whoever_asks_with_the_threads_it_has(cores: int, versions: int) -> None:
    told: list[int] = []
    assert names(Beside(cores, use=told.append), versions) == [threading.current_thread().name] * versions
    assert told == []


def test_two_versions_are_stepped_at_the_same_time_and_what_each_gives_keeps_its_place() -> None:
    beside, met = Beside(2), threading.Barrier(2)

    def step(number: int) -> Callable[[], int]:
        def act() -> int:
            met.wait(timeout=20)  # nobody gets past it alone
            return number

        return act

    assert beside.run([step(1), step(2)]) == [1, 2]
    beside.close()


@pytest.mark.parametrize(("cores", "versions", "share"), [(2, 2, 1), (8, 2, 4), (8, 3, 2), (2, 3, 1)])
def test_the_cores_are_shared_out(cores: int, versions: int, share: int) -> None:
    told: list[int] = []
    beside = Beside(cores, use=told.append)
    names(beside, versions)
    beside.close()
    assert told == [share] * versions


@pytest.mark.parametrize("cores", [1, 2])
def test_what_breaks_costs_the_others_nothing(cores: int) -> None:
    beside = Beside(cores)

    def broken() -> int:
        raise RuntimeError("out of memory")

    first, second = beside.run([broken, lambda: 2])
    beside.close()
    assert (str(first), second) == ("out of memory", 2)
