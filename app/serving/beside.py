"""Steps of several versions at the same time, each on a thread with its share of the cores.

One after the other they would take turns on all cores, and a step of few rows gains little from a second one: 24 rows of SmolLM2 take 70 ms
on one thread and 69 to 105 on two, by what else runs. Beside each other two versions take as long as the slower one; the bits are the same.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class Beside:
    """For the thread that decodes: it waits until all have taken their step."""

    def __init__(self, cores: int, *, use: Callable[[int], None] = torch.set_num_threads) -> None:
        self._cores, self._use = cores, use
        self._threads: ThreadPoolExecutor | None = None

    def run(self, steps: Sequence[Callable[[], T]]) -> list[T | Exception]:
        """Take all steps; what each gave or raised, in their order. One alone, or on one core, is taken on the thread that asks."""
        if len(steps) < 2 or self._cores < 2:
            return [_tried(step) for step in steps]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._cores, thread_name_prefix="engine-beside")
        share = max(1, self._cores // len(steps))
        return list(self._threads.map(lambda step: self._with(share, step), steps))

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()

    def _with(self, threads: int, step: Callable[[], T]) -> T | Exception:
        self._use(threads)  # torch keeps the number per thread
        return _tried(step)


def _tried(step: Callable[[], T]) -> T | Exception:
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - whoever asked decides
        return error
