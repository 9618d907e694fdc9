"""Loops that numba compiles: where numpy and torch would go through memory once for each of many small operations.

What is compiled is kept for other processes, beside its module or in the user's cache (`NUMBA_CACHE_DIR`).
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from numba import njit  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType] - it has no types

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """To machine code that runs without Python's lock, at the first call for arrays of these kinds."""
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # neither beside its module nor in a user's cache can a file be written
        return njit(nogil=True, error_model="numpy")(function)


def prepared(loop: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> None:
    """Have a loop compiled for arrays of these kinds, or fetched: either holds Python's lock, a second or a tenth of one."""
    try:
        loop(*arguments, **named)
    except Exception:  # noqa: BLE001 - what was kept is damaged (a machine lost its power), or cannot be kept (its disk is full)
        of_numba = cast("Any", loop)
        for file in Path(of_numba.stats.cache_path).glob(f"{Path(of_numba.py_func.__code__.co_filename).stem}.*.nb?"):
            file.unlink(missing_ok=True)
        with suppress(OSError):  # compiled all the same
            loop(*arguments, **named)
