"""LoopConfig: each stage's own config, composed and validated once. Unknown keys are refused by name.

Every run stores the resolved values, so what was in force when a version was made can always be read back.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from app.domain.errors import BadConfig
from app.domain.retention import Retention
from pipelines.batching import BatchingConfig
from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.suites.offline_config import OfflineConfig
from pipelines.ingestion.config import IngestionConfig, RelayConfig
from pipelines.labelling.config import LabellingConfig
from pipelines.rollouts.config import RolloutsConfig
from pipelines.training import TrainingConfig
from pipelines.training.drafting import DraftingConfig


class ScheduleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a cycle may run."""

    slot_s: int = 18_000
    """Length of a slot: five hours."""
    tick_s: float = 30.0
    """How often every replica asks whether a slot is to be run."""
    patience_s: float = 0.0
    """How long into a slot the election waits for enough labels and for a release in flight to end; 0 decides at the first tick."""
    ready_blocks: bool = False
    """Whether a release that waits for people keeps the next cycle from starting: for slots that are shorter than people take."""
    chain: int = 0
    """So many candidates may be ahead of the champion when another one is trained, which then continues from the newest of them: slots
    train on while a canary of days runs, and the last one gets the next canary. At most `batching.staleness`; 0 waits for the canary."""
    lease_s: float = 60.0
    """A cycle whose owner has not renewed for this long is taken over."""
    heartbeat_s: float = 15.0


class LoopConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the loop works; each table of the TOML file is one stage's."""

    schedule: ScheduleConfig = ScheduleConfig()
    retention: Retention = Retention()
    relay: RelayConfig = RelayConfig()
    ingestion: IngestionConfig = IngestionConfig()
    labelling: LabellingConfig = LabellingConfig()
    batching: BatchingConfig = BatchingConfig()
    training: TrainingConfig = TrainingConfig()
    drafting: DraftingConfig = DraftingConfig()
    offline: OfflineConfig = OfflineConfig()
    gates: GatesConfig = GatesConfig()
    rollouts: RolloutsConfig = RolloutsConfig()


def loop_config(toml: Mapping[str, Any]) -> LoopConfig:
    """Compose the stages' configs from the parsed file. Raises `BadConfig` naming the table and key."""
    known = set(LoopConfig.__struct_fields__) | {"policies", "kafka"}
    unknown = sorted(set(toml) - known)
    if unknown:
        raise BadConfig(f"the configuration has unknown tables {', '.join(unknown)}; known ones are {', '.join(sorted(known))}")
    try:
        found = msgspec.convert({name: table for name, table in toml.items() if name in LoopConfig.__struct_fields__}, LoopConfig)
    except msgspec.ValidationError as error:
        raise BadConfig(f"the configuration: {error}") from error
    if not 0 <= found.schedule.chain <= found.batching.staleness:
        raise BadConfig(
            f"[schedule] chain = {found.schedule.chain}: at most [batching] staleness ({found.batching.staleness}), or the champion's "
            "labels are too old for the last of them; 0 waits for the canary"
        )
    people = found.gates.people
    if people.enabled and found.offline.blind_pairs < people.votes:
        raise BadConfig(
            f"[gates.people] wants {people.votes} votes, and [offline] keeps {found.offline.blind_pairs} pairs: set blind_pairs to "
            f"{2 * people.votes}, so that those who disagree find more to judge"
        )
    return found
