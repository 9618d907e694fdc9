"""How ingestion and the relay run. Class defaults are the vetted setting."""

from collections.abc import Mapping
from typing import Any

import msgspec

from app.domain.errors import BadConfig
from app.domain.telemetry.streams import JoinConfig


class IngestionConfig(JoinConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[ingestion]` of the configuration."""

    group: str = "ratchet-ingest"
    """Consumer group; its members share the partitions."""
    max_records: int = 2_000
    """Records per transaction."""
    poll_s: float = 0.25
    retries: int = 3
    """Tries of a transaction that fails in a way nobody expected; then the record at fault is looked for and buried."""
    expire_every_s: float = 10.0


class RelayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[relay]` of the configuration."""

    batch: int = 4_000
    """Rows sent and waited for together."""
    idle_s: float = 0.03
    reconcile_every_s: float = 3.0
    resend_after_s: float = 6.0
    """An event relayed this long ago and not applied is sent again, unless ingestion is still on its way to it."""
    stalled_after_s: float = 15.0
    """Ingestion that moved nothing for this long is on its way to nothing."""
    max_rounds: int = 3
    """After so many rounds an event is applied straight from the inbox, which is an alarm."""
    housekeeping_every_s: float = 30.0
    sweep_every_s: float = 3600.0
    """How often payloads without an event are looked for."""


def streaming_config(toml: Mapping[str, Any]) -> tuple[IngestionConfig, RelayConfig]:
    """The two tables of the streaming processes, without loading any other stage's configuration. Raises `BadConfig`."""
    try:
        return msgspec.convert(toml.get("ingestion", {}), IngestionConfig), msgspec.convert(toml.get("relay", {}), RelayConfig)
    except msgspec.ValidationError as error:
        raise BadConfig(f"[ingestion] or [relay] in the configuration: {error}") from error
