"""The production examples of infra/ name what exists: commands, settings, services, secrets."""

import re
import tomllib
from typing import Any

import pytest
import yaml

from app.messaging.options import kafka_config
from app.settings import policies, read_toml
from pipelines.__main__ import COMMANDS
from tests.architecture.sources import ROOT, known_settings

INFRA = ROOT / "infra"
PROCESSES = {"api", "engine", "relay", "ingest", "label", "loop", "watch"}
"""DESIGN section 9; the broker is Kafka there."""


@pytest.fixture
def services() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((INFRA / "compose.yaml").read_text())["services"]
    return loaded


def ours(services: dict[str, Any]) -> dict[str, Any]:
    """The services that run `ratchet`: those of our image with its own entry point."""
    return {name: service for name, service in services.items() if service.get("image") == "ratchet" and "entrypoint" not in service}


def test_every_process_of_the_design_runs(services: dict[str, Any]) -> None:
    assert ours(services).keys() >= PROCESSES


def test_every_command_is_a_command(services: dict[str, Any]) -> None:
    assert {service["command"][0] for service in ours(services).values()} <= COMMANDS.keys()


def test_every_setting_is_read() -> None:
    known = known_settings()
    for file in (path for path in INFRA.rglob("*") if path.is_file() and path.suffix != ".pyc"):
        assert set(re.findall(r"RATCHET_[A-Z_]+\b", file.read_text())) <= known, file


def test_every_secret_has_its_line_in_the_example() -> None:
    asked = {name for file in INFRA.glob("compose*.yaml") for name in re.findall(r"\$\{([A-Z_]+):\?\}", file.read_text())}
    offered = set(re.findall(r"^([A-Z_]+)=$", (INFRA / "env.example").read_text(), re.MULTILINE))
    assert asked == offered


def test_no_secret_stands_on_a_command_line_that_every_user_of_the_machine_reads() -> None:
    files = sorted(INFRA.glob("compose*.yaml"))
    run = {(file.name, name): service for file in files for name, service in yaml.safe_load(file.read_text())["services"].items()}
    words = {where: str([service.get("entrypoint"), service.get("command")]) for where, service in run.items()}
    secret = re.compile(r"\$\{?[A-Z_]*(?:PASSWORD|SECRET|TOKEN|SALT|KEY)|://[^/\s'\"]*:[^/\s'\"]*@")
    assert len(words) > 10
    assert {where: said for where, said in words.items() if secret.search(said)} == {}


def test_every_mounted_file_is_there(services: dict[str, Any]) -> None:
    mounted = [volume.split(":")[0] for service in services.values() for volume in service.get("volumes", [])]
    assert [source for source in mounted if source.startswith("./") and not (INFRA / source).exists()] == []


