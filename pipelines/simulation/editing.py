"""What a developer does to an answer in the file: takes the code out of it, throws away what does not run, deletes what they dislike.

Hidden from the service: it only ever sees the texts before and after.
"""

import ast
import re
import textwrap
import warnings
from dataclasses import dataclass

FENCE = re.compile(r"```[a-zA-Z]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
CODE_LINE = re.compile(
    r"^\s*(?:def |return\b|if .*:|for .*:|while .*:|import |from \w+ import|class |@|with .*:|try:|pass$|raise |assert |"
    r"[\w.]+(?:\[.*\])? ?[-+*/]?= |[\w.]+\(.*\)$)"
)


@dataclass(frozen=True, kw_only=True)
class Taste:
    """What this developer leaves in the file, of what runs."""

    docstrings: bool
    """Keeps a docstring that repeats the one already in the file."""
    comments: bool
    prints: bool
    prose: bool
    """Leaves explanations around the code standing."""


def keep(answer: str, *, prompt: str, taste: Taste) -> str:
    """The part of `answer` that stays in the file after `prompt`; empty where the developer reverts all of it."""
    code = running_code(code_of(answer), prompt=prompt)
    if not code:
        return ""
    if taste.prose:
        return answer.rstrip()
    dislikes = _dislikes(code)
    kept = [line for line, marks in zip(code.split("\n"), dislikes, strict=True) if not marks - _accepts(taste)]
    return "\n".join(kept)


def code_of(answer: str) -> str:
    """The fenced code, else everything from the first line that looks like code; empty where there is none."""
    if fenced := FENCE.search(answer):
        return fenced.group(1).rstrip()
    lines = answer.split("\n")
    start = next((i for i, line in enumerate(lines) if CODE_LINE.match(line)), None)
    return "" if start is None else "\n".join(lines[start:]).split("```")[0].rstrip()


def running_code(code: str, *, prompt: str) -> str:
    """The longest run of leading lines that parses in the file and does something; empty where none does (it is reverted)."""
    lines = code.split("\n")
    for end in range(len(lines), 0, -1):
        head = "\n".join(lines[:end])
        if not head.strip():
            continue
        tree = parse_in_file(head, prompt=prompt)
        if tree is not None and _does_something(tree):
            return head
    return ""


def parse_in_file(code: str, *, prompt: str) -> ast.Module | None:
    """The syntax tree of the code, as a definition of its own or as the body that continues `prompt`; None where neither parses."""
    body = textwrap.indent(textwrap.dedent(code), "    ")
    return _parsed(code) or _parsed(f"{prompt.rstrip()}\n{body}")


def _does_something(tree: ast.Module) -> bool:
    """Whether some function has a statement beyond its docstring, `pass` and `...`, or there is a bare statement that is one."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return any(not isinstance(statement, ast.Pass | ast.Expr) for body in bodies or [tree.body] for statement in body)


def _accepts(taste: Taste) -> set[str]:
    liked = {"docstring": taste.docstrings, "comment": taste.comments, "print": taste.prints}
    return {name for name, likes in liked.items() if likes}


def _dislikes(code: str) -> list[set[str]]:
    """Per line, what some developers do not want in the file."""
    lines = code.split("\n")
    marks: list[set[str]] = [set() for _ in lines]
    for number, line in enumerate(lines):
        if line.strip().startswith("#"):
            marks[number].add("comment")
        if line.strip().startswith("print("):
            marks[number].add("print")
    for number in _docstring_lines(code):
        marks[number - 1].add("docstring")
    return marks


def _docstring_lines(code: str) -> set[int]:
    """Line numbers (from 1) of docstrings of functions that are whole in the code; a body that continues the file has none."""
    tree = _parsed(code)
    lines: set[int] = set()
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def _parsed(code: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in strings are the developer's least worry
            return ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
