"""`[kafka]` of the configuration: how a real cluster is spoken to and what its topics must be. The embedded broker needs none of it."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import msgspec

from app.domain.errors import BadConfig
from app.domain.telemetry.events import Topic
from app.domain.telemetry.streams import PARTITIONS


class KafkaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Class defaults are those of a cluster of three brokers with Kafka's own limits. The password is in RATCHET_KAFKA_PASSWORD."""

    partitions: int = PARTITIONS
    """Of every topic: as many members of ingestion as that share the work. May be raised later, with the topics' own; never lowered."""
    replication: int = 3
    min_insync_replicas: int = 2
    max_message_bytes: int = 1_048_588
    """Of topics and clients; Kafka's own default. Payloads of large turns do not travel, see the decision on claim checks."""
    retention_ms: int | None = None
    """None leaves it to the cluster: nothing here needs a record again that was applied."""
    cleanup_policy: Literal["delete", "compact", "compact,delete"] | None = None
    """None leaves it to the cluster. Erasures write tombstones, which take older records away where a topic is compacted."""
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "zstd"
    security: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] | None = None
    username: str | None = None
    """The SASL user, or the client id where `token_url` gives tokens."""
    token_url: str | None = None
    """OAUTHBEARER: where tokens are fetched (client credentials; the secret is the password)."""
    token_scope: str | None = None
    ca_file: str | None = None
    """PEM of the authority that signed the brokers' certificates; the system's own where none is named."""
    certificate_file: str | None = None
    """mTLS: the client's certificate, with `key_file`."""
    key_file: str | None = None
    check_hostname: bool = True

    def __post_init__(self) -> None:
        """Settings that contradict each other. Raises ValueError."""
        if self.partitions < 1:
            raise ValueError(f"partitions is {self.partitions}: a topic has at least one")
        if self.security.startswith("SASL") != (self.sasl_mechanism is not None):
            raise ValueError("security SASL_… and sasl_mechanism go together: set both or neither")
        if (self.sasl_mechanism == "OAUTHBEARER") != (self.token_url is not None):
            raise ValueError("sasl_mechanism OAUTHBEARER and token_url go together: set both or neither")
        if self.sasl_mechanism is not None and self.username is None:
            raise ValueError("SASL needs a username (for OAUTHBEARER the client id)")
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file go together: set both or neither")
        if self.min_insync_replicas > self.replication:
            raise ValueError("min_insync_replicas is above replication: no write could ever be acknowledged")


def kafka_config(toml: Mapping[str, Any]) -> KafkaConfig:
    """The table of the parsed configuration. Raises `BadConfig`."""
    try:
        return msgspec.convert(toml.get("kafka", {}), KafkaConfig)
    except msgspec.ValidationError as error:
        raise BadConfig(f"[kafka] in the configuration: {error}") from error


def topic_settings(config: KafkaConfig) -> dict[str, str]:
    """What a topic is created with, and must have."""
    wanted = {
        "min.insync.replicas": config.min_insync_replicas, "max.message.bytes": config.max_message_bytes,
        "retention.ms": config.retention_ms, "cleanup.policy": config.cleanup_policy,
    }  # fmt: skip
    return {name: str(value) for name, value in wanted.items() if value is not None}


def mismatches(
    config: KafkaConfig, topic: str, *, partitions: int, replication: int, settings: Mapping[str, str], known_for: timedelta | None = None
) -> list[str]:  # fmt: skip
    """One sentence per difference between a topic and the configuration; settings that the cluster does not tell are passed over.

    `known_for`: how long an event is known again. What a topic keeps longer would, read once more from its beginning, count once more.
    """
    told: list[str] = []
    if partitions != config.partitions:
        cure = "add partitions to the topic" if partitions < config.partitions else "a topic loses none"
        told.append(f"topic {topic} has {partitions} partitions, [kafka] asks for {config.partitions}: {cure}, or set partitions")
    if replication < config.replication:
        told.append(
            f"topic {topic} has {replication} replicas, [kafka] asks for {config.replication}: reassign its partitions, or set replication"
        )
    for name, wanted in topic_settings(config).items():
        if name in settings and _differs(name, settings[name], wanted):
            told.append(
                f"topic {topic} has {name}={settings[name]}, [kafka] asks for {wanted}: "
                f"alter the topic, or set {name.replace('.', '_')} in [kafka]"
            )
    kept = kept_for(settings)
    if topic == Topic.EVENTS and known_for is not None and kept is not None and kept > known_for:
        long = "ever" if kept == timedelta.max else str(kept)
        told.append(
            f"topic {topic} keeps records for {long}, events are known again for {known_for}: lower its retention.ms, or raise dedupe_days "
            "in [retention] (inf: for ever)"
        )
    return told


def kept_for(settings: Mapping[str, str]) -> timedelta | None:
    """How long a topic with these settings keeps a record at the most (`timedelta.max`: for ever); None where the cluster does not tell."""
    if "retention.ms" not in settings:
        return None
    if int(settings["retention.ms"]) < 0 or "delete" not in settings.get("cleanup.policy", "delete"):
        return timedelta.max
    return timedelta(milliseconds=min(int(settings["retention.ms"]), 10**14))


def _differs(name: str, found: str, wanted: str) -> bool:
    if name == "cleanup.policy":
        return set(found.split(",")) != set(wanted.split(","))
    if name in ("max.message.bytes", "min.insync.replicas"):  # more is fine
        return int(found) < int(wanted)
    return found != wanted
