"""Two-process grading: the answer in one box, its hidden tests in another, and between them only literals that we pass on.

```
 answer's box ◀── calls ──┐            ┌── calls ───  tests' box
 prefix + answer          └─ this file ┘              prefix + proxies + tests ──▶ verdict, with our word in it
              ──replies──▶              ──replies──▶
```

The verdict is the tests' own. The answer never meets them, their process or their pipe: it can end its process, patch its interpreter or
write what it likes, and what it says is only ever taken as what one of its functions returned. Where it goes away, is late or says too
much, it has failed. Where the tests' box does, nobody knows what the answer is worth: that is an error, never a zero.

Not covered: tests that execute what an answer returns; tasks whose answers are classes, or functions of functions (they are refused).
"""

import ast
import builtins
import json
import secrets
import symtable
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, cast

from app.domain.errors import Unavailable
from app.domain.learning.boxes import Boxes, BoxSpec, Ended, Limits, Talk, TalkEnded
from pipelines.evaluation.suites.offline_config import OfflineConfig

MOST_BYTES = 4 << 20
"""Longest line of either box, a call's arguments or what it returned."""
MOST_CALLS = 100_000
START_S = 60.0
"""How long a box may take to begin on a machine that is busy."""


class Outcome(StrEnum):
    """How an answer ended."""

    PASSED = "passed"
    """Every test, to the last line."""
    FAILED = "failed"
    """A test, or the program itself: an exception, or a process that ended."""
    TIMEOUT = "timeout"
    LIMIT = "limit"
    """It said more, or used more memory, than a box may."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What came out."""

    outcome: Outcome
    detail: str
    """The last exception, as a line."""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Boxes, and how long and how much an answer may take in them."""

    boxes: Boxes
    limits: Limits
    wall_s: float

    @classmethod
    def from_config(cls, config: OfflineConfig, boxes: Boxes) -> "Examination":
        """As configured."""
        limits = Limits(cpu_s=config.sandbox_cpu_s, memory_bytes=config.sandbox_memory_bytes, file_bytes=config.sandbox_file_bytes)
        return cls(boxes=boxes, limits=limits, wall_s=config.sandbox_wall_s)

    def run(self, *, prefix: str, program: str, tests: str) -> Execution:
        """Grade a program by its hidden tests.

        Raises `ValueError` where the task cannot be graded this way, `Refused` where the machine keeps no boxes and `Unavailable` where a
        box was lost: none of these is the answer's fault.
        """
        own, names = leading_part(prefix), wanted(prefix, tests)
        if not names:
            raise ValueError("the tests of an execute task call nothing that the answer could define: every answer would pass them")
        with self._started("answer") as answer, self._started("tests") as examiner:
            _await_ready(answer, examiner)
            deadline = time.monotonic() + self.wall_s
            try:
                defined = _loaded(answer, program, names, deadline)
                asked = {"prefix": own, "tests": tests, "defined": defined, "word": secrets.token_hex(16)}
                return _examined(answer, examiner, asked, deadline)
            except TalkEnded as ended:
                return _ended(ended)

    def describe(self) -> dict[str, object]:
        """Tools and limits, for the record of the gate: what differs from production is whatever is not listed here."""
        return {
            "tools": "python, standard library", "cpu_s": self.limits.cpu_s, "wall_s": self.wall_s,
            "memory_bytes": self.limits.memory_bytes, "file_bytes": self.limits.file_bytes, **self.boxes.describe(),
        }  # fmt: skip

    @contextmanager
    def _started(self, role: str) -> Generator[Talk]:
        """A box with one of the two programs in it."""
        box = self.boxes.open(BoxSpec(limits=self.limits))
        try:
            yield box.talk([self.boxes.python, "-I", "-S", "-c", source(), role])
        finally:
            box.stop()


def _await_ready(*talks: Talk) -> None:
    """Both programs say that they are there, before either hears anything that is not ours."""
    for talk in talks:
        try:
            talk.receive(deadline=time.monotonic() + START_S, most_bytes=MOST_BYTES)
        except TalkEnded as ended:
            raise Unavailable(f"a box did not start: {ended}") from ended


def _loaded(answer: Talk, program: str, names: list[str], deadline: float) -> dict[str, Any]:
    """What the answer's program defines of what the tests use. Raises `TalkEnded`, and where it fails too: it has ended."""
    answer.send(json.dumps({"program": program, "names": names}).encode(), deadline=deadline)
    said = _frame(answer.receive(deadline=deadline, most_bytes=MOST_BYTES))
    if not isinstance(said.get("defined"), dict):
        raise TalkEnded(Ended.EXITED, str(said.get("failed", "it ended")))
    defined = cast(dict[str, Any], said["defined"])
    return {name: defined[name] for name in names if isinstance(defined.get(name), dict)}


