"""Loops that numba compiles: where numpy and torch would go through memory once for each of many small operations.

What is compiled is kept for other processes, beside its module or in the user's cache (`NUMBA_CACHE_DIR`).
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class compiled(Generic[P, R_co]):
    """To machine code that runs without Python's lock, at the first call for arrays of these kinds. numba is imported then and not before:
    it takes a quarter of a second and 60 MB, and most processes that know of weights run no loop."""

    def __init__(self, function: Callable[P, R_co]) -> None:
        self._function = function

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R_co:
        """Call it."""
        return self.dispatcher(*arguments, **named)

    @cached_property
    def dispatcher(self) -> Any:  # noqa: ANN401 - numba has no types
        """As numba has it; `signatures` and `stats` say what it compiled and what it found."""
        from numba import njit  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType] - the same

        try:
            return njit(nogil=True, cache=True)(self._function)
        except RuntimeError:  # neither beside its module nor in a user's cache can a file be written
            return njit(nogil=True)(self._function)

    @property
    def _numba_type_(self) -> Any:  # noqa: ANN401 - the same
        """What numba asks of it where another loop calls this one."""
        return self.dispatcher._numba_type_


def prepared(loop: compiled[P, object], *arguments: P.args, **named: P.kwargs) -> None:
    """Have a loop compiled for arrays of these kinds, or fetched: either holds Python's lock, a second or a tenth of one."""
    try:
        loop(*arguments, **named)
    except Exception:  # noqa: BLE001 - what was kept is damaged (a machine lost its power), or cannot be kept (its disk is full)
        of_numba = loop.dispatcher
        for file in Path(of_numba.stats.cache_path).glob(f"{Path(of_numba.py_func.__code__.co_filename).stem}.*.nb?"):
            file.unlink(missing_ok=True)
        with suppress(OSError):  # compiled all the same
            loop(*arguments, **named)
