"""Changes functions of modules that are loaded already, so that a mutant needs no import anew: a second instead of ten.

What runs while a module is imported (constants, defaults, class bodies, the functions that they call) cannot be changed afterwards;
`Loaded.swap` says so, and the modules are loaded anew.
"""

import gc
import importlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType, FunctionType

PRODUCT = ("app", "pipelines")
NOT_LOADED = ("__main__", ".boxed.", ".ray_")
"""Programs, programs for boxes, and Ray, which wants to be told its manners first."""


Place = tuple[str, str, int]
"""File, qualified name and first line of a function."""


class Loaded:
    """The product, imported once for all forks to come."""

    def __init__(self, root: Path) -> None:
        sys.path.insert(0, str(root))
        self._called: set[Place] = set()
        """Functions that something called at import."""

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(str(root)):
                self._called.add(_place(frame.f_code))

        sys.setprofile(note)
        try:
            self._import(root)
        finally:
            sys.setprofile(None)
        self._functions: defaultdict[Place, list[FunctionType]] = defaultdict(list)
        for thing in gc.get_objects():
            if type(thing) is FunctionType and thing.__code__.co_filename.startswith(str(root)):
                self._functions[_place(thing.__code__)].append(thing)
        gc.freeze()  # a fork need not look at it again

    def _import(self, root: Path) -> None:
        for part in PRODUCT:
            for path in sorted((root / part).rglob("*.py")):
                name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
                if not any(word in f"{name}." for word in NOT_LOADED):
                    with suppress(ImportError):
                        importlib.import_module(name)

    def swap(self, path: Path, sound: str, changed: str) -> bool:
        """Give the functions of a file the code of its changed text; False where that is not enough."""
        pairs = _differing(compile(sound, str(path), "exec"), compile(changed, str(path), "exec"))
        if not pairs:
            return False
        for old, new in pairs:
            functions = self._functions.get(_place(old), [])
            if not functions or _place(old) in self._called or old.co_freevars != new.co_freevars:
                return False
            for function in functions:
                function.__code__ = new
        return True


def _place(code: CodeType) -> Place:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _differing(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """Functions that differ, the outermost ones; None where something differs that runs at import."""
    if old.co_flags & inspect.CO_NEWLOCALS:
        return [] if _says(old) == _says(new) else [(old, new)]
    if _says(old, inner=False) != _says(new, inner=False):
        return None
    found: list[tuple[CodeType, CodeType]] = []
    for inside, other in zip(_inner(old), _inner(new), strict=True):
        pairs = _differing(inside, other)
        if pairs is None:
            return None
        found += pairs
    return found


def _inner(code: CodeType) -> Iterator[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _says(code: CodeType, *, inner: bool = True) -> tuple[object, ...]:
    """Everything about a piece of code but where it stands."""
    constants = tuple(
        (_says(constant) if inner else code.co_name) if isinstance(constant, CodeType) else (type(constant), repr(constant))
        for constant in code.co_consts
    )
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return (code.co_code, constants, names, code.co_argcount, code.co_kwonlyargcount, code.co_flags, code.co_exceptiontable)
