"""What the environment says: everything that cannot be meant is refused by the name of its variable, and empty is the same as unset."""

import os
from pathlib import Path

import pytest

from app import wiring
from app.domain.errors import BadConfig, UnknownPolicy
from app.settings import Settings, from_environment, is_loopback, models_folder, owner_of, policies, read_toml, user_of


def given(**variables: str) -> Settings:
    return from_environment({f"RATCHET_{name}": value for name, value in variables.items()})


@pytest.mark.parametrize(
    ("variable", "value", "cure"),
    [
        ("INGEST", "kafka", "set it to `inbox` or `direct`"),
        ("INGEST", "direct", "set RATCHET_KAFKA_BOOTSTRAP"),
        ("PORT", "0", "a number from 1 to 65535"),
        ("PORT", "65536", "a number from 1 to 65535"),
        ("PORT", "http", "a number from 1 to 65535"),
        ("DRAIN_S", "-1", "set it to seconds, such as 60"),
        ("DRAIN_S", "inf", "set it to seconds, such as 60"),
        ("DRAIN_S", "a minute", "set it to seconds, such as 60"),
        ("TRACES_SHARE", "-0.01", "set it to a share from 0 to 1, such as 0.01"),
        ("TRACES_SHARE", "1.01", "set it to a share from 0 to 1, such as 0.01"),
        ("TRACES_SHARE", "nan", "set it to a share from 0 to 1, such as 0.01"),
        ("TRACES_SHARE", "all", "set it to a share from 0 to 1, such as 0.01"),
        ("TRACES", "collector:4318", "set it to the address of a collector"),
        ("TRACES", "http://collector:4318/?token=a", "set it to the address of a collector"),
        ("STANDBY", "yes", "set it to `required`, or leave it out"),
        ("LOG_FORMAT", "xml", "set it to `text` or `json`"),
        ("REGION", "EU West", "lower-case letters, digits and hyphens, such as eu-west-1"),
        ("REGION", "eu-", "such as eu-west-1"),
        ("REGION", "a" * 64, "at most 63"),
        ("PUBLIC_URL", "ratchet.example.com", "such as https://ratchet.example.com"),
        ("PUBLIC_URL", "https://ratchet.example.com/console", "such as https://ratchet.example.com"),
        ("ORIGINS", "https://*", "without a path or `[*]`"),
        ("OIDC_ISSUER", "https://idp.example.com", "set all three, or none"),
        ("OIDC_CLIENT_SECRET", "s", "set all three, or none"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name_with_the_cure(variable: str, value: str, cure: str) -> None:
    with pytest.raises(BadConfig, match=f"RATCHET_{variable}.*{cure}"):
        given(**{variable: value})


def test_what_is_meant_is_read() -> None:
    found = given(
        STANDBY="required", LOG_FORMAT="json", DRAIN_S="60", PUBLIC_URL="https://ratchet.example.com/", ENGINES="http://a:1,http://b:2",
        INGEST="direct", KAFKA_BOOTSTRAP="kafka:9092", SESSION_SECRETS="new,old", OIDC_ISSUER="https://i", OIDC_CLIENT_ID="c",
        OIDC_CLIENT_SECRET="s",
    )  # fmt: skip
    assert (found.standby_required, found.log_format, found.drain_s, found.ingest) == (True, "json", 60.0, "direct")
    assert (found.public_url, found.engines) == ("https://ratchet.example.com", ("http://a:1", "http://b:2"))
    assert (found.session_secrets, found.oidc) == (("new", "old"), ("https://i", "c", "s"))


@pytest.mark.parametrize(
    ("variable", "value", "read"),
    [
        ("PORT", "1", ("port", 1)),
        ("PORT", "65535", ("port", 65535)),
        ("DRAIN_S", "0", ("drain_s", 0.0)),
        ("TRACES_SHARE", "0", ("traces_share", 0.0)),
        ("TRACES_SHARE", "1", ("traces_share", 1.0)),
        ("TRACES", "https://collector/v1", ("traces", "https://collector/v1")),
        ("ENGINES", ",http://a:1,,http://b:2,", ("engines", ("http://a:1", "http://b:2"))),
        ("HOSTS", " Ratchet.Example.com, ,b ", ("hosts", frozenset({"ratchet.example.com", "b"}))),
        ("ORIGINS", "https://App.example.com, ,http://b:3", ("origins", frozenset({"https://app.example.com", "http://b:3"}))),
        ("SESSION_SECRETS", ",new,,old", ("session_secrets", ("new", "old"))),
        ("WEBHOOK_KEYS", ",new,,old", ("webhook_keys", ("new", "old"))),
        ("REGION", "eu-west-1", ("region", "eu-west-1")),
        ("REGION", "a" * 63, ("region", "a" * 63)),
        ("REGION", "", ("region", "")),
        ("METRICS", "0.0.0.0:9464", ("metrics", "0.0.0.0:9464")),
        ("SANDBOX_TOKEN", "secret", ("sandbox_token", "secret")),
        ("SANDBOX_URL", "http://ray", ("sandbox_url", "http://ray")),
        ("VLLM_KEY", "k", ("vllm_key", "k")),
        ("SGLANG_KEY", "k", ("sglang_key", "k")),
        ("SGLANG_ADMIN_KEY", "k", ("sglang_admin_key", "k")),
        ("SMTP", "smtp://host:587", ("smtp", "smtp://host:587")),
        ("KAFKA_PASSWORD", "p", ("kafka_password", "p")),
        ("ACTOR_SALT", "pepper", ("actor_salt", "pepper")),
    ],
)
def test_what_is_just_within_its_bounds_is_read(variable: str, value: str, read: tuple[str, object]) -> None:
    name, expected = read
    assert getattr(given(**{variable: value}), name) == expected


def test_what_nobody_set_is_none_and_not_empty() -> None:
    found = given()
    for name in (
        "config", "kafka_bootstrap", "smtp", "kafka_password", "vllm_key", "sglang_key", "sglang_admin_key", "public_url", "oidc",
        "actor_salt", "sandbox_url", "sandbox_token", "metrics", "traces",
    ):  # fmt: skip
        assert getattr(found, name) is None, name
    assert found.standby_required is False


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, None),
        ({"HOST": "localhost"}, None),
        ({"HOST": "::1"}, None),
        ({"HOST": "0.0.0.0"}, "RATCHET_HOST is 0.0.0.0"),
        ({"HOSTS": "localhost,127.0.0.2"}, None),
        ({"HOSTS": "localhost,ratchet.example.com"}, "RATCHET_HOSTS names ratchet.example.com"),
        ({"HOSTS": "10.0.0.1"}, "RATCHET_HOSTS names 10.0.0.1"),
        ({"ORIGINS": "http://localhost:3000"}, None),
        ({"ORIGINS": "https://app.example.com"}, "RATCHET_ORIGINS names https://app.example.com"),
        ({"PUBLIC_URL": "http://[::1]:8400"}, None),
        ({"PUBLIC_URL": "https://ratchet.example.com"}, "RATCHET_PUBLIC_URL names https://ratchet.example.com"),
    ],
)
def test_it_is_said_by_what_others_than_this_machine_reach_the_service(variables: dict[str, str], said: str | None) -> None:
    assert given(**variables).reached_by == said


