"""What a security team is shown is whole: every arrow of THREATS in all of STRIDE's letters, every client in the version that is run."""

import json
import re

import yaml

from tests.architecture.sources import ROOT

THREATS = (ROOT / "docs" / "THREATS.md").read_text()
SECTIONS = re.split(r"^## ", THREATS, flags=re.MULTILINE)[1:]
IN_THE_LOCK = {
    "openai": "openai", "tensorzero": "tensorzero", "langsmith": "langsmith", "langfuse": "langfuse", "mlflow": "mlflow",
    "arize-phoenix-client": "arize-phoenix-client", "opentelemetry-sdk, cloudevents": "opentelemetry-sdk",
}  # fmt: skip
"""Clients of the table in EVIDENCE whose version, or the first of several, is the lock's."""


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def test_every_arrow_of_the_picture_is_looked_at_in_every_letter_of_stride() -> None:
    picture = THREATS.split("```")[1]
    arrows = set(map(int, re.findall(r"──(\d+)", picture))) | set(map(int, re.findall(r"\b(\d+) (?:──|feedback token)", picture)))
    assert arrows == set(range(1, 12))
    looked_at: set[int] = set()
    for section in (section for section in SECTIONS if section[0].isdigit()):
        title, *lines = section.splitlines()
        rows = [cells(line) for line in lines if re.match(r"\| [STRIDE](?:, [STRIDE])* \|", line)]
        letters = {letter for row in rows for letter in row[0].split(", ")}
        assert letters == set("STRIDE"), f"{title}: {sorted(set('STRIDE') - letters)}"
        assert all(len(row) == 4 and all(row) for row in rows), title
        looked_at |= set(map(int, re.findall(r"\d+", title.partition(":")[0])))
    assert looked_at == arrows


def test_every_threat_names_what_shows_that_it_is_held() -> None:
    """A file or folder of tests, or a bench; `same` is the line's before. What is not held says so, and is told at the end."""
    rows = [cells(line) for section in SECTIONS for line in section.splitlines() if re.match(r"\| [STRIDE](?:, [STRIDE])* \|", line)]
    assert len(rows) > 60
    for _, _, held, cell in rows:
        if held.startswith("not held"):
            continue
        quoted = re.findall(r"`(tests/[\w/.]+)`", cell)
        assert quoted or "make bench-" in cell or cell.startswith("same"), cell
        assert [path for path in quoted if not (ROOT / path).exists()] == []


def test_every_client_in_evidence_is_in_the_version_that_is_run() -> None:
    table = (ROOT / "docs" / "EVIDENCE.md").read_text().split("## Clients")[1].split("\n## ")[0]
    said = {row[0]: row[1] for row in map(cells, table.splitlines()) if len(row) == 4}
    lock = dict(re.findall(r"^([\w\-]+)==([\w.]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    for client, package in IN_THE_LOCK.items():
        assert re.match(r"[\d.]+", said[client])[0] == lock[package], client  # type: ignore[index] - a version begins each of these cells
    programs = ROOT / "tests" / "real" / "clients"
    others = {"litellm": "with_litellm", "langchain-openai": "with_langchain", "openai-agents": "with_agents"}
    for client, program in others.items():
        assert f"{client}=={said[client]}" in (programs / f"{program}.txt").read_text().splitlines()
    node = json.loads((programs / "package.json").read_text())["dependencies"]
    assert said["Vercel AI SDK (`ai`, `@ai-sdk/openai`)"] == f"{node['ai']}, {node['@ai-sdk/openai']}"
    assert said["langsmith"].endswith((programs / "with_langsmith.txt").read_text().partition("langsmith==")[2].partition(",")[0])


def test_another_machine_reaches_nothing_of_compose_but_the_api_which_needs_a_key_there() -> None:
    """Broker, databases, MLflow, engines and objects: the network of compose alone reaches them."""
    published: dict[str, list[str]] = {}
    for file in sorted((ROOT / "infra").glob("compose*.yaml")):
        for name, service in yaml.safe_load(file.read_text())["services"].items():
            assert "network_mode" not in service, f"{name} of {file.name} would stand in the host's network"
            published.setdefault(name, []).extend(str(port) for port in service.get("ports", []))
    outside = {name: ports for name, ports in published.items() if [port for port in ports if not port.startswith("127.0.0.1:")]}
    assert outside == {"api": ["8400:8400"]}
    assert {"kafka", "postgres", "mlflow", "engine"} <= published.keys()
