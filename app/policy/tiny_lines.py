"""The words of the tiny world: whole small lines of Python, broken ones, and prose, each one token of the tiny model.

A completion of a few tokens is then a small function body, and whether it parses depends on which kinds of line the policy
prefers. A random model mixes all kinds; a few updates of reinforcement learning separate them.
"""

from enum import StrEnum


class Kind(StrEnum):
    """Kinds of words, with what an editor of Python code thinks of them."""

    GOOD = "good"
    """A statement at the depth of a function body: parses wherever it stands."""
    BROKEN = "broken"
    """A line no Python file may hold there: wrong indentation, unclosed bracket, missing operand."""
    PROSE = "prose"
    """What a chatty assistant says."""


_VALUES = (
    "None", "True", "False", "0", "1", "-1", "[]", "{}", "''", "x", "y", "n", "s", "result", "total", "items", "len(s)",
    "len(items)", "sum(items)", "max(items)", "min(items)", "sorted(items)", "set(items)", "list(s)", "s.lower()", "x + y", "x - y",
    "x * y", "n % 2 == 0", "n > 0", "abs(x - y)", "items[0]", "items[-1]", "s[::-1]", "str(n)", "int(s)",
)  # fmt: skip
_NAMES = ("x", "y", "n", "s", "result", "total", "items", "count")
_STARTS = ("0", "1", "[]", "None")
_STATEMENTS = (
    "pass", "x += 1", "n -= 1", "total += x", "count += 1", "items.sort()", "result.append(x)", "items = sorted(items)",
    "if n < 0: return False", "if not items: return None", "if not s: return ''", "if n == 0: return 0", "for i in items: total += i",
    "for c in s: count += 1", "while n > 0: n -= 1", "x, y = y, x", "result = [i for i in items]", "result = [i for i in items if i > 0]",
    "result = ''.join(s)", "result = s.split()", "assert n >= 0", "# the answer",
)  # fmt: skip
_BROKEN = (
    "   return x", "   pass", "  x = 0", "      return n", "        return x", "            pass", "     total += 1",
    "    if x", "    if n > 0", "    else:", "    elif x:", "    for i in", "    for i items:",
    "    while", "    return (", "    return [1,",
    "    x = = 1", "    x = ", "    y + = 1", "    return return", "    def f(:", "    def", "    print 'x'", "    x ++", "    {", "    )",
    "    return x)", "    try", "    except:", "    import", "    from x", "    lambda: :", "    class", "    not", "    x = [i for i]",
    "    return 'x", "    s = \"", "    if x = 1: pass", "    return x y", "    10 = x",
)  # fmt: skip
_PROSE = (
    "Sure! Here is ", "I think that ", "the function ", "you should ", "Of course, ", "Let me explain ", "this code ", "will return ",
    "the answer is ", "As an AI ", "I hope this helps! ", "First we will ", "In Python, ",
    "you can use ", "a loop to ", "a list of ", "For example, ",
    "Note that ", "it works by ", "the result ", "the input ", "Great question! ", "Here's how ",
    "to solve this ", "problem so you ", "we need to ",
    "check if ", "Finally it ", "as follows: ", "Please let me ", "know if you ", "need more help. ",
    "is correct ", "because of ", "and then ",
    "however it ", "of the numbers ", "step by step ", "Certainly! ", "the code below ",
)  # fmt: skip


def words() -> dict[str, Kind]:
    """Every word of the tiny world with its kind, in a fixed order."""
    good = [f"    return {value}\n" for value in _VALUES]
    good += [f"    {name} = {value}\n" for name in _NAMES for value in _STARTS]
    good += [f"    {statement}\n" for statement in _STATEMENTS]
    kinds = dict.fromkeys(good, Kind.GOOD)
    kinds |= dict.fromkeys((f"{line}\n" for line in _BROKEN), Kind.BROKEN)
    kinds |= dict.fromkeys(_PROSE, Kind.PROSE)
    return kinds
