"""Where a region lies after an edit, border by border, and that what differs between two texts is found and nothing else."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.labelling.regions import carry, changes, region_now


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
