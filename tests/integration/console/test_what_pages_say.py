"""Every page over two small deployments, word by word: each cell, figure, link, field and line of a chart (tests/data/said).

What stands there was read by somebody against what is in the tables; the other tests of the pages say why it is so.
"""

import re
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from sqlalchemy import Engine

from app.db.access.keys import SqlKeys
from app.db.access.people import SqlPeople
from app.db.engine import open_engine
from app.db.learning.rule_sets import SqlReplays
from app.domain.access import Order, Scope
from app.domain.ids import utc_now
from app.domain.learning.rule_sets import AskedReplay
from app.domain.people import Role, Visitor
from tests.fakes.console import ADMIN, OPERATOR, VIEWER, browser
from tests.fakes.releases import POLICY
from tests.integration.console.deployment import busy, deploy
from tests.integration.console.test_pages import PATHS
from tests.integration.console.test_rewards_by_people import RATING, labeller, rated
from tests.said import differences, read_page, settled

OWN = Visitor(actor="user:pat", actions=VIEWER.actions, policy=POLICY)
"""Somebody who looks at one policy and may do nothing."""


@pytest.fixture(scope="module")
def since() -> datetime:
    return utc_now()


@pytest.fixture(scope="module")
def quiet(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory, since: datetime) -> Iterator[Engine]:
    """The deployment of the other tests of the pages, with people and a key."""
    engine = open_engine(f"sqlite:///{shutil.copyfile(sqlite_template, tmp_path_factory.mktemp('quiet') / 'ratchet.db')}")
    deploy(engine)
    people = SqlPeople(engine)
    people.add("zoe", roles=[Role.OPERATOR, Role.VIEWER], by="user:root", email="zoe@example.org", policy=POLICY)
    people.add("max", roles=[Role.VIEWER], by="user:root")
    people.change("max", by="user:root", disabled=True)
    SqlKeys(engine).create(name="editor", scopes=[Scope.INGEST, Scope.READ], policy=POLICY, rate_per_s=5.0, by="user:root")
    rated(engine)
    asked = AskedReplay(id="replay-1", policy=POLICY, toml=RATING, asked_by="user:cora", asked_at=utc_now())
    order = Order(act="rule_set.replay", subject=POLICY, actor="user:cora", request_id="replay-1")
    SqlReplays(engine).ask(asked, order)
    assert labeller(engine)
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def troubled(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory, since: datetime) -> Iterator[Engine]:
    """One where everything happens at once."""
    engine = open_engine(f"sqlite:///{shutil.copyfile(sqlite_template, tmp_path_factory.mktemp('troubled') / 'ratchet.db')}")
    busy(engine)
    yield engine
    engine.dispose()


def unlike(engine: Engine, visitor: Visitor, path: str, since: datetime, *, of: str) -> list[str]:
    """Lines by which a page says another thing than is kept."""
    answer = browser(engine, visitor=visitor).get(f"/console{path}")
    assert answer.status_code == 200, answer.text[:300]
    name = re.sub(r"[^a-z0-9]+", "-", path.lower()).strip("-") or "inbox"
    return differences(f"{of}/{name}", settled(read_page(answer.text, whole=not path), since=since))


@pytest.mark.parametrize("path", PATHS)
def test_an_operator_reads_what_is_there(quiet: Engine, since: datetime, path: str) -> None:
    assert unlike(quiet, OPERATOR, path, since, of="pages") == []


@pytest.mark.parametrize(
    "path",
    [
        "", "/access", "/data", "/erasures/gone", "/people/zoe", "/do/erase/person", "/do/invite_person/zoe", "/do/change_person/zoe",
        "/do/disable_person/zoe", "/do/sign_out_person/zoe", "/do/enable_person/max", "/do/add_person/new", "/do/make_key/new",
        "/do/rotate_sessions/sessions", "/rewards", "/replays/replay-1", "/do/propose_rules/replay-1",
    ],
)  # fmt: skip
def test_an_admin_reads_more(quiet: Engine, since: datetime, path: str) -> None:
    assert unlike(quiet, ADMIN, path, since, of="pages-of-admins") == []


@pytest.mark.parametrize(
    "path", ["", "/releases", "/releases/release-2", "/versions", "/rewards?a=r1&b=r2", "/trust", "/act/approve/release-2"]
)
def test_who_looks_at_one_policy_alone_reads_less(quiet: Engine, since: datetime, path: str) -> None:
    assert unlike(quiet, OWN, path, since, of="pages-of-viewers") == []


@pytest.mark.parametrize(
    "path",
    [
        "", "/releases", "/releases/release-2", "/releases/release-3", "/versions", "/versions/v2", "/versions?a=v1&b=v3", "/history",
        "/trust", "/audit", "/audit?actor=user:bob", "/audit?action=release.&subject=release-2",
        "/act/lift/v2", "/act/unfreeze/tab", "/act/unpin/v1", "/act/abort/release-3",
    ],
)  # fmt: skip
def test_what_goes_wrong_is_read_with_its_figures(troubled: Engine, since: datetime, path: str) -> None:
    assert unlike(troubled, OPERATOR, path, since, of="pages-of-trouble") == []
