"""How much of a batch may be practice: whole groups, up to a share, beside what people brought.

A try is compared with the others of its group, so a group goes in as a whole or waits; one of which less than two tries are left (the
others were failed by the machinery) has nothing to be compared with.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence

from app.domain.learning.batches import LabelledTurn


def mixed(turns: Sequence[LabelledTurn], *, share: float, most: int, slot: int) -> tuple[list[LabelledTurn], list[LabelledTurn]]:
    """(what goes in, rollouts that wait): all of production, and groups of rollouts, by lot, of at most `share` of the batch."""
    served = [turn for turn in turns if not turn.rollout]
    allowed = most if share >= 1.0 else int(min(share * most, share / (1.0 - share) * len(served)))
    groups: defaultdict[str, list[LabelledTurn]] = defaultdict(list)
    for turn in turns:
        if turn.rollout:
            groups[turn.group].append(turn)
    practised: list[LabelledTurn] = []
    waiting: list[LabelledTurn] = []
    for group in sorted(groups, key=lambda name: hashlib.sha256(f"{slot}\x1f{name}".encode()).digest()):
        tries = groups[group]
        fits = len(practised) + len(tries) <= allowed and len({turn.episode_id for turn in tries}) >= 2
        (practised if fits else waiting).extend(tries)
    return served + practised, waiting
