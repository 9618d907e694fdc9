"""Addresses and secrets, from the environment (`RATCHET_…`). Config says how, environment says where.

Only entry points read this: `app.main`, `app.wiring`, `pipelines.__main__` and `pipelines.commands`.
"""

import ipaddress
import math
import os
import pwd
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from app.domain.errors import BadConfig
from app.domain.policies import PolicyConfig

BROUGHT = "ratchet:"
"""Before the name of a model that `ratchet model` fetches or makes, where a configuration names one: `ratchet:smollm2-135m-instruct`."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where everything is. Every field has an environment variable of the same name in capitals with the prefix RATCHET_."""

    data: Path
    """Folder of everything embedded: databases, segments, weights, logs. One `ratchet up` per folder."""
    config: Path | None
    """TOML file; None means the vetted defaults with the embedded quickstart policy."""
    database_url: str
    inbox_url: str
    kafka_bootstrap: str | None
    """Unset: a supervised embedded broker on loopback. Set: a real cluster, with the idempotent, replicated profile."""
    smtp: str | None
    """RATCHET_SMTP, `smtp://user:password@host:587` (STARTTLS) or `smtps://…:465`: mail for receivers `mailto:…`."""
    mail_from: str
    """RATCHET_MAIL_FROM, such as `ratchet@example.com`."""
    kafka_password: str | None
    """Of the SASL user, or the secret of the OAuth client, that `[kafka]` names."""
    engine_key: str | None
    """RATCHET_ENGINE_KEY: what embedded engines ask of whoever samples from them; needed where other machines reach them."""
    vllm_key: str | None
    """What vLLM servers were started with as `--api-key`."""
    sglang_key: str | None
    """What SGLang servers were started with as `--api-key`."""
    sglang_admin_key: str | None
    """And as `--admin-api-key`, which replacing weights needs where they have one."""
    segments: str
    """Local folder or s3://bucket/prefix."""
    weights: str
    """Local folder or s3://bucket/prefix."""
    states: str
    """RATCHET_STATES: checkpoints of running updates, and what an update continues from. Local folder or s3://bucket/prefix; the latter
    where a Ray cluster of several machines trains, or another replica of the loop shall resume what a lost one had begun."""
    mlflow_uri: str
    engines: tuple[str, ...]
    """Base URLs of the engines."""
    host: str
    port: int
    hosts: frozenset[str]
    """Names under which others reach the service, such as `ratchet.example.com`: requests with another Host are refused, whatever they ask.
    `localhost` and, where RATCHET_HOST is not loopback, addresses need no entry. `*` is any."""
    origins: frozenset[str]
    """Origins of other sites' pages that may call the service, such as `https://app.example.com`; none by default."""
    public_url: str | None
    """RATCHET_PUBLIC_URL, where browsers reach the service, such as `https://ratchet.example.com`: links in messages begin with it, and
    cookies of an https one never travel in clear. Unset: `http://RATCHET_HOST:RATCHET_PORT`."""
    oidc: tuple[str, str, str] | None
    """RATCHET_OIDC_ISSUER, RATCHET_OIDC_CLIENT_ID, RATCHET_OIDC_CLIENT_SECRET: the provider where people sign in; all three or none."""
    actor_salt: str | None
    """Secret under which people's ids are hashed; changing it makes everybody a stranger. Unset: one made for this data folder."""
    session_secrets: tuple[str, ...]
    """RATCHET_SESSION_SECRETS, the newest first, separated by commas: they sign the keys of sessions. Unset: made for this data folder."""
    webhook_keys: tuple[str, ...]
    """RATCHET_WEBHOOK_KEYS, the newest first, separated by commas: they seal the signing secrets of webhooks in the database.
    Unset: made for this data folder."""
    sandbox_url: str | None
    """Ray's sandbox server of a cluster, where rollouts are graded there."""
    sandbox_token: str | None
    sandbox_image: str
    """Container image of its boxes: a Python and tar."""
    ingest: str
    """`inbox` (ack after the inbox commit) or `direct` (ack after a replicated broker's ack)."""
    log_level: str
    standby_required: bool
    """RATCHET_STANDBY=required: refuse a database whose commits wait for no standby."""
    log_format: str
    """`text`, or `json`: one object per line."""
    drain_s: float
    """RATCHET_DRAIN_S: how long the api, when it is told to end, finishes the answers that are being written; others are refused meanwhile.
    As long as the longest answer where people use it, so that an upgrade cuts none off."""
    traces: str | None
    """RATCHET_TRACES: an OpenTelemetry collector (OTLP over HTTP), such as `http://collector:4318`; unset: nothing is traced."""
    traces_share: float
    """RATCHET_TRACES_SHARE: of turns whose caller does not say whether its trace is taken (`traceparent`)."""
    region: str
    """RATCHET_REGION, such as `eu-west-1`: where an engine or an api stands. Gateways prefer engines of their own region, and the ledger
    says how far each region is behind. Empty: there is one region."""
    metrics: str | None
    """Where relay, ingest, label, loop and watch show their metrics and answer probes, such as `0.0.0.0:9464`; unset: nowhere."""

    @property
    def address(self) -> str:
        """Where people reach the service, without a slash at the end."""
        return self.public_url or f"http://{self.host}:{self.port}"

    @property
    def reached_by(self) -> str | None:
        """What says that others than this machine reach the service, directly or through a proxy on it; None where nothing does."""
        if self.host not in LOOPBACK:
            return f"RATCHET_HOST is {self.host}"
        named = [("RATCHET_HOSTS", name, name) for name in sorted(self.hosts)]
        named += [("RATCHET_ORIGINS", url, urlsplit(url).hostname) for url in sorted(self.origins)]
        named += [("RATCHET_PUBLIC_URL", url, urlsplit(url).hostname) for url in (self.public_url,) if url]
        return next((f"{variable} names {said}" for variable, said, host in named if not is_loopback(host or "")), None)

    @property
    def secrets(self) -> Path:
        """Folder of the secrets that this deployment made for itself, readable by its owner alone."""
        return self.data / "secrets"


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own, wherever it is asked for."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings; raises `BadConfig` with the variable's name and the cure."""

    def get(name: str, default: str) -> str:
        return environment.get(f"RATCHET_{name}") or default

    data = Path(get("DATA", ".ratchet")).resolve()
    config = get("CONFIG", "")
    ingest = get("INGEST", "inbox")
    if ingest not in ("inbox", "direct"):
        raise BadConfig(f"RATCHET_INGEST is {ingest!r}: set it to `inbox` or `direct`")
    if ingest == "direct" and not get("KAFKA_BOOTSTRAP", ""):
        raise BadConfig("RATCHET_INGEST=direct needs a replicated cluster: set RATCHET_KAFKA_BOOTSTRAP, or use RATCHET_INGEST=inbox")
    return Settings(
        data=data,
        config=Path(config).resolve() if config else None,
        database_url=get("DATABASE_URL", f"sqlite:///{data}/ratchet.db"),
        inbox_url=get("INBOX_URL", environment.get("RATCHET_DATABASE_URL") or f"sqlite:///{data}/inbox.db"),
        kafka_bootstrap=get("KAFKA_BOOTSTRAP", "") or None,
        smtp=get("SMTP", "") or None,
        mail_from=get("MAIL_FROM", "ratchet@localhost"),
        kafka_password=get("KAFKA_PASSWORD", "") or None,
        engine_key=get("ENGINE_KEY", "") or None,
        vllm_key=get("VLLM_KEY", "") or None,
        sglang_key=get("SGLANG_KEY", "") or None,
        sglang_admin_key=get("SGLANG_ADMIN_KEY", "") or None,
        segments=get("SEGMENTS", str(data / "segments")),
        weights=get("WEIGHTS", str(data / "weights")),
        states=get("STATES", str(data / "training")),
        mlflow_uri=get("MLFLOW_URI", f"sqlite:///{data}/mlflow.db"),
        engines=tuple(url for url in get("ENGINES", "http://127.0.0.1:8401").split(",") if url),
        host=get("HOST", "127.0.0.1"),
        port=_port(get("PORT", "8400")),
        hosts=frozenset(name.strip().lower() for name in get("HOSTS", "").split(",") if name.strip()),
        origins=frozenset(_origin(text.strip()) for text in get("ORIGINS", "").split(",") if text.strip()),
        public_url=_public(get("PUBLIC_URL", "")),
        oidc=_oidc(get("OIDC_ISSUER", ""), get("OIDC_CLIENT_ID", ""), get("OIDC_CLIENT_SECRET", "")),
        actor_salt=get("ACTOR_SALT", "") or None,
        session_secrets=tuple(secret for secret in get("SESSION_SECRETS", "").split(",") if secret),
        webhook_keys=tuple(key for key in get("WEBHOOK_KEYS", "").split(",") if key),
        sandbox_url=get("SANDBOX_URL", "") or None,
        sandbox_token=get("SANDBOX_TOKEN", "") or None,
        sandbox_image=get("SANDBOX_IMAGE", "python:3.11-slim"),
        ingest=ingest,
        log_level=get("LOG_LEVEL", "INFO"),
        standby_required=_standby(get("STANDBY", "")),
        log_format=_log_format(get("LOG_FORMAT", "text")),
        drain_s=_seconds("DRAIN_S", get("DRAIN_S", "0.5")),
        region=_region(get("REGION", "")),
        metrics=get("METRICS", "") or None,
        traces=_collector(get("TRACES", "")),
        traces_share=_share("TRACES_SHARE", get("TRACES_SHARE", "0.01")),
    )


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < math.inf:
        raise BadConfig(f"RATCHET_{name} is {text!r}: set it to seconds, such as 60")
    return seconds


