"""Runs hidden tests against a patched workspace, each in a process of its own, and says by name how each ended.

    python -I -S -c <this> FILE     with {"tests": {path: source}, "ids": [...], "canaries": [...], "seed": n} in it; removed when read

Prints one line of JSON: {"passed": [...], "failed": {id: reason}}. Tests and canaries are run in one random order under random names, from
memory: no file of theirs is ever in the workspace. A canary is a copy of a test in which what was to be found is something that cannot be;
it must fail. What the tested code does to its own process ends with that process.

`pytest` in here is what follows, and no more: raises, warns, skip, approx, and of marks parametrize and skipif. A test that was skipped,
or that was expected to fail, did not pass.
"""

import ast
import copy
import io
import json
import os
import random
import re
import select
import sys
import time
import types
import warnings

EACH_S = 10.0
MOST_SAID = 4096


class Skipped(Exception):
    """Did not pass."""


class Impossible(Exception):
    """What nothing raises and nothing equals."""


class raises:
    """`with raises(error, match=None)`, or `raises(error, function, *arguments)`."""

    def __new__(cls, expected, function=None, *arguments, match=None, **named):
        made = super().__new__(cls)
        made.expected, made.match, made.value = expected, match, None
        if function is None:
            return made
        with made:
            function(*arguments, **named)
        return made

    def __init__(self, *arguments, **named):
        pass

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            raise AssertionError(f"did not raise {self.expected}")
        if not issubclass(kind, self.expected):
            return False
        self.value = error
        if self.match is not None and not re.search(self.match, str(error)):
            raise AssertionError(f"{error} does not match {self.match}")
        return True


class warns:
    def __init__(self, expected):
        self.expected, self.catch = expected, warnings.catch_warnings(record=True)

    def __enter__(self):
        self.seen = self.catch.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *ended):
        self.catch.__exit__(*ended)
        if ended[0] is None and not any(issubclass(one.category, self.expected) for one in self.seen):
            raise AssertionError("no warning")


def skip(reason=""):
    raise Skipped(reason)


def approx(value, rel=1e-6, abs=1e-12):
    class Near:
        def __eq__(self, other):
            return type(other) in (int, float) and -max(abs, rel * (value if value > 0 else -value)) <= other - value <= max(
                abs, rel * (value if value > 0 else -value)
            )

    return Near()


class Mark:
    def parametrize(self, names, values, **_):
        wanted = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        is_single = isinstance(names, str) and len(wanted) == 1

        def mark(function):
            rows = [dict(zip(wanted, (row,) if is_single else row)) for row in values]
            function.rows = [{**row, **other} for row in rows for other in getattr(function, "rows", [{}])]
            return function

        return mark

    def skipif(self, condition, *_, **__):
        return lambda function: setattr(function, "skipped", True) or function if condition else function

    def __getattr__(self, name):
        def mark(*arguments, **named):
            return arguments[0] if arguments and callable(arguments[0]) else lambda function: setattr(function, "skipped", True) or function

        return mark


def pytest_module():
    made = types.ModuleType("pytest")
    made.raises, made.warns, made.skip, made.approx, made.mark = raises, warns, skip, approx, Mark()
    made.fixture = lambda *arguments, **named: lambda function: function
    return made


class Spoil(ast.NodeTransformer):
    """Turns the first claim of a test into one that cannot hold: what is on this side of it is an object that equals nothing."""

    def __init__(self, side):
        self.done, self.side = False, side

    def spoiled(self, node):
        self.done = True
        return ast.copy_location(ast.Call(ast.Name("_Impossible", ast.Load()), [], []), node)

    def visit_Assert(self, node):
        if self.done:
            return node
        if isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], (ast.Eq, ast.Is)):
            if self.side == 0:
                node.test.left = self.spoiled(node.test.left)
            else:
                node.test.comparators[0] = self.spoiled(node.test.comparators[0])
        else:
            self.done = True
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        return node

    def visit_Call(self, node):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if not self.done and name in ("assertEqual", "eq_", "assertIs") and len(node.args) >= 2:
            node.args[self.side] = self.spoiled(node.args[self.side])
        elif not self.done and name in ("raises", "assertRaises") and node.args:
            self.done = True
            node.args[0] = ast.copy_location(ast.Name("_Impossible", ast.Load()), node)
        else:
            self.generic_visit(node)
        return node