def test_prometheus_scrapes_services_that_exist(services: dict[str, Any]) -> None:
    scraped = yaml.safe_load((INFRA / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in scraped for static in job["static_configs"] for target in static["targets"]]
    assert {target.split(":")[0] for target in targets} <= services.keys()


def test_prometheus_shows_the_api_a_key() -> None:
    jobs = yaml.safe_load((INFRA / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    asked = {target: job.get("authorization", {}) for job in jobs for static in job["static_configs"] for target in static["targets"]}
    compose = yaml.safe_load((INFRA / "compose.yaml").read_text())
    mounted = {config["target"] for config in compose["services"]["prometheus"]["configs"]}
    assert asked["api:8400"]["credentials_file"] in mounted


def test_the_standby_is_known_to_whoever_uses_the_database(services: dict[str, Any]) -> None:
    overlay = yaml.safe_load((INFRA / "compose.standby.yaml").read_text())["services"]
    leaning = {name for name in ours(services) if name != "model"}
    assert {name for name, service in overlay.items() if "RATCHET_STANDBY" in service.get("environment", {})} == leaning
    assert all("host=standby" in overlay[name]["environment"]["RATCHET_DATABASE_URL"] for name in leaning)
    assert overlay["standby"]["image"] == services["postgres"]["image"]


def test_every_image_of_others_is_named_by_tag_and_digest() -> None:
    """A tag is whatever its registry says that day. `image:` of the chart is our own, with a digest of whoever builds it."""
    files = [INFRA / "Dockerfile", *INFRA.glob("*.yaml")]
    named = {
        name for file in files for name in re.findall(r"^\s*(?:-\s*)?(?:image: *|ARG BASE=|FROM )(\S+)", file.read_text(), re.MULTILINE)
    }
    others = {name.strip("\"'") for name in named} - {"ratchet", "${BASE}"}
    assert {name for name in others if not re.fullmatch(r"[\w./\-]+:[\w.\-]+@sha256:[0-9a-f]{64}", name)} == set()
    assert len(others) == 5
    templates = [path for path in (INFRA / "helm").rglob("*.yaml") if re.search(r"image: [^{\"\s]", path.read_text())]
    assert [path.name for path in templates] == ["one-gpu.yaml"], "an example, of a registry that is none"


def test_brokers_are_of_a_version_that_operators_still_run_and_objects_are_kept_by_what_is_maintained(services: dict[str, Any]) -> None:
    """Strimzi dropped Kafka 4.1 with its 1.1, and nobody publishes MinIO any more."""
    version = re.fullmatch(r"apache/kafka:(\d+)\.(\d+)\.(\d+)@sha256:\w+", services["kafka"]["image"])
    assert version is not None
    assert tuple(map(int, version.groups())) >= (4, 3, 0)
    chart = yaml.safe_load((INFRA / "helm" / "ratchet" / "values.yaml").read_text())["references"]["kafka"]["version"]
    assert chart == ".".join(version.groups())
    assert not [name for name, service in services.items() if "minio" in service.get("image", "")]


def test_what_the_image_copies_is_not_ignored() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (INFRA / "Dockerfile").read_text(), re.MULTILINE)
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {source for line in copied for source in line.split()} == let_in


def test_the_images_extra_packages_are_hashed_and_those_that_the_project_names() -> None:
    lock = (INFRA / "s3.lock").read_text().replace("\\\n", " ").splitlines()
    assert all("--hash=sha256:" in line for line in lock)
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["s3"]
    assert set(extra) <= {line.split()[0] for line in lock}


def test_no_secret_is_on_a_command_line(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert "${" not in str(service.get("command", "")) + str(service.get("entrypoint", "")), name


def test_everything_that_compose_leans_on_asks_who_comes(services: dict[str, Any]) -> None:
    """What `ratchet doctor --only doors` asks of it where it runs; PostgreSQL's image asks for its password by itself."""
    kafka = services["kafka"]["environment"]
    listeners = dict(re.findall(r"(\w+)://([\w.]*):\d+", kafka["KAFKA_LISTENERS"]))
    security = dict(pair.split(":") for pair in kafka["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(","))
    assert {name for name, host in listeners.items() if host != "localhost" and not security[name].startswith("SASL_")} == set()
    # the image asks for a file of log-ins where an advertised listener is called SASL_…; this one carries its own
    assert "SASL" not in kafka["KAFKA_ADVERTISED_LISTENERS"]
    asked = kafka_config(read_toml(INFRA / "ratchet.toml"))
    assert (asked.security, asked.sasl_mechanism) == (security["CLIENT"], kafka["KAFKA_SASL_ENABLED_MECHANISMS"])
    assert f'user_{asked.username}="${{KAFKA_PASSWORD:?}}"' in kafka["KAFKA_LISTENER_NAME_CLIENT_PLAIN_SASL_JAAS_CONFIG"]
    (mounted,) = services["mlflow"]["configs"]
    assert "--app-name=basic-auth" in services["mlflow"]["command"]
    assert services["mlflow"]["environment"]["MLFLOW_AUTH_CONFIG_PATH"] == mounted["target"]
    for name, service in ours(services).items():
        if name != "model":
            given = service["environment"]
            assert {"RATCHET_KAFKA_PASSWORD", "RATCHET_ENGINE_KEY", "MLFLOW_TRACKING_PASSWORD"} <= given.keys(), name


def test_the_smallest_configuration_is_one() -> None:
    assert list(policies(read_toml(INFRA / "ratchet.toml"), relative_to=INFRA)) == ["composer"]


def test_the_topics_have_no_more_replicas_than_the_cluster_has_brokers(services: dict[str, Any]) -> None:
    voters = services["kafka"]["environment"]["KAFKA_CONTROLLER_QUORUM_VOTERS"].split(",")
    asked = kafka_config(read_toml(INFRA / "ratchet.toml"))
    assert (asked.replication, asked.min_insync_replicas) <= (len(voters), len(voters))
