"""Evidence: everything that a live decision depends on besides the configuration, as arrays of closed units; hashed and stored.

sessions ─▶ UnitBook ─▶ Lane per window (arrays) ─▶ Evidence (hashed, stored) ─▶ decide()
"""

import hashlib
import zlib
from datetime import datetime, timedelta

import msgspec
import numpy as np
import numpy.typing as npt

from pipelines.evaluation.counting.profiles import ArmProfile
from pipelines.evaluation.counting.references import Reference
from pipelines.evaluation.live.absolute_limits import SloCount

MICROS = timedelta(microseconds=1)
EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """The closed units of all metrics with one window, as little-endian arrays of the same length N."""

    window_s: float
    treated: bytes
    """uint8: 1 for the canary (after a promotion: the champion)."""
    probability: bytes
    """float64: of being treated."""
    stratum: bytes
    """int64: stage of the ramp, or era and share."""
    closed_at: bytes
    """int64: microseconds since the epoch, never decreasing."""
    covered: bytes
    """uint8: whether anybody reacted to the unit."""
    outcomes: dict[str, bytes]
    """float64 per metric, in [0, 1], good is up."""
    missing: dict[str, int]
    """Units without any signal of the metric."""
    usual: dict[str, bytes] = {}
    """float64 per metric of which habits are known: what was to be expected of the unit's person before the canary, in [0, 1]."""

    def array(self, name: str) -> npt.NDArray[np.float64]:
        """Outcomes of a metric. [N]"""
        return np.frombuffer(self.outcomes[name], dtype="<f8")

    def __len__(self) -> int:
        return len(self.treated)


class TurnLook(msgspec.Struct, frozen=True, kw_only=True):
    """One look of one test at all turns so far (`statistics.growing`)."""

    test: str
    """Such as `fault, all turns`."""
    at: int
    """Microseconds since the epoch: every turn before it was counted."""
    units: int
    n_treated: int
    turns: int
    log_e: float
    treated: float
    """Mean over the people of this arm, good is up."""
    control: float


class Assigned(msgspec.Struct, frozen=True, kw_only=True):
    """How many units one stratum put in each arm, closed or not, and how many of the closed ones were reacted to."""

    stratum: int
    probability: float
    treated: int
    control: int
    covered_treated: int
    covered_control: int


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a live decision depends on besides the configuration."""

    release_id: str
    policy: str
    digest: str
    champion: str
    """The version it is compared with."""
    at: int
    """When this was taken, microseconds since the epoch."""
    state: str
    stage: int
    stage_since: int
    since: int
    """Start of the canary (of the era)."""
    lanes: tuple[Lane, ...]
    assigned: tuple[Assigned, ...]
    duplicates: int
    """Units seen in two arms; left out."""
    swapped: int
    """Sessions whose arm and version contradict each other; left out."""
    late: int
    """Units that arrived after later ones were counted; left out."""
    lag_s: float
    last_session_at: int | None
    """Newest exposure of anybody, in microseconds: is there traffic? (Not the newest new person: everybody may have been seen.)"""
    held_since: int | None
    """Since when the data have been held bad without a break; an incident is no doubt about the data."""
    found_earlier: tuple[str, ...]
    """Tests of the data that failed earlier (`ratio`, `coverage`): once found, found."""
    references: dict[str, Reference]
    n_max: dict[str, int]
    """Declared units per required metric."""
    declared_share: float
    slos: tuple[SloCount, ...]
    turn_looks: tuple[TurnLook, ...] | None = None
    """What all turns said at each look, oldest first; None in evidence from before there were any."""
    profiles: tuple[ArmProfile, ...] = ()
    """Treated and control, for the reward-hack monitors."""
    lasts_s: float | None = None
    """How long the canary may take, from its plan; unset, as the configuration says."""
    hard: tuple[str, ...]
    """Reasons to stop that need no statistics, such as weights that no engine can load."""
    incident: tuple[str, ...] = ()
    """Reasons why nothing may move that are not this version's doing."""
    still_us: int = 0
    """For how long of the time since `since` an incident let nothing move: not the canary's time."""

    @property
    def units(self) -> int:
        return sum(a.treated + a.control for a in self.assigned)

    def lane_of(self, window_s: float) -> Lane:
        """The lane of a window."""
        return next(lane for lane in self.lanes if lane.window_s == window_s)


_pack = msgspec.msgpack.Encoder(order="deterministic")
_unpack = msgspec.msgpack.Decoder(Evidence)


def hash_of(evidence: Evidence) -> str:
    """SHA-256 (hex) of the evidence."""
    return hashlib.sha256(_pack.encode(evidence)).hexdigest()


def hash_of_packed(payload: bytes) -> str:
    """The same, of what was stored: it holds for evidence from before there were fields that it has not."""
    return hashlib.sha256(zlib.decompress(payload)).hexdigest()


def packed(evidence: Evidence) -> bytes:
    """The bytes to store it as."""
    return zlib.compress(_pack.encode(evidence), 6)


def unpacked(payload: bytes) -> Evidence:
    """Stored evidence."""
    return _unpack.decode(zlib.decompress(payload))


def micros(at: datetime) -> int:
    """Microseconds since the epoch."""
    return (at - EPOCH) // MICROS
