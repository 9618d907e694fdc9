"""Loops that numba compiles: where numpy and torch would go through memory once for each of many small operations.

What is compiled is kept for other processes, beside its module or in the user's cache (`NUMBA_CACHE_DIR`).
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

SOURCES = ("policy/compiling.py", "policy/decoding/packed", "policy/packing", "policy/storage/delta_loops.py")
"""Where loops are written, and what they are made of."""

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class compiled(Generic[P, R_co]):
    """To machine code that runs without Python's lock, at the first call for arrays of these kinds. numba is imported then and not before:
    it takes a quarter of a second and 60 MB, and most processes that know of weights run no loop."""

    known: ClassVar[list["compiled[..., Any]"]] = []

    def __init__(self, function: Callable[P, R_co]) -> None:
        self._function = function
        self.known.append(self)

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R_co:
        """Call it."""
        return self.dispatcher(*arguments, **named)

    @cached_property
    def dispatcher(self) -> Any:  # noqa: ANN401 - numba has no types
        """As numba has it; `signatures` and `stats` say what it compiled and what it found."""
        from numba import njit  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType] - the same

        try:
            found: Any = njit(nogil=True, cache=True, error_model="numpy")(self._function)
        except RuntimeError:  # neither beside its module nor in a user's cache can a file be written
            return njit(nogil=True, error_model="numpy")(self._function)
        found._cache._cache_file._source_stamp = _digest(Path(self._function.__code__.co_filename))
        return found

    @property
    def _numba_type_(self) -> Any:  # noqa: ANN401 - the same
        """What numba asks of it where another loop calls this one."""
        return self.dispatcher._numba_type_

    def forget(self) -> None:
        """Delete what was kept of it."""
        code = self._function.__code__
        for file in Path(self.dispatcher.stats.cache_path).glob(f"{Path(code.co_filename).stem}.{code.co_name}-*.nb?"):
            file.unlink(missing_ok=True)


@cache
def _digest(own: Path) -> str:
    """What was compiled is found again for these very sources. numba itself asks for the age of a loop's own file alone, though most of a
    loop may come from another one: an upgrade that changes that would go on with the old one."""
    app, found = Path(__file__).parents[1], hashlib.sha256(own.read_bytes())
    for place in SOURCES:
        for file in sorted((app / place).rglob("*.py")) or [app / place]:
            found.update(file.read_bytes())
    return found.hexdigest()


def prepared(loop: compiled[P, object], *arguments: P.args, **named: P.kwargs) -> None:
    """Have a loop compiled for arrays of these kinds, or fetched: either holds Python's lock, a second or a tenth of one."""
    try:
        loop(*arguments, **named)
    except Exception:  # noqa: BLE001 - what was kept is damaged (a machine lost its power), or cannot be kept (its disk is full)
        for known in compiled.known:  # it may be one that this one calls
            known.forget()
        with suppress(OSError):  # compiled all the same
            loop(*arguments, **named)