def _examined(answer: Talk, examiner: Talk, asked: dict[str, Any], deadline: float) -> Execution:
    """Pass calls and replies on until the tests say their verdict. A reply is a line to us: the tests' box says what it means."""
    line = json.dumps(asked).encode()
    for _ in range(MOST_CALLS):
        call = _from_examiner(examiner, line, deadline)
        heard = _frame(call)
        if "verdict" in heard:
            return _verdict(heard, asked["word"])
        answer.send(call, deadline=deadline)
        line = answer.receive(deadline=deadline, most_bytes=MOST_BYTES)
    raise ValueError(f"the tests of an execute task make more than {MOST_CALLS} calls")


def _from_examiner(examiner: Talk, line: bytes, deadline: float) -> bytes:
    try:
        examiner.send(line, deadline=deadline)
        return examiner.receive(deadline=deadline, most_bytes=MOST_BYTES)
    except TalkEnded as ended:
        if ended.ended is Ended.TIMEOUT:  # with what the answer gave it to chew on
            raise
        raise Unavailable(f"the box of the tests was lost: {ended}") from ended


def _verdict(heard: dict[str, Any], word: str) -> Execution:
    if heard.get("word") != word:
        raise Unavailable("a verdict came that nobody had asked for")
    if heard["verdict"] == "unable":
        raise ValueError(f"an execute task cannot be graded: {heard['detail']}")
    return Execution(outcome=Outcome(heard["verdict"]), detail=heard["detail"])


def _ended(ended: TalkEnded) -> Execution:
    match ended.ended:
        case Ended.TIMEOUT:
            return Execution(outcome=Outcome.TIMEOUT, detail=str(ended))
        case Ended.OUTPUT_LIMIT | Ended.OOM:
            return Execution(outcome=Outcome.LIMIT, detail=str(ended))
        case Ended.BOX_LOST:
            raise Unavailable("the box of the answer was lost") from ended
        case Ended.EXITED:
            return Execution(outcome=Outcome.FAILED, detail=str(ended))


def _frame(line: bytes) -> dict[str, Any]:
    """A line of a box as a frame. Raises `TalkEnded` where it is none."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TalkEnded(Ended.EXITED, "it said what is no frame") from error
    if not isinstance(said, dict):
        raise TalkEnded(Ended.EXITED, "it said what is no frame")
    return cast(dict[str, Any], said)


@cache
def source() -> str:
    """The text of the program that runs in both boxes."""
    return (Path(__file__).parent / "boxed" / "grading.py").read_text()


# ── what belongs to whom ─────────────────────────────────────────────────────────────────────────────────────────────


@cache
def leading_part(prefix: str) -> str:
    """The prefix as a program of its own, for the tests' box: whole lines from its beginning, as many as parse."""
    lines = prefix.splitlines()
    for count in range(len(lines), -1, -1):
        for end in ("", "\n    pass\n"):
            text = "\n".join(lines[:count]) + end
            if _parsed(text) is not None:
                return text
    return ""


@cache
def wanted(prefix: str, tests: str) -> list[str]:
    """The names that the tests take from outside and the prefix leaves to the answer, sorted. Raises `ValueError`.

    What the prefix defines with a body (a helper that the tests use too) is the tests' own: an answer cannot replace it.
    """
    try:
        tables = list(_tables(symtable.symtable(tests, "tests", "exec")))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the tests of an execute task are no Python: {error}") from error
    used = {s.get_name() for t in tables for s in t.get_symbols() if s.is_referenced() and s.is_global()}
    theirs = {s.get_name() for s in tables[0].get_symbols() if s.is_assigned() or s.is_imported()}
    program = _parsed(leading_part(prefix))
    body = program.body if program is not None else []
    given = {name for node in body for name in _given(node)}
    left_open = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_open(node.body)}
    return sorted(left_open | used - theirs - given - set(dir(builtins)))


def _given(node: ast.stmt) -> Iterator[str]:
    """What one statement of the prefix defines for good."""
    match node:
        case ast.Import() | ast.ImportFrom():
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            if not _is_open(node.body):
                yield node.name
        case ast.ClassDef():
            if any(isinstance(part, ast.FunctionDef) and _is_open(part.body) for part in node.body):
                raise ValueError(f"class {node.name} is left to the answer: execute tasks grade functions")
            yield node.name
        case _:
            yield from (part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))


def _is_open(body: list[ast.stmt]) -> bool:
    """Whether a function is left to be written: nothing in it but imports, a docstring, `pass` or `...`."""
    return all(
        isinstance(part, ast.Pass | ast.Import | ast.ImportFrom) or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
        for part in body
    )


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None
