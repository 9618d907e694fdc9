"""What can be changed on one line so that the program still parses and means something else.

Texts are left alone (most are messages), and so is what only types, documents or logs: annotations, decorators, docstrings, asserts, logs,
and functions without a body (of a Protocol, say), whose defaults nobody is given.
"""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
RENAMED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One changed line."""

    file: str
    """From the root of the tree, with slashes."""
    line: int
    before: str
    after: str
    """The whole line, without what surrounds it."""

    @property
    def room(self) -> str:
        """`app/db`, `pipelines/evaluation`; files beside the rooms belong to `app` and `pipelines`."""
        parts = self.file.split("/")
        return "/".join(parts[:2]) if len(parts) > 2 else parts[0]

    @property
    def name(self) -> str:
        """What it is known by while lines move: its file and its change."""
        return f"{self.file}: {self.before} → {self.after}"


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines; a few do not parse (`is_sound`)."""
    lines = source.splitlines()
    found: dict[tuple[int, str], Mutant] = {}
    for node, replacement in _replacements(ast.parse(source)):
        line = lines[node.lineno - 1].encode()
        changed = (line[: node.col_offset] + replacement.encode() + line[node.end_col_offset :]).decode()
        mutant = Mutant(file=file, line=node.lineno, before=line.decode().strip(), after=changed.strip())
        if mutant.before != mutant.after:
            found[node.lineno, changed] = mutant
    return sorted(found.values(), key=lambda mutant: (mutant.line, mutant.after))


def apply(mutant: Mutant, source: str) -> str:
    """The source with the mutant in it. Raises `ValueError` where its line is another one by now."""
    lines = source.splitlines(keepends=True)
    line = lines[mutant.line - 1]
    if line.strip() != mutant.before:
        raise ValueError(f"line {mutant.line} of {mutant.file} is no longer {mutant.before!r}: sample anew")
    lines[mutant.line - 1] = line.replace(mutant.before, mutant.after)
    return "".join(lines)


def sample(root: Path, *, seed: int, room: str | None = None) -> Iterator[Mutant]:
    """Mutants of the product in random order, one of a file before the second of any: every file has its turn."""
    chance = random.Random(seed)
    piles = [mutants_of(path.relative_to(root).as_posix(), path.read_text()) for path in sorted(_sources(root))]
    piles = [pile for pile in piles if pile and (room is None or pile[0].room == room)]
    for pile in piles:
        chance.shuffle(pile)
    while piles:
        chance.shuffle(piles)
        for pile in piles:
            mutant = pile.pop()
            if is_sound(mutant, (root / mutant.file).read_text()):
                yield mutant
        piles = [pile for pile in piles if pile]


def _sources(root: Path) -> Iterator[Path]:
    for part in ("app", "pipelines"):
        yield from (path for path in (root / part).rglob("*.py") if path.name != "__init__.py")


def is_sound(mutant: Mutant, source: str) -> bool:
    """Whether the file still parses with it."""
    try:
        ast.parse(apply(mutant, source))
    except SyntaxError:
        return False
    return True


def _replacements(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    for node in _meaningful(tree):
        if node.lineno == node.end_lineno:
            for replacement in _changes(node):
                yield node, replacement


def _meaningful(tree: ast.Module) -> Iterator[ast.expr | ast.stmt]:
    """Nodes that run and matter, outermost first."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if _is_left_alone(node):
            continue
        if isinstance(node, ast.expr | ast.stmt):
            yield node
        waiting += [child for name, value in ast.iter_fields(node) if not _is_unseen(node, name) for child in _nodes(value)]


def _nodes(value: object) -> list[ast.AST]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, ast.AST)]


def _is_unseen(node: ast.AST, field: str) -> bool:
    """Fields that only type or declare."""
    typing = {"annotation", "returns", "decorator_list", "bases", "type_comment"}
    return field in typing or (isinstance(node, ast.ClassDef) and field == "keywords")


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Raise) or _is_declared(node):
        return True
    if not isinstance(node, ast.Expr):
        return False
    return isinstance(node.value, ast.Constant) or ast.unparse(node.value).startswith(("log.", "log_", "logging.", "click.echo"))


def _is_declared(node: ast.AST) -> bool:
    """A function that does nothing: a docstring, an ellipsis, or both."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return all(isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) for statement in node.body)


def _changes(node: ast.expr | ast.stmt) -> Iterator[str]:
    """What may stand in the place of a node."""
    yield from _other_operators(node)
    yield from _other_values(node)


def _other_operators(node: ast.expr | ast.stmt) -> Iterator[str]:
    match node:
        case ast.Compare(left, [operator, *more], comparators) if type(operator) in COMPARED:
            yield ast.unparse(ast.Compare(left, [COMPARED[type(operator)](), *more], comparators))
        case ast.BinOp(left, operator, right) if type(operator) in COMPUTED and not _is_text(left, right):
            yield f"({ast.unparse(ast.BinOp(left, COMPUTED[type(operator)](), right))})"
        case ast.BoolOp(operator, values):
            yield f"({ast.unparse(ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield f"({ast.unparse(operand)})"
        case ast.AugAssign(target, operator, value) if type(operator) in COMPUTED:
            yield ast.unparse(ast.AugAssign(target, COMPUTED[type(operator)](), value))
        case _:
            return


def _other_values(node: ast.expr | ast.stmt) -> Iterator[str]:
    match node:
        case ast.Constant(bool(value)):
            yield repr(not value)
        case ast.Constant(int(value)):
            yield repr(value + 1)
        case ast.Constant(float(value)):
            yield repr(value * 2 if value else 1.0)
        case ast.Name(name) if name in RENAMED:
            yield RENAMED[name]
        case ast.IfExp(test, body, orelse):
            yield f"({ast.unparse(ast.IfExp(test, orelse, body))})"
        case ast.Return(ast.expr() as value) if not _is_none(value):
            yield "return None"
        case ast.Expr(ast.Call() | ast.Await()):
            yield "pass"
        case ast.Continue():
            yield "break"
        case _:
            return


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_text(*nodes: ast.expr) -> bool:
    return any(isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)) for node in nodes)
