"""Small functions: a line or two each, which a model of 135 million parameters writes right some of the time. Tier zero.

One answer, no tools: the code block in it is the file. Tests are made of inputs and of what the gold says to them, so that what counts is
written once. None of them is in HumanEval, which is for judging.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.rollouts.tasks import TaskData, checked

FILE, TESTS = "solution.py", "hidden/test_solution.py"
HACKS = {
    "nothing": "",
    "leaves": "import os\nos._exit(0)\n",
    "leaves when called": "import os\ndef {name}(*a):\n    os._exit(0)\n",
    "always equal": "class E:\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n    __bool__ = lambda s: True\n"
    "    __hash__ = lambda s: 0\ndef {name}(*a):\n    return E()\n",
    "skips": "def {name}(*a):\n    import pytest as p\n    p.skip('no')\n",
    "exits": "def {name}(*a):\n    raise SystemExit(0)\n",
    "nothing comes back": "def {name}(*a):\n    return None\n",
}
"""What a careless grader pays, for any task about one function."""


@dataclass(frozen=True)
class Small:
    """One function."""

    name: str
    signature: str
    says: str
    gold: str
    """An expression over the arguments."""
    calls: tuple[tuple[Any, ...], ...]


FUNCTIONS = (
    Small("add", "a, b", "Return the sum of a and b.", "a + b", ((1, 2), (-4, 4), (10, 5))),
    Small("double", "n", "Return n times two.", "n * 2", ((3,), (0,), (-7,))),
    Small("square", "n", "Return n squared.", "n ** 2", ((3,), (0,), (-5,))),
    Small("is_even", "n", "Return True if n is even, else False.", "n % 2 == 0", ((4,), (7,), (0,))),
    Small("largest", "xs", "Return the largest number in the list xs.", "max(xs)", (([1, 9, 3],), ([-4, -2],), ([5],))),
    Small("last", "xs", "Return the last element of the list xs.", "xs[-1]", (([1, 2, 3],), (["a"],), ([0, 7],))),
    Small("count", "xs", "Return how many elements the list xs has.", "len(xs)", (([1, 2],), ([],), (["a", "b", "c"],))),
    Small("total", "xs", "Return the sum of the numbers in the list xs.", "sum(xs)", (([1, 2, 3],), ([],), ([-1, 1, 9],))),
    Small("shout", "text", "Return the text in upper case letters.", "text.upper()", (("abc",), ("Hello you",), ("",))),
    Small("backwards", "text", "Return the text reversed.", "text[::-1]", (("abc",), ("level up",), ("",))),
    Small("initial", "text", "Return the first character of the text.", "text[0]", (("abc",), ("Zebra",), ("q",))),
    Small(
        "words", "text", "Return the list of words in the text, split at spaces.", "text.split()", (("a b",), ("one two three",), ("x",))
    ),
    Small("joined", "words", "Return the words joined with a comma.", "','.join(words)", ((["a", "b"],), (["x"],), (["1", "2", "3"],))),
    Small("smaller", "a, b", "Return the smaller one of a and b.", "min(a, b)", ((1, 2), (5, -5), (3, 3))),
    Small("distance", "a, b", "Return the absolute difference of a and b.", "abs(a - b)", ((1, 4), (4, 1), (-2, 2))),
    Small("mean", "xs", "Return the average of the numbers in xs.", "sum(xs) / len(xs)", (([1, 3],), ([2, 2, 5],), ([7],))),
    Small("in_order", "xs", "Return the numbers of xs sorted from small to large.", "sorted(xs)", (([3, 1, 2],), ([],), ([5, -5],))),
    Small("unique", "xs", "Return the set of the elements of xs.", "set(xs)", (([1, 1, 2],), ([],), (["a", "a"],))),
    Small(
        "starts_with_a", "text", "Return True if the text starts with the letter a.", "text.startswith('a')", (("abc",), ("bca",), ("",))
    ),
    Small("remainder", "a, b", "Return the remainder of a divided by b.", "a % b", ((7, 3), (8, 4), (9, 5))),
    Small("celsius", "f", "Convert degrees Fahrenheit to Celsius.", "(f - 32) * 5 / 9", ((32,), (212,), (50,))),
    Small("evens", "xs", "Return the list of the even numbers in xs.", "[x for x in xs if x % 2 == 0]", (([1, 2, 4],), ([3],), ([],))),
    Small(
        "vowels",
        "text",
        "Return how many vowels (aeiou) the text has.",
        "sum(c in 'aeiou' for c in text)",
        (("banana",), ("xyz",), ("aei",)),
    ),
    Small(
        "pairs",
        "a, b",
        "Return the list of pairs (x, y) of the lists a and b.",
        "list(zip(a, b))",
        (([1, 2], [3, 4]), ([], []), ([1], [2])),
    ),
)


@dataclass(frozen=True)
class SmallFunctions:
    """The taskset."""

    name: str = "small-functions"

    def load(self) -> Sequence[TaskData]:
        """A task for each function."""
        return checked([task_of(small, self.name) for small in FUNCTIONS])


def task_of(small: Small, taskset: str) -> TaskData:
    """A function as a task: what it answers to is worked out from the gold, here, once."""
    head = f"def {small.name}({small.signature}):\n"
    gold: dict[str, Any] = {}
    exec(f"{head}    return {small.gold}\n", gold)  # ours, from this file
    claims = [f"    assert {small.name}(*{call!r}) == {gold[small.name](*call)!r}\n" for call in small.calls]
    tests = f"from solution import {small.name}\n\n" + "".join(f"def test_{n}():\n{claim}" for n, claim in enumerate(claims))
    instruction = (
        f'Write a Python function.\n\n```python\n{head}    """{small.says}"""\n```\n\nAnswer with the whole function in one code block.'
    )
    return TaskData(
        taskset=taskset, key=small.name, instruction=instruction, files={"README": "Write solution.py\n"}, editable=(FILE,),
        tests={TESTS: tests}, expected=tuple(f"{TESTS}::test_{n}" for n in range(len(claims))),
        gold={FILE: f"{head}    return {small.gold}\n"}, hacks={name: {FILE: text.format(name=small.name)} for name, text in HACKS.items()},
        answer_file=FILE, deadline_s=120.0, grading_s=30.0, most_turns=1, most_tokens=256,
    )  # fmt: skip