@pytest.mark.parametrize(
    ("host", "is_own"),
    [("LOCALHOST", True), ("127.9.9.9", True), ("[::1]", True), ("0.0.0.0", False), ("example.com", False), ("", False)],
)
def test_this_machine_s_own_names_and_addresses_are_told_from_others(host: str, is_own: bool) -> None:
    assert is_loopback(host) is is_own


def test_the_address_is_the_public_one_or_that_which_is_listened_on() -> None:
    assert given(HOST="127.0.0.1", PORT="8500").address == "http://127.0.0.1:8500"
    assert given(PUBLIC_URL="https://ratchet.example.com/").address == "https://ratchet.example.com"


def test_a_model_is_beside_the_configuration_or_among_those_that_were_brought(tmp_path: Path) -> None:
    declared = {name: {"model": model, "base_name": "b", "base_model": "b"} for name, model in (("own", "m"), ("brought", "ratchet:m"))}
    found = policies({"policies": declared}, relative_to=tmp_path)
    assert found["own"].model == str(tmp_path / "m")
    assert found["brought"].model == str((models_folder() / "m").resolve())


def test_models_are_kept_where_the_environment_says_or_in_the_checkout(tmp_path: Path) -> None:
    assert models_folder({"RATCHET_MODELS": str(tmp_path / "a" / ".." / "b"), "XDG_CACHE_HOME": "/c"}) == tmp_path / "b"
    checkout = Path(wiring.__file__).resolve().parents[1]
    assert models_folder({"XDG_CACHE_HOME": "/c"}) == checkout / ".cache" / "models"


def test_a_configuration_is_owned_by_whoever_owns_its_file(tmp_path: Path) -> None:
    assert owner_of(None) is None
    assert owner_of(tmp_path) == f"user:{tmp_path.owner()}"
    assert user_of(os.getuid()) == f"user:{tmp_path.owner()}"
    assert user_of(3_999_999_999) == "user:uid-3999999999", "images list no users"
    assert read_toml(None) == {}