def sources(asked):
    """The tree of each test module, and of each with a spoiled test, by the id of its canary."""
    trees = {path: ast.parse(text) for path, text in asked["tests"].items()}
    spoiled = {}
    for name in asked["canaries"]:
        path, _, inside = name.partition("::")
        for side in (0, 1):
            tree = copy.deepcopy(trees[path])
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and node.name == inside.split("::")[-1]:
                    spoil = Spoil(side)
                    spoil.visit(node)
                    if spoil.done:
                        spoiled[name, side] = ast.fix_missing_locations(tree)
    return trees, spoiled


def run(tree, inside):
    """One test, in this process. Raises what it raises."""
    sys.modules["pytest"] = pytest_module()
    sys.path.insert(0, os.getcwd())
    module = types.ModuleType(f"m{random.getrandbits(40):x}")
    module.__dict__["_Impossible"] = Impossible
    module.__file__ = os.path.join(os.getcwd(), "t.py")
    sys.modules[module.__name__] = module
    exec(compile(tree, "t.py", "exec"), module.__dict__)
    owner, _, name = inside.rpartition("::")
    unittest = sys.modules.get("unittest")  # no test case is made without it
    if owner and (unittest is None or not issubclass(getattr(module, owner), unittest.TestCase)):
        if hasattr(getattr(module, owner), "setup_method") or getattr(getattr(module, owner), name)(getattr(module, owner)()) is not None:
            raise Skipped("it wants to be set up, or returned something")
        return
    if owner:
        result = unittest.TestResult()
        getattr(module, owner)(name).run(result)
        if result.errors or result.failures:
            raise AssertionError((result.errors or result.failures)[0][1][-300:])
        if result.testsRun != 1 or result.skipped or result.expectedFailures or result.unexpectedSuccesses:
            raise Skipped("not run")
        return
    function = getattr(module, name)
    if getattr(function, "skipped", False) or (getattr(module, "pytestmark", None) is not None and hasattr(module.pytestmark, "skipped")):
        raise Skipped("marked")
    rows = getattr(function, "rows", [{}])
    if not rows or set(parameters(function)) - set(rows[0]):
        raise Skipped("it wants a fixture")
    for row in rows:
        if isinstance(function(**row), types.GeneratorType):
            raise Skipped("a generator")


def parameters(function):
    """Their names. `inspect`, which takes longer to import than most tests to run, is asked for what is no plain function."""
    if type(function) is types.FunctionType and not hasattr(function, "__wrapped__"):
        code = function.__code__
        starred = bool(code.co_flags & 4) + bool(code.co_flags & 8)
        return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + starred]
    import inspect

    return inspect.signature(function).parameters


def main():
    with open(sys.argv[1], "rb") as file:
        asked = json.loads(file.read())
    os.unlink(sys.argv[1])
    if any("unittest" in text for text in asked["tests"].values()):
        import unittest  # noqa: F401 - once, and not in the process of each test
    shuffled = random.Random(asked["seed"])
    trees, spoiled = sources(asked)
    work = [(name, trees[name.partition("::")[0]], False) for name in asked["ids"]]
    work += [(name, tree, True) for (name, _), tree in spoiled.items()]
    shuffled.shuffle(work)
    passed, failed, canaries = [], {}, {}
    for name, tree, is_canary in work:
        reason = apart(tree, name.partition("::")[2])
        if is_canary:
            canaries[name] = reason if canaries.get(name, "") is not None else None
        elif reason is None:
            passed.append(name)
        else:
            failed[name] = reason
    print(json.dumps({"passed": passed, "failed": failed, "canaries": canaries}))


def apart(tree, inside):
    """None where the test ran to its end in a process of its own and said so in words that it was given by none; else why not."""
    reader, writer = os.pipe()
    word = os.urandom(16).hex().encode()
    child = os.fork()
    if child == 0:
        os.close(reader)
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(quiet, descriptor)
        sys.stdout = sys.stderr = io.StringIO()
        sys.stdin = io.StringIO()
        try:
            run(tree, inside)
            os.write(writer, b"passed " + word)
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode(errors="replace")[:MOST_SAID])
        os._exit(0)
    os.close(writer)
    said, deadline = b"", time.monotonic() + EACH_S
    while time.monotonic() < deadline:
        if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            break
        chunk = os.read(reader, MOST_SAID)
        if not chunk:
            break
        said += chunk
    os.close(reader)
    os.kill(child, 9)
    os.waitpid(child, 0)
    if said == b"passed " + word:
        return None
    return said.decode(errors="replace")[:300] or "it ended without a word"


if __name__ == "__main__":
    main()
