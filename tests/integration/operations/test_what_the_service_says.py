"""What a whole service over one small deployment says to programs and at a terminal, word by word (tests/data/said): every answer of every
endpoint that only reads, every table of every command, every help and the document of its interface.

What stands there was read by somebody against what is in the tables. It is what scripts and people build upon: whoever changes it says so.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from click.testing import CliRunner

from app import wiring
from app.domain.ids import utc_now
from app.domain.people import Role
from app.main import application
from app.settings import Settings, from_environment
from pipelines.__main__ import ratchet
from tests.fakes.gateway import serving
from tests.fakes.people import Town
from tests.fakes.releases import POLICY
from tests.integration.console.deployment import busy, fill
from tests.said import differences, settled

ROOT = Path(__file__).resolve().parents[3]
CONFIG = f'[policies.{POLICY}]\nmodel = "model"\nbase_name = "tiny"\nbase_model = "tiny"\n'


@pytest.fixture(scope="module")
def since() -> datetime:
    return utc_now()


@pytest.fixture(scope="module")
def settings(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory, since: datetime) -> Settings:
    """A data folder where much has happened."""
    data = tmp_path_factory.mktemp("said")
    for name in ("ratchet.db", "inbox.db"):
        shutil.copyfile(sqlite_template, data / name)
    (data / "ratchet.toml").write_text(CONFIG)
    found = from_environment({"RATCHET_DATA": str(data), "RATCHET_CONFIG": str(data / "ratchet.toml")})
    wiring.keep_salt(found)
    engine = wiring.open_state(found)
    busy(engine)
    fill(engine, release_id="release-3", word="hello")
    engine.dispose()
    return found


@pytest.fixture(scope="module")
def url(settings: Settings, token: str) -> Iterator[str]:
    assert token, "made before the service starts, which is open otherwise"
    with closing(wiring.http_adapters(settings)) as adapters, serving(application(settings, adapters)) as address:
        used = httpx.get(f"{address}/v1/me", headers={"authorization": f"Bearer {token}"})
        assert used.status_code == 200, "whatever comes first, the key was used"
        yield address


@pytest.fixture(scope="module")
def token(settings: Settings) -> Iterator[str]:
    """Of somebody who may see everything."""
    engine = wiring.open_state(settings)
    town = Town(engine, utc_now)
    yield town.token(town.person("ada", Role.ADMIN))
    engine.dispose()


@pytest.fixture(scope="module")
def environment(settings: Settings, url: str, token: str) -> dict[str, str]:
    return {
        "RATCHET_DATA": str(settings.data), "RATCHET_CONFIG": str(settings.config), "RATCHET_URL": url, "RATCHET_TOKEN": token,
        "XDG_CONFIG_HOME": str(settings.data), "COLUMNS": "220",
    }  # fmt: skip


def named(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


ASKED = [
    "status", "status --json", "top --count 1", "releases", "releases --state aborted", "releases --json", "diff release-2 release-3",
    "slots", "slots --json", "tail --no-follow --lines 60", "tail --no-follow --subject release-2 --json",
    "people list", "people roles", "keys list", "webhooks list", "release list", "release show release-2",
    "release show release-3", "release explain release-2", "release explain release-3", "release alarms tab", "release holdout tab",
    "rules show tab", "labels report tab", "dlq list", "dlq show 1",
    "audit show --limit 60", "audit show --subject release-2", "audit verify", "cycle list tab", "suite list", "upkeep show", "env list",
    "db check", "lineage v2", "model list",
]  # fmt: skip


@pytest.mark.parametrize("words", ASKED, ids=named)
def test_what_a_command_says(environment: dict[str, str], settings: Settings, since: datetime, words: str) -> None:
    ran = CliRunner().invoke(ratchet, words.split(), env=environment)
    text = f"exit code {ran.exit_code}\n{ran.output}" + (f"{ran.exception}\n" if ran.exit_code not in (0, 1) or not ran.output else "")
    text = text.replace(str(settings.data), "DATA").replace(str(ROOT), "ROOT").replace(environment["RATCHET_URL"], "SERVICE")
    text = re.sub(r"oldest [1-9][\d.]* days", "oldest so many days", text)
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    assert differences(f"commands/{named(words)}", settled(text, since=since)) == []


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What every command says of itself, by its words."""
    told = subprocess.run([sys.executable, "-m", "tests.helps"], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(told.stdout)


@pytest.mark.parametrize("group", ["", *ratchet.list_commands(click.Context(ratchet))])
def test_what_help_says(helps: dict[str, str], group: str) -> None:
    """Words, arguments, bounds and defaults of every command, by its first word."""
    mine = [text for words, text in helps.items() if words.partition(" ")[0] == group]
    assert differences(f"help/{group or 'ratchet'}", "\n".join(mine)) == []


READ = [
    "/health", "/status", "/info", "/v1/models", "/v1/me", "/v1/engines", "/v1/policies", "/v1/runs", "/v1/versions", "/v1/releases",
    "/v1/labels/report", "/v1/people", "/v1/tokens", "/v1/keys", "/v1/webhooks", "/v1/dead-letters", "/v1/audit",
    "/v1/observations?inference_id=i3",
]  # fmt: skip


@pytest.mark.parametrize("path", READ, ids=named)
def test_what_an_endpoint_answers(url: str, token: str, since: datetime, path: str) -> None:
    answer = httpx.get(url + path, headers={"Authorization": f"Bearer {token}"})
    told = answer.json()
    if path == "/v1/engines":  # one of them reported when the deployment was made, and is asked for half a minute
        told["data"] = [
            {name: one[name] for name in ("address", "policies")} if one["address"] == "http://e" else one for one in told["data"]
        ]
        told["regions"] = [{name: value for name, value in one.items() if name != "engines"} for one in told["regions"]]
    text = re.sub(r"\b\d{5,}\.\d+\b", "<seconds since the clock stood>", json.dumps(told, indent=1, ensure_ascii=False))
    assert differences(f"endpoints/{named(path)}", f"{answer.status_code}\n{settled(text, since=since)}\n") == []


def plain(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def test_what_the_document_of_the_interface_says(url: str) -> None:
    """Every path, parameter, bound and default, and the fields of every body: what clients are written against."""
    document: dict[str, Any] = httpx.get(f"{url}/openapi.json").json()
    lines = [
        f"{method.upper()} {path} {' '.join(told['responses'])} {plain(told.get('parameters', []))} {plain(told.get('requestBody'))}"
        for path, methods in document["paths"].items() for method, told in methods.items()
    ]  # fmt: skip
    lines += sorted(f"{name} {plain(schema)}" for name, schema in document["components"]["schemas"].items())
    assert differences("interface", "\n".join(lines) + "\n") == []
