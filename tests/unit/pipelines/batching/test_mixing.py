"""How much practice a batch takes beside production: whole groups, by lot, of at most its share."""

from dataclasses import replace

import pytest

from app.domain.learning.batches import LabelledTurn
from pipelines.batching.mixing import mixed
from tests.unit.pipelines.batching.test_choosing import turn


def served(count: int) -> list[LabelledTurn]:
    return [turn(n) for n in range(count)]


def practised(groups: int, tries: int = 2, *, start: int = 100) -> list[LabelledTurn]:
    """Each try is an episode of one turn."""
    return [
        replace(turn(start + 10 * group + n), rollout=True, group=f"g{group}", episode_id=f"e{group}-{n}")
        for group in range(groups) for n in range(tries)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("share", "production", "most", "taken"),
    [
        (0.0, 10, 100, 0),
        (0.25, 12, 100, 4),  # a quarter of sixteen
        (0.25, 13, 100, 4),  # 4.33: no part of a group
        (0.5, 6, 100, 6),
        (0.5, 6, 8, 4),  # half of the most
        (0.5, 0, 100, 0),
        (1.0, 0, 8, 8),
        (1.0, 6, 9, 8),
    ],
)
def test_practice_is_at_most_its_share(share: float, production: int, most: int, taken: int) -> None:
    turns = served(production) + practised(10)
    goes, waits = mixed(turns, share=share, most=most, slot=3)
    assert goes[:production] == served(production)
    assert len(goes) - production == taken
    assert sorted(turn.inference_id for turn in goes + waits) == sorted(turn.inference_id for turn in turns)


def test_a_group_goes_in_as_a_whole_and_needs_two_tries() -> None:
    alone = practised(1, tries=1)
    twice = [replace(one, episode_id="same") for one in practised(1, tries=2, start=300)]
    for lonely in (alone, twice):
        assert mixed(served(100) + lonely, share=0.5, most=200, slot=0)[1] == lonely
    goes, waits = mixed(served(5) + practised(4, tries=3), share=0.5, most=100, slot=0)
    assert (len(goes), len(waits)) == (8, 9), "three of five, not five of five"


def test_the_slot_decides_by_lot_which_groups_wait() -> None:
    turns = served(4) + practised(6)
    chosen = [tuple(one.group for one in mixed(turns, share=0.5, most=100, slot=slot)[0][4:]) for slot in range(20)]
    assert len(set(chosen)) > 5
    assert chosen[3] == tuple(one.group for one in mixed(list(reversed(turns)), share=0.5, most=100, slot=3)[0][4:])
