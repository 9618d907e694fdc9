"""Where a region lies after an edit, border by border, and that what differs between two texts is found and nothing else."""

import random
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.labelling.regions import Budget, carry, changes, region_now


@pytest.mark.parametrize(
    ("old", "new", "start", "end", "stands"),
    [
        ("a b", "a x b", 2, 3, "b"),  # typed at its beginning: outside
        ("a b", "a b x", 2, 3, "b"),  # typed at its end: outside
        ("a b c", "a b x c", 0, 3, "a b"),
        ("a b c", "x a b c", 2, 3, "b"),  # above it
        ("a b c", "b c", 2, 3, "b"),  # taken away above it
        ("a b c", "a b", 0, 3, "a b"),
        ("a b c", "a x c", 2, 3, "x"),  # changed, all of it
        ("a b c", "a  c", 2, 3, ""),  # deleted
        ("one two three", "one 2 three", 0, 7, "one 2"),  # its last word
        ("one two three", "one 2 three", 4, 13, "2 three"),  # its first word
        ("one two three four", "one 2 four", 4, 13, "2"),
        ("l1\nl2\nl3\nl4\n", "l1\nx\nl4\n", 6, 9, "x\n"),  # changed across its beginning
        ("abc def", "abc def", 0, 7, "abc def"),
        ("abc", "", 0, 3, ""),
        ("", "abc", 0, 0, ""),
    ],
)
def test_a_region_is_carried_from_border_to_border(old: str, new: str, start: int, end: int, stands: str) -> None:
    first, last = carry(old, new, start, end)
    assert new[first:last] == stands


def test_an_edit_below_the_end_of_the_file_is_one_at_its_end() -> None:
    assert region_now(before="abc", start=99, replaced=5, inserted=" def", after="abc def") == " def"
    assert region_now(before="abc", start=3, replaced=0, inserted=" def", after="abc") == ""
    assert region_now(before="abc xyz", start=4, replaced=3, inserted="def", after="abc def!") == "def"
    assert region_now(before="abc xyz", start=4, replaced=2, inserted="def", after="abc defz") == "def"


def rebuilt(old: str, new: str) -> str:
    """The new text out of the old one and the blocks that changed."""
    at, parts = 0, list[str]()
    for i1, i2, j1, j2 in changes(old, new):
        assert i1 >= at
        assert old[i1:i2] != new[j1:j2]
        parts += [old[at:i1], new[j1:j2]]
        at = i2
    return "".join([*parts, old[at:]])


@given(st.text("ab \n", max_size=40), st.text("ab \n", max_size=40))
def test_the_old_text_with_its_changed_blocks_is_the_new_one(old: str, new: str) -> None:
    assert rebuilt(old, new) == new


def lines(count: int, seed: int) -> list[str]:
    """So many different lines, and as many that occur again and again."""
    dice = random.Random(seed)
    return [piece for n in range(count) for piece in (f"line {n} {dice.random()}\n", dice.choice(["}\n", "\n"]))]


def test_between_large_texts_what_differs_is_found_and_nothing_else() -> None:
    """1,400 lines against 1,400 are beyond what is aligned piece by piece: every fiftieth is another one."""
    old = lines(700, 1)
    new = list(old)
    for n in range(0, 1400, 50):
        new[n] = new[n].replace("line", "LINE")
    blocks = list(changes("".join(old), "".join(new)))
    assert rebuilt("".join(old), "".join(new)) == "".join(new)
    assert sum(i2 - i1 for i1, i2, _, _ in blocks) <= 28 * 4
    start = sum(map(len, old[:702]))
    first, last = carry("".join(old), "".join(new), start, start + len(old[702]))
    assert "".join(new)[first:last] == old[702]


def test_a_large_block_that_moved_is_found_as_taken_out_and_put_in() -> None:
    old = lines(600, 2)
    new = ["first\n", *old[100:900], *old[:100], *old[900:], "last\n"]
    blocks = list(changes("".join(old), "".join(new)))
    assert rebuilt("".join(old), "".join(new)) == "".join(new)
    moved = len("".join(old[:100]))
    assert sum(i2 - i1 for i1, i2, _, _ in blocks) <= moved + 100
    start = len("".join(old[:500]))
    first, last = carry("".join(old), "".join(new), start, start + len(old[500]))
    assert "".join(new)[first:last] == old[500]


def test_large_texts_that_share_no_line_are_one_block() -> None:
    old, new = ["a\n"] * 1100, ["b\n"] * 1100
    assert next(changes("".join(old), "".join(new)))[0] == 0
    assert rebuilt("".join(old), "".join(new)) == "".join(new)


class TooMuch(Exception):
    """What was watched called more than it may."""


def watched(work: Callable[[], str], *, calls: int) -> str:
    """Do it, and stop it at so many calls: difflib makes one for each comparison. Raises `TooMuch`."""
    counted, usual = 0, sys.getprofile()

    def count(frame: FrameType, event: str, of: object) -> None:
        nonlocal counted
        counted += event == "c_call"
        if counted > calls:
            raise TooMuch

    sys.setprofile(count)
    try:
        return work()
    finally:
        sys.setprofile(usual)


def test_texts_of_few_different_letters_cost_no_more_than_others() -> None:
    old, new = "a" * 999, "a b" * 333
    found = watched(lambda: region_now(before=old, start=0, replaced=0, inserted="x", after=new), calls=1_500_000)
    assert found in new
    assert rebuilt(old, new) == new


def test_where_the_budget_is_spent_the_rest_is_one_changed_block() -> None:
    old, new = "abcXdefYghi", "abcVdefWghi"
    assert list(changes(old, new)) == [(3, 4, 3, 4), (7, 8, 7, 8)]
    assert list(changes(old, new, Budget(0))) == [(3, 8, 3, 8)]


def ordinary_edits() -> list[tuple[str, str]]:
    """Texts of this repository with lines taken out, put in, moved and reworded; and one rewritten as another."""
    room = Path(__file__).parent
    texts = [path.read_text() for path in sorted(room.glob("test_*.py"))[:6]]
    dice, edits = random.Random(7), list(pairwise(texts))
    for text in texts:
        old = text.splitlines(keepends=True)
        new = [line for line in old if dice.random() > 0.1]
        for _ in range(len(new) // 10):
            new.insert(dice.randrange(len(new)), dice.choice(old))
            at = dice.randrange(len(new))
            new[at] = new[at].replace(dice.choice(["e", "turn", " = "]), dice.choice(["", "label", "x"]))
        edits.append((text, "".join(new)))
    return edits


def test_of_ordinary_edits_no_budget_changes_anything() -> None:
    for old, new in ordinary_edits():
        budget = Budget.of(old, new)
        half = budget.left / 2
        assert list(changes(old, new, budget)) == list(changes(old, new, Budget(float("inf"))))
        assert budget.left > half
