"""The two programs of a graded answer. Each runs in a box of its own, and they meet only through us, in lines of JSON.

    python -I -S -c "$(cat grading.py)" answer     loads the answer's program, serves calls of what it defines
    python -I -S -c "$(cat grading.py)" tests      runs the hidden tests, with a proxy for each such function, and says the verdict

Only literals pass (None, numbers, text, bytes, lists, tuples, dictionaries, sets, ranges, and iterators as what they yield): an object that
equals everything stays where it was made. The answer's box can answer a call with any literal that it likes, and that is all it can do.
"""

import builtins
import json
import os
import sys
import types
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any, cast

MOST_ITEMS = 200_000
"""Of an iterator: one that never ends is no literal."""
BIG = 1 << 62
SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter}
PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)


class Spoken:
    """Our end of the pipe. Standard input and output lead nowhere from now on: what a program prints is nobody's verdict."""

    def __init__(self) -> None:
        self._reads, self._writes = os.fdopen(os.dup(0), "rb"), os.dup(1)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)

    def say(self, frame: dict[str, Any]) -> None:
        """Write one frame."""
        left = memoryview(json.dumps(frame).encode() + b"\n")
        while left:
            left = left[os.write(self._writes, left) :]

    def hear(self) -> dict[str, Any]:
        """The next frame; ends this program where there will be none."""
        line = self._reads.readline()
        if not line:
            os._exit(0)
        return json.loads(line)


# ── literals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def written(value: Any) -> Any:
    """A literal as JSON. Raises `TypeError` where it is none."""
    if value is None or value is Ellipsis or type(value) in (bool, str):
        return ["ellipsis"] if value is Ellipsis else value
    if type(value) is int:
        return value if -BIG < value < BIG else ["int", hex(value)]
    if type(value) in (float, complex):
        return ["float", value.hex()] if type(value) is float else ["complex", value.real.hex(), value.imag.hex()]
    if type(value) in (bytes, bytearray):
        return [type(value).__name__, value.hex()]
    if type(value) in (list, tuple, set, frozenset):
        return [type(value).__name__, *map(written, value)]
    if type(value) is dict:
        return ["dict", *([written(key), written(held)] for key, held in cast(dict[Any, Any], value).items())]
    if type(value) is range:
        return ["range", value.start, value.stop, value.step]
    return _rewritten(value)


def _rewritten(value: Any) -> Any:
    """Of a subclass, the plain value it stands for; of an iterator, what it yields."""
    for plain in PLAIN:
        if isinstance(value, plain):
            return written(plain(value))
    if isinstance(value, (KeysView, ValuesView, ItemsView)):
        return written(list(cast(Iterable[Any], value)))
    if isinstance(value, Iterator):
        yielded: list[Any] = []
        for item in cast(Iterator[Any], value):
            if len(yielded) == MOST_ITEMS:
                raise TypeError(f"an iterator of more than {MOST_ITEMS} items is no literal")
            yielded.append(written(item))
        return ["iterator", *yielded]
    raise TypeError(f"an object of type {type(value).__name__} is no literal")


def read(frame: Any) -> Any:
    """The literal that was written. Raises `ValueError` or `TypeError` where none was."""
    if not isinstance(frame, list):
        if frame is None or isinstance(frame, (bool, str, int)):
            return frame
        raise ValueError("no literal")
    kind, *parts = cast(list[Any], frame)
    if kind in SEQUENCES:
        return SEQUENCES[kind]([read(part) for part in parts])
    if kind == "dict":
        return {read(key): read(held) for key, held in parts}
    return _read_plain(kind, parts)


def _read_plain(kind: Any, parts: list[Any]) -> Any:
    match kind, parts:
        case "int", [str(digits)]:
            return int(digits, 16)
        case "float", [str(digits)]:
            return float.fromhex(digits)
        case "complex", [str(real), str(imaginary)]:
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case "bytes", [str(digits)]:
            return bytes.fromhex(digits)
        case "bytearray", [str(digits)]:
            return bytearray.fromhex(digits)
        case "range", [int(start), int(stop), int(step)]:
            return range(start, stop, step)
        case "ellipsis", []:
            return ...
        case _:
            raise ValueError("no literal")


# ── the answer's box ─────────────────────────────────────────────────────────────────────────────────────────────────


def serve(spoken: Spoken) -> None:
    """Load the program, say which of the names it defines, then answer calls for ever."""
    asked = spoken.hear()
    space = _main_module()
    try:
        exec(compile(asked["program"], "answer.py", "exec"), space)
    except BaseException as error:
        spoken.say({"failed": _sentence(error)})
        os._exit(0)
    spoken.say({"defined": {name: _offered(space[name]) for name in asked["names"] if name in space}})
    while True:
        call = spoken.hear()
        spoken.say(_answered(space[call["call"]], call["args"]))


def _offered(value: Any) -> Any:
    """What the tests get under a name: a function to be called, or a value."""
    if callable(value):
        return {"function": True}
    try:
        return {"value": written(value)}
    except (TypeError, RecursionError):
        return {"opaque": type(value).__name__}


