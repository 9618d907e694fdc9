"""The live A/A: the champion against itself, on this deployment's own people, by the rules that judged the version.

Whoever got the champion in a canary is drawn once more, by lot, into two arms of the same version, and the harm family and its
group-sequential half are asked about them; after a promotion whoever got the champion beside its holdback, and the family and the
detectors of a fall. Whatever they find is a false alarm. The lots follow from the evidence alone, so anybody
gets the same answer again, on any machine. It is a measurement, shown beside each verdict; nothing is decided from it.
"""

import hashlib
import math
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.counting.evidence import Evidence, Lane
from pipelines.evaluation.live.champion import is_worse
from pipelines.evaluation.live.harm import harm_of

LOTS = 20
"""Comparisons per verdict, at most."""
UNITS = 100_000
"""So many units are compared per verdict, all lots together: a rollback must not wait for this."""
LEAST_UNITS = 200
"""Fewer people of the champion compare nothing."""


class LiveAA(msgspec.Struct, frozen=True, kw_only=True):
    """How often the champion was harm to itself."""

    comparisons: int
    alarms: int
    allowed: float
    """The level that the rules are meant to keep."""


def live_aa(config: GatesConfig, evidence: Evidence, *, lots: int = LOTS) -> LiveAA:
    """Compare a canary's champion with itself. Raises ValueError on evidence that must not be used."""
    allowed = config.alpha_abort_e + config.alpha_abort_gst
    return _compared(evidence, lambda drawn: harm_of(config, drawn).found, treated=False, lots=lots, allowed=allowed)


def live_aa_after(config: GatesConfig, evidence: Evidence, *, lots: int = LOTS) -> LiveAA:
    """Compare the champion with itself beside a holdback. Raises ValueError on evidence that must not be used."""
    return _compared(evidence, lambda drawn: is_worse(config, drawn), treated=True, lots=lots, allowed=config.alpha_post)


def _compared(evidence: Evidence, finds: Callable[[Evidence], bool], *, treated: bool, lots: int, allowed: float) -> LiveAA:
    champions = max((int((_treated(lane) == treated).sum()) for lane in evidence.lanes), default=0)
    if champions < LEAST_UNITS:
        return LiveAA(comparisons=0, alarms=0, allowed=allowed)
    rng = np.random.default_rng(_seed(evidence))
    lots = max(1, min(lots, UNITS // champions))
    alarms = sum(finds(_drawn(evidence, rng, treated=treated)) for _ in range(lots))
    return LiveAA(comparisons=lots, alarms=alarms, allowed=allowed)


def _seed(evidence: Evidence) -> int:
    """From who was treated and counted when, which are whole numbers: the last digit of an outcome is the processor's to say, and a lot
    is not."""
    drawn = hashlib.sha256()
    for lane in evidence.lanes:
        for column in (lane.treated, lane.stratum, lane.closed_at, lane.covered):
            drawn.update(column)
    return int.from_bytes(drawn.digest()[:8], "big")


def told(found: LiveAA, *, before: tuple[int, int]) -> str:
    """In a sentence, with those (alarms, comparisons) of earlier verdicts."""
    alarms, comparisons = found.alarms + before[0], found.comparisons + before[1]
    if comparisons == 0:
        return f"the champion against itself: too few people to say (allowed: {found.allowed:.0%})"
    error = math.sqrt(max(alarms, 1) * max(1.0, comparisons - alarms) / comparisons**3)
    rate = f"{alarms / comparisons:.1%} ± {error:.1%}, allowed: {found.allowed:.0%}"
    return f"the champion against itself: {alarms} false alarms in {comparisons} ({rate})"


def _drawn(evidence: Evidence, rng: np.random.Generator, *, treated: bool) -> Evidence:
    lanes = tuple(_champions(lane, rng, treated=treated) for lane in evidence.lanes)
    return msgspec.structs.replace(evidence, lanes=lanes, turn_looks=None)


def _champions(lane: Lane, rng: np.random.Generator, *, treated: bool) -> Lane:
    """The lane's units of the champion, each in one of two arms by lot."""
    mine = _treated(lane) == treated
    count = int(mine.sum())
    return msgspec.structs.replace(
        lane, treated=(rng.random(count) < 0.5).astype("u1").tobytes(), probability=np.full(count, 0.5).tobytes(),
        stratum=np.frombuffer(lane.stratum, dtype="<i8")[mine].tobytes(),
        closed_at=np.frombuffer(lane.closed_at, dtype="<i8")[mine].tobytes(),
        covered=np.frombuffer(lane.covered, dtype="u1")[mine].tobytes(),
        outcomes={name: lane.array(name)[mine].tobytes() for name in lane.outcomes},
        usual={name: np.frombuffer(values, dtype="<f8")[mine].tobytes() for name, values in lane.usual.items()},
    )  # fmt: skip


def _treated(lane: Lane) -> npt.NDArray[np.bool_]:
    return np.frombuffer(lane.treated, dtype="u1").astype(bool)