def test_a_variable_that_is_empty_is_as_good_as_unset(tmp_path: Path) -> None:
    empty = given(DATA=str(tmp_path), PORT="", INGEST="", KAFKA_BOOTSTRAP="", LOG_FORMAT="", DRAIN_S="", ENGINES="", CONFIG="", STANDBY="")
    assert empty == given(DATA=str(tmp_path))
    assert (empty.port, empty.drain_s, empty.config, empty.database_url) == (8400, 0.5, None, f"sqlite:///{tmp_path}/ratchet.db")


def test_one_database_holds_the_inbox_too_unless_the_inbox_has_its_own() -> None:
    assert given(DATABASE_URL="postgresql://a").inbox_url == "postgresql://a"
    assert given(DATABASE_URL="postgresql://a", INBOX_URL="postgresql://b").inbox_url == "postgresql://b"


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot read the configuration .* check RATCHET_CONFIG"), (b"policies = [", "is not TOML"), (b"a = '\xff'", "is not TOML")],
)
def test_a_configuration_that_cannot_be_read_is_told_with_its_path(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "ratchet.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadConfig, match=said) as refused:
        read_toml(path)
    assert str(path) in str(refused.value)


def test_a_policy_that_is_declared_wrongly_is_told_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"\[policies\] in the configuration: .*base_name"):
        policies({"policies": {"composer": {"model": "m", "base_model": "b"}}}, relative_to=tmp_path)


# --- what the wiring refuses ---------------------------------------------------------------------------------------------


def test_replicas_are_not_left_to_make_a_secret_each() -> None:
    shared = given(DATABASE_URL="postgresql+psycopg://db/ratchet")
    with pytest.raises(BadConfig, match="RATCHET_ACTOR_SALT"):
        wiring.actor_salt(shared)
    with pytest.raises(BadConfig, match="RATCHET_WEBHOOK_KEYS"):
        wiring.webhook_keys(shared)


def test_secrets_of_the_environment_are_used_and_rotated_where_they_are_set(tmp_path: Path) -> None:
    named = given(DATA=str(tmp_path), SESSION_SECRETS="new,old", WEBHOOK_KEYS="key", ACTOR_SALT="pepper")
    assert (wiring.session_secrets(named)(), wiring.webhook_keys(named), wiring.actor_salt(named)) == (("new", "old"), ("key",), "pepper")
    with pytest.raises(BadConfig, match="RATCHET_SESSION_SECRETS is set: put a fresh secret in front of it"):
        wiring.rotate_session_secret(named, by="user:ada")
    assert list(tmp_path.iterdir()) == [], "nothing of our own is made beside them"


def test_a_broker_of_our_own_beside_a_cluster_and_a_sandbox_without_a_server_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="RATCHET_KAFKA_BOOTSTRAP is kafka:9092: that cluster is used"):
        wiring.become_broker(given(DATA=str(tmp_path), KAFKA_BOOTSTRAP="kafka:9092"))
    with pytest.raises(BadConfig, match="RATCHET_SANDBOX_URL is unset"):
        wiring.cluster_boxes(given(DATA=str(tmp_path)))


def test_engines_of_two_kinds_are_not_mixed(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="list one kind only"):
        wiring.open_engines(given(DATA=str(tmp_path), ENGINES="http://127.0.0.1:8401,vllm+http://127.0.0.1:8000"))
    with pytest.raises(BadConfig, match="mixes vLLM servers and engines of another make"):
        wiring.open_engines(given(DATA=str(tmp_path), ENGINES="sglang+http://127.0.0.1:30000,vllm+http://127.0.0.1:8000"))


def test_a_keeper_looks_after_one_server_of_one_make(tmp_path: Path) -> None:
    settings = given(DATA=str(tmp_path))
    for named in ({"vllm": None, "sglang": None}, {"vllm": "http://a", "sglang": "http://b"}):
        with pytest.raises(BadConfig, match="--vllm URL or --sglang URL"):
            wiring.server_control(settings, **named)
    assert wiring.server_control(settings, vllm=None, sglang="http://b/").url == "http://b"


def test_a_policy_that_nobody_declared_is_told_with_those_there_are(tmp_path: Path) -> None:
    (tmp_path / "ratchet.toml").write_text('[policies.composer]\nmodel = "m"\nbase_name = "b"\nbase_model = "b"\n')
    declared = wiring.load_policies(given(DATA=str(tmp_path), CONFIG=str(tmp_path / "ratchet.toml")))
    with pytest.raises((BadConfig, UnknownPolicy), match="composer"):
        wiring.require_policy(declared, "nobody")