def _answered(function: Callable[..., Any], written_arguments: Any) -> dict[str, Any]:
    """What a call returned or raised, and its arguments where it changed them."""
    args, kwargs = read(written_arguments)
    try:
        returned = function(*args, **kwargs)
    except BaseException as error:
        return {"raised": [type(error).__name__, _sentence(error), isinstance(error, Exception)]}
    try:
        reply = {"value": written(returned)}
    except (TypeError, RecursionError) as error:
        return {"opaque": str(error)}
    try:
        after = written((args, kwargs))
    except (TypeError, RecursionError):
        return reply
    return reply if after == written_arguments else {**reply, "args": after}


# ── the tests' box ───────────────────────────────────────────────────────────────────────────────────────────────────


class AnswerError(Exception):
    """An exception of the answer's whose type the tests do not know."""


class Broken(Exception):
    """The answer did what no function does: it ended its process, or returned what cannot leave it. No test may forgive it."""


class Tests:
    """The hidden tests and what they call."""

    def __init__(self, spoken: Spoken) -> None:
        self.spoken, self.space, self.broken = spoken, _main_module(), ""

    def run(self) -> None:
        """Run them and say the verdict, with the word that only whoever asked and this program know."""
        asked = self.spoken.hear()
        outcome, detail = self._judged(asked)
        if self.broken and outcome != "unable":
            outcome, detail = "failed", self.broken
        self.spoken.say({"verdict": outcome, "detail": detail[:400], "word": asked["word"]})
        os._exit(0)

    def _judged(self, asked: dict[str, Any]) -> tuple[str, str]:
        try:
            exec(compile(asked["prefix"], "prefix.py", "exec"), self.space)
            tests = compile(asked["tests"], "tests.py", "exec")
        except BaseException as error:
            return "unable", _sentence(error)
        try:
            self.space.update({name: self._bound(name, offered) for name, offered in asked["defined"].items()})
            exec(tests, self.space)
        except SystemExit as end:
            return ("passed", "") if end.code in (None, 0) else ("failed", f"the tests ended with {end.code!r}")
        except Unable as error:
            return "unable", str(error)
        except BaseException as error:
            return "failed", _sentence(error)
        return "passed", ""

    def _bound(self, name: str, offered: dict[str, Any]) -> Any:
        if "value" in offered:
            return read(offered["value"])
        if "opaque" in offered:
            raise Broken(f"{name} is an object of type {offered['opaque']}, not a function")

        def proxy(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, args, kwargs)

        proxy.__name__ = proxy.__qualname__ = name
        return proxy

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            self.spoken.say({"call": name, "args": written((args, kwargs))})
        except (TypeError, RecursionError) as error:
            raise Unable(f"the tests give {name} what cannot be sent to it: {error}") from error
        reply = self._reply(name)
        if "raised" in reply:
            raise self._exception(*reply["raised"])
        if "value" not in reply:
            raise self._break(f"{name} returned what cannot be graded: {reply.get('opaque', 'no literal')}")
        try:
            if "args" in reply:
                _refill(args, kwargs, read(reply["args"]))
            return read(reply["value"])
        except Exception as error:
            raise self._break(f"{name} returned no literal") from error

    def _reply(self, name: str) -> dict[str, Any]:
        try:
            reply: Any = self.spoken.hear()
        except (ValueError, RecursionError) as error:
            raise self._break(f"{name} did not return") from error
        if not isinstance(reply, dict):
            raise self._break(f"{name} did not return")
        return cast(dict[str, Any], reply)

    def _exception(self, kind: str, sentence: str, ordinary: bool) -> Exception:
        """The same exception here; but none that ends an iteration, which would cut `map(tested, cases)` short."""
        if not ordinary:
            return self._break(sentence)
        known = self.space.get(kind, getattr(builtins, kind, None))
        if isinstance(known, type) and issubclass(known, Exception) and not issubclass(known, (StopIteration, StopAsyncIteration)):
            try:
                return known(sentence.partition(": ")[2])
            except Exception:
                return AnswerError(sentence)
        return AnswerError(sentence)

    def _break(self, sentence: str) -> Broken:
        self.broken = sentence
        return Broken(sentence)


class Unable(BaseException):
    """The tests themselves cannot be run this way. Not an `Exception`, so that no test forgives it."""


def _refill(args: Iterable[Any], kwargs: dict[str, Any], after: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    """What a function did to its arguments happens to the tests' own."""
    for mine, changed in [*zip(args, after[0], strict=True), *((kwargs[name], value) for name, value in after[1].items())]:
        if type(mine) in (list, bytearray) and type(changed) is type(mine):
            mine[:] = changed
        elif type(mine) in (dict, set) and type(changed) is type(mine):
            mine.clear()
            mine.update(changed)


# ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _main_module() -> dict[str, Any]:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    return module.__dict__


def _sentence(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:400]
    except BaseException:
        return type(error).__name__


if __name__ == "__main__":
    pipe, role = Spoken(), sys.argv[1]
    sys.argv = [f"{role}.py"]
    pipe.say({"ready": True})
    if role == "answer":
        serve(pipe)
    else:
        Tests(pipe).run()
