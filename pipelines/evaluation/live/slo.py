"""Absolute limits: canary and champion can degrade together, and a comparison would not see it (`facts/gates.md`, section 4.4).

A version is to blame for a burnt limit only where the one beside it is shown to be healthier over the same time. Where nothing is, it is an
incident of the place they both run in: an alarm, nothing moves, and it does not matter which of them burnt first.
"""

import math

from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.counting.evidence import Evidence
from pipelines.evaluation.live.absolute_limits import RECOVERED, SloCount

LEAST_PEOPLE = 3
"""Below so many people with bad turns it may be theirs, not the version's."""
HEALTHIER = -math.log(0.05)
"""Evidence from which on the version beside is healthier: one in twenty where it fails just half as often as the other one."""


def burnt(config: GatesConfig, evidence: Evidence) -> list[str]:
    """Limits that an arm exceeds for sure, each in a sentence, the treated arm's first."""
    return [_sentence(count) for count in _exceeded(config, evidence)]


def to_blame(config: GatesConfig, evidence: Evidence, *, arm: str) -> list[str]:
    """Limits that this arm exceeds while the other one is healthier, each in a sentence."""
    found = [count for count in _exceeded(config, evidence) if count.arm == arm and count.beside >= HEALTHIER]
    return [f"{_sentence(count)}, and the version beside it is healthier" for count in found]


def incident(config: GatesConfig, evidence: Evidence) -> str | None:
    """Why nothing may move: the treated arm exceeds a limit, and nothing is shown to be healthier."""
    mine = [count for count in _exceeded(config, evidence) if count.arm == "treated"]
    if not mine or any(count.beside >= HEALTHIER for count in mine):
        return None
    return f"{_sentence(mine[0])}, and no version is shown to be healthier: an incident, nothing moves"


def keeps_limits(evidence: Evidence) -> bool:
    """The treated arm is seen to keep a limit now, and every other one that its turns say something about."""
    mine = [count for count in evidence.slos if count.arm == "treated" and 0.0 < count.limit < 1.0 and count.total > 0]
    return bool(mine) and all(count.calm >= RECOVERED for count in mine)


def _exceeded(config: GatesConfig, evidence: Evidence) -> list[SloCount]:
    found = [c for c in evidence.slos if c.log_e >= -math.log(config.alpha_slo) and c.people >= LEAST_PEOPLE and c.calm < RECOVERED]
    return sorted(found, key=lambda count: count.arm != "treated")


def _sentence(count: SloCount) -> str:
    return f"{count.source} of the {count.arm} arm: {count.bad} of {count.total} turns, the limit is {count.limit:.1%}"
