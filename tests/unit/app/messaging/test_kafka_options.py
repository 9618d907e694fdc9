"""[kafka]: contradictions refused, clients told, and every difference of a topic said in a sentence with its cure."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from app.domain.errors import BadConfig, Unavailable
from app.messaging.cluster import Cluster
from app.messaging.options import KafkaConfig, kafka_config, kept_for, mismatches, topic_settings
from app.messaging.profiles import consumer_settings, producer_settings
from app.messaging.security import ClientCredentials, security_settings
from app.messaging.topics import TopicAdmin


def cluster(password: str | None = "hush", **options: Any) -> Cluster:
    return Cluster(bootstrap="kafka:9093", address_file=Path("none"), options=KafkaConfig(**options), password=password)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"security": "SASL_SSL"}, "go together"),
        ({"sasl_mechanism": "SCRAM-SHA-512", "username": "u"}, "go together"),
        ({"security": "SASL_SSL", "sasl_mechanism": "PLAIN"}, "username"),
        ({"security": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER", "username": "u"}, "token_url"),
        ({"security": "SSL", "certificate_file": "c.pem"}, "key_file"),
        ({"replication": 1}, "no write could ever be acknowledged"),
        ({"security": "TLS"}, "security"),
        ({"replicas": 3}, "replicas"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(table: dict[str, Any], said: str) -> None:
    with pytest.raises(BadConfig, match=rf"\[kafka\].*{said}"):
        kafka_config({"kafka": table})


def test_scram_over_tls_with_a_client_certificate_reaches_every_client() -> None:
    secure = cluster(
        security="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-512",
        username="ratchet",
        ca_file="ca.pem",
        certificate_file="c.pem",
        key_file="k.pem",
    )
    wanted = {
        "security_protocol": "SASL_SSL", "sasl_mechanism": "SCRAM-SHA-512", "sasl_plain_username": "ratchet", "sasl_plain_password": "hush",
        "ssl_cafile": "ca.pem", "ssl_certfile": "c.pem", "ssl_keyfile": "k.pem", "ssl_check_hostname": True,
    }  # fmt: skip
    for settings in (producer_settings(secure), consumer_settings(secure), security_settings(secure)):
        assert {name: settings[name] for name in wanted} == wanted
    assert "hush" not in repr(secure)


def test_a_missing_password_is_named() -> None:
    with pytest.raises(BadConfig, match="RATCHET_KAFKA_PASSWORD"):
        security_settings(cluster(None, security="SASL_PLAINTEXT", sasl_mechanism="PLAIN", username="u"))


def test_sizes_and_compression_are_those_of_the_table() -> None:
    settings = producer_settings(cluster(max_message_bytes=5_000_000, compression="lz4"))
    assert (settings["max_request_size"], settings["compression_type"]) == (5_000_000, "lz4")
    assert producer_settings(cluster(compression="none"))["compression_type"] is None


def test_every_difference_of_a_topic_is_a_sentence_with_its_cure() -> None:
    config = KafkaConfig(retention_ms=86_400_000, cleanup_policy="compact,delete")
    right = topic_settings(config) | {"cleanup.policy": "delete,compact", "max.message.bytes": "9000000", "min.insync.replicas": "3"}
    assert mismatches(config, "ratchet.events", partitions=6, replication=4, settings=right) == []
    wrong = {"min.insync.replicas": "1", "max.message.bytes": "1000", "retention.ms": "1000", "cleanup.policy": "delete"}
    told = mismatches(config, "ratchet.events", partitions=4, replication=1, settings=wrong)
    assert [word in sentence for word, sentence in zip(
        ("4 partitions", "1 replicas", "min.insync.replicas=1", "max.message.bytes=1000", "retention.ms=1000", "cleanup.policy=delete"),
        told, strict=True,
    )] == [True] * 6  # fmt: skip


class OneBroker:
    """A cluster of one broker, as its admin client shows it."""

    def __init__(self) -> None:
        self.asked: dict[str, dict[str, Any]] = {}
        self.waited: list[tuple[list[str], int]] = []

    def create_topics(self, wanted: dict[str, dict[str, Any]], *, timeout_ms: int, raise_errors: bool) -> dict[str, Any]:
        assert timeout_ms == 4_000
        assert not raise_errors, "that a topic is there already is no error"
        self.asked |= wanted
        (name, asked) = next(iter(wanted.items()))
        code = 38 if asked["replication_factor"] > 1 else 0
        message = "Unable to replicate the partition 3 time(s): The target replication factor of 3 cannot be reached" if code else None
        return {"topics": [{"name": name, "error_code": code, "error_message": message}]}

    def wait_for_topics(self, names: list[str], *, timeout_ms: int) -> None:
        self.waited.append((names, timeout_ms))


def test_a_cluster_that_refuses_the_replication_says_so_instead_of_making_everybody_wait() -> None:
    with pytest.raises(BadConfig, match=r"refuses to create topic ratchet.events with 3 replicas .*set replication"):
        TopicAdmin(OneBroker(), options=KafkaConfig()).create("ratchet.events")
    TopicAdmin(OneBroker(), options=KafkaConfig(replication=1, min_insync_replicas=1)).create("ratchet.events")


def test_a_topic_of_a_real_cluster_is_made_with_the_sizes_of_the_table() -> None:
    broker = OneBroker()
    options = KafkaConfig(replication=1, min_insync_replicas=1, partitions=12, max_message_bytes=5_000_000, retention_ms=86_400_000)
    TopicAdmin(broker, options=options).create("ratchet.events")
    configs = {"min.insync.replicas": "1", "max.message.bytes": "5000000", "retention.ms": "86400000"}
    assert broker.asked == {"ratchet.events": {"num_partitions": 12, "replication_factor": 1, "configs": configs}}


def test_the_embedded_broker_gets_topics_of_one_replica_and_its_own_settings() -> None:
    broker = OneBroker()
    TopicAdmin(broker, options=None).create("ratchet.events.1")
    assert broker.asked == {"ratchet.events.1": {"num_partitions": 6, "replication_factor": 1, "configs": {}}}
    assert broker.waited == [(["ratchet.events.1"], 4_000)], "until it can be written to"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"retention.ms": "604800000"}, None),
        ({}, None),  # the cluster does not tell
        ({"retention.ms": "-1"}, "keeps records for ever"),
        ({"retention.ms": "5184000000"}, "keeps records for 60 days"),
        ({"retention.ms": "604800000", "cleanup.policy": "compact"}, "keeps records for ever"),
        ({"retention.ms": "604800000", "cleanup.policy": "compact,delete"}, None),
    ],
)
def test_no_topic_keeps_an_event_longer_than_it_is_known_again(settings: dict[str, str], said: str | None) -> None:
    """Read once more from its beginning, it would count once more."""
    config = KafkaConfig(replication=1, min_insync_replicas=1)
    told = mismatches(config, "ratchet.events", partitions=6, replication=1, settings=settings, known_for=timedelta(days=30))
    assert told == [] if said is None else (len(told) == 1 and said in told[0] and "dedupe_days" in told[0])
    assert mismatches(config, "ratchet.events", partitions=6, replication=1, settings=settings, known_for=None) == []
    assert mismatches(config, "ratchet.labels", partitions=6, replication=1, settings=settings, known_for=timedelta(days=30)) == []


def test_partitions_are_those_of_the_table_and_may_only_be_added() -> None:
    config = KafkaConfig(partitions=12)
    (few,) = mismatches(config, "ratchet.events", partitions=6, replication=3, settings={})
    (many,) = mismatches(config, "ratchet.events", partitions=24, replication=3, settings={})
    assert "6 partitions, [kafka] asks for 12: add partitions to the topic" in few
    assert "24 partitions, [kafka] asks for 12: a topic loses none, or set partitions" in many
    assert cluster(partitions=12).partitions == 12
    assert Cluster(bootstrap=None, address_file=Path("none"), options=config).partitions == 6
    with pytest.raises(BadConfig, match="at least one"):
        kafka_config({"kafka": {"partitions": 0}})


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, None),
        ({"cleanup.policy": "compact"}, None),
        ({"retention.ms": "0"}, timedelta(0)),
        ({"retention.ms": "1"}, timedelta(milliseconds=1)),
        ({"retention.ms": "-1"}, timedelta.max),
        ({"retention.ms": "1", "cleanup.policy": "compact"}, timedelta.max),
        ({"retention.ms": "1", "cleanup.policy": "delete"}, timedelta(milliseconds=1)),
        ({"retention.ms": str(2**63 - 1)}, timedelta(milliseconds=10**14)),
    ],
)
def test_how_long_a_topic_keeps_a_record(settings: dict[str, str], kept: timedelta | None) -> None:
    assert kept_for(settings) == kept


def test_a_topic_may_keep_an_event_exactly_as_long_as_it_is_known_again() -> None:
    config, known = KafkaConfig(replication=1, min_insync_replicas=1), timedelta(days=30)

    def told(retention_ms: int) -> list[str]:
        settings = {"retention.ms": str(retention_ms)}
        return mismatches(config, "ratchet.events", partitions=6, replication=1, settings=settings, known_for=known)

    assert told(30 * 86_400_000) == []
    assert "keeps records for 30 days, 0:00:00.001000, events are known again for 30 days" in told(30 * 86_400_000 + 1)[0]


@pytest.mark.parametrize(
    ("setting", "fine", "wrong"),
    [
        ("max.message.bytes", ["1048588", "1048589"], ["1048587"]),
        ("min.insync.replicas", ["2", "3"], ["1"]),
        ("retention.ms", ["86400000"], ["86399999", "86400001", "-1"]),
        ("cleanup.policy", ["compact,delete", "delete,compact"], ["delete", "compact"]),
    ],
)
def test_larger_messages_and_more_replicas_in_step_are_fine_and_everything_else_is_as_it_is_asked_for(
    setting: str, fine: list[str], wrong: list[str]
) -> None:
    config = KafkaConfig(retention_ms=86_400_000, cleanup_policy="compact,delete")
    for found in fine:
        assert mismatches(config, "t", partitions=6, replication=3, settings={setting: found}) == []
    for found in wrong:
        (told,) = mismatches(config, "t", partitions=6, replication=3, settings={setting: found})
        assert f"topic t has {setting}={found}, [kafka] asks for" in told
        assert f"set {setting.replace('.', '_')} in [kafka]" in told


def test_a_table_without_contradictions_is_taken_as_it_stands() -> None:
    for table in (
        {"partitions": 1}, {"replication": 2, "min_insync_replicas": 2}, {"certificate_file": "c", "key_file": "k", "security": "SSL"},
        {"security": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER", "username": "u", "token_url": "https://t"},
        {"security": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", "username": "u"},
    ):  # fmt: skip
        assert kafka_config({"kafka": table}) == KafkaConfig(**table)  # type: ignore[arg-type]
    for table in ({"key_file": "k"}, {"token_url": "https://t"}, {"replication": 2, "min_insync_replicas": 3}, {"partitions": 0}):
        with pytest.raises(BadConfig):
            kafka_config({"kafka": table})


def bearer(token: Path, *, scope: str | None = None) -> ClientCredentials:
    return ClientCredentials(token.as_uri(), "ratchet", "hush", scope=scope)


@pytest.mark.parametrize(
    ("answer", "kept"), [({"expires_in": 3600}, True), ({"expires_in": 100}, True), ({"expires_in": 60}, False), ({}, False)]
)
def test_a_token_is_kept_until_a_minute_before_it_ends(tmp_path: Path, answer: dict[str, int], *, kept: bool) -> None:
    """Where it ends within that minute, each connection gets a fresh one. The server is a file: what it says is what lies in it."""
    server = tmp_path / "token.json"
    provider = bearer(server)
    tokens: list[str] = []
    for name in ("first", "second"):
        server.write_text(json.dumps({"access_token": name} | answer))
        tokens.append(provider.token())
    assert tokens == ["first", "first" if kept else "second"]


@pytest.mark.parametrize(
    "answer", ["", "[]", "{}", '{"access_token": "x", "expires_in": "soon"}', '{"access_token": "x", "expires_in": null}']
)
def test_a_server_that_gives_no_token_is_unavailable_and_is_asked_again(tmp_path: Path, answer: str) -> None:
    server = tmp_path / "token.json"
    provider = bearer(server)
    with pytest.raises(Unavailable, match="no token for Kafka"):
        provider.token()
    server.write_text(answer)
    with pytest.raises(Unavailable, match="check token_url and RATCHET_KAFKA_PASSWORD"):
        provider.token()
    server.write_text('{"access_token": "good", "expires_in": 3600}')
    assert provider.token() == "good"


@pytest.mark.parametrize(("security", "settings"), [
    ("PLAINTEXT", {}),
    ("SSL", {"security_protocol": "SSL", "ssl_check_hostname": True}),
])  # fmt: skip
def test_without_a_user_nothing_but_the_protocol_is_told(security: str, settings: dict[str, Any]) -> None:
    assert security_settings(cluster(None, security=security)) == settings
    assert security_settings(Cluster(bootstrap=None, address_file=Path("none"), options=KafkaConfig(security="SSL"))) == {}


def test_sasl_without_tls_names_no_files_and_tokens_come_from_the_named_url() -> None:
    plain = security_settings(cluster(security="SASL_PLAINTEXT", sasl_mechanism="PLAIN", username="u"))
    assert plain == {
        "security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", "sasl_plain_username": "u", "sasl_plain_password": "hush",
    }  # fmt: skip
    tokens = security_settings(
        cluster(security="SASL_SSL", sasl_mechanism="OAUTHBEARER", username="u", token_url="https://t", check_hostname=False)
    )
    assert isinstance(tokens.pop("sasl_oauth_token_provider"), ClientCredentials)
    assert tokens == {"security_protocol": "SASL_SSL", "ssl_check_hostname": False, "sasl_mechanism": "OAUTHBEARER"}