def _share(name: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise BadConfig(f"RATCHET_{name} is {text!r}: set it to a share from 0 to 1, such as 0.01")
    return share


def _collector(text: str) -> str | None:
    if text and not re.fullmatch(r"https?://[^\s?#]+", text):
        raise BadConfig(f"RATCHET_TRACES is {text!r}: set it to the address of a collector, such as http://127.0.0.1:4318")
    return text or None


def _standby(text: str) -> bool:
    if text not in ("", "required"):
        raise BadConfig(f"RATCHET_STANDBY is {text!r}: set it to `required`, or leave it out")
    return text == "required"


def _region(text: str) -> str:
    if text and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", text):
        raise BadConfig(f"RATCHET_REGION is {text!r}: name it with at most 63 lower-case letters, digits and hyphens, such as eu-west-1")
    return text


def _log_format(text: str) -> str:
    if text not in ("text", "json"):
        raise BadConfig(f"RATCHET_LOG_FORMAT is {text!r}: set it to `text` or `json`")
    return text


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise BadConfig(f"RATCHET_PORT is {text!r}: set it to a number from 1 to 65535")
    return int(text)


def _public(text: str) -> str | None:
    """The address as links begin with it. Raises `BadConfig`."""
    if not text:
        return None
    if not re.fullmatch(r"https?://[^/\s?#@]+(/)?", text):
        raise BadConfig(f"RATCHET_PUBLIC_URL is {text!r}: write where browsers reach the service, such as https://ratchet.example.com")
    return text.rstrip("/")


def _oidc(issuer: str, client_id: str, client_secret: str) -> tuple[str, str, str] | None:
    """All three or none. Raises `BadConfig`."""
    given = (issuer, client_id, client_secret)
    if any(given) and not all(given):
        raise BadConfig("RATCHET_OIDC_ISSUER, RATCHET_OIDC_CLIENT_ID and RATCHET_OIDC_CLIENT_SECRET go together: set all three, or none")
    return given if issuer else None


def _origin(text: str) -> str:
    """An origin as browsers write it. Raises `BadConfig`."""
    if not re.fullmatch(r"https?://[^/\s*]+", text):
        raise BadConfig(f"RATCHET_ORIGINS names {text!r}: write an origin such as https://app.example.com, without a path or `*`")
    return text.lower()


def owner_of(path: Path | None) -> str | None:
    """`user:<name>` of whoever owns a configuration file; None without one."""
    return None if path is None else user_of(path.stat().st_uid)


def user_of(uid: int) -> str:
    """`user:<name>` as this machine's list of users says it; `user:uid-<number>` of one that it does not list, as most images do not."""
    try:
        return f"user:{pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user:uid-{uid}"


def read_toml(path: Path | None) -> dict[str, Any]:
    """The configuration file as a dict; empty where there is none. Raises `BadConfig`."""
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise BadConfig(f"cannot read the configuration {path}: {error.strerror}; check RATCHET_CONFIG") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"the configuration {path} is not TOML: {error}") from error


def policies(toml: Mapping[str, Any], *, relative_to: Path) -> dict[str, PolicyConfig]:
    """The declared policies by name, with model folders made absolute. Raises `BadConfig` naming the wrong key."""
    try:
        declared = msgspec.convert(toml.get("policies", {}), dict[str, PolicyConfig])
    except msgspec.ValidationError as error:
        raise BadConfig(f"[policies] in the configuration: {error}") from error
    return {name: msgspec.structs.replace(policy, model=_model(policy.model, relative_to)) for name, policy in declared.items()}


def _model(named: str, relative_to: Path) -> str:
    """The folder of the snapshot: beside the configuration, or one of those that `ratchet model` brings."""
    brought = named.removeprefix(BROUGHT)
    return str((relative_to / named if brought == named else models_folder() / brought).resolve())


def models_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where `ratchet model` puts models: RATCHET_MODELS, else `.cache/models` of a checkout, else this user's cache."""
    named, checkout = environment.get("RATCHET_MODELS"), Path(__file__).resolve().parents[1]
    if named:
        return Path(named).resolve()
    if (checkout / "pyproject.toml").is_file():
        return checkout / ".cache" / "models"
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "ratchet" / "models"
