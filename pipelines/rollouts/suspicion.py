"""Which tasks their own tries speak against: transcripts that the audit flags, and parts of ours that fail again and again.

Nothing is paid or punished for it. Such a task is held, like one that a check finds unsound, until a person has looked at its transcripts
and run `ratchet env check` on it: tries of before do not count afterwards. A policy that makes its box or its grade fail leaves the loss
alone; so this is also what keeps that from being a way out.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from app.domain.learning.rollouts import Outcome, Rollout

WINDOW, FEWEST = 32, 8
"""Of each task's newest tries; before there are so many nothing is held."""
OF_THE_TASK = frozenset({Outcome.SETUP_FAILED, Outcome.GRADER_FAILED, Outcome.BOX_LOST})
"""Faults that a task, or what is done in its box, may cause; a gateway that is away is away for all of them."""


def suspicious(history: Sequence[Rollout], *, since: Mapping[str, str], most_flagged: float, most_faults: float) -> dict[str, str]:
    """By task, why it is held. `history`: oldest first; `since`: by task, the id from which on tries count."""
    tries: defaultdict[str, list[Rollout]] = defaultdict(list)
    for rollout in history:
        if rollout.outcome is not None and rollout.id > since.get(rollout.task, ""):
            tries[rollout.task].append(rollout)
    found = {task: _why(made[-WINDOW:], most_flagged, most_faults) for task, made in tries.items() if len(made) >= FEWEST}
    return {task: why for task, why in found.items() if why is not None}


def _why(made: Sequence[Rollout], most_flagged: float, most_faults: float) -> str | None:
    flagged, faults = sum(bool(one.flags) for one in made), sum(one.outcome in OF_THE_TASK for one in made)
    if flagged > most_flagged * len(made):
        names = Counter(flag for one in made for flag in one.flags).most_common(2)
        return f"{flagged} of its last {len(made)} transcripts are flagged ({', '.join(name for name, _ in names)}): look at them"
    if faults > most_faults * len(made):
        names = Counter(one.outcome for one in made if one.outcome in OF_THE_TASK).most_common(2)
        return f"{faults} of its last {len(made)} tries were failed by a part of ours ({', '.join(map(str, dict(names)))}): see the log"
    return None
