"""Every page shows what is in the tables, on both databases, escapes what strangers wrote, and needs no JavaScript to be read."""

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, delete, insert, select
from starlette.testclient import TestClient

from app.db.access.people import SqlPeople
from app.db.engine import reading, writing
from app.db.learning.rollups import hour_of
from app.db.tables import audit_head, label_rollups, releases
from app.domain.ids import utc_now
from app.domain.people import Role, Visitor
from pipelines.commands.audit import audit as audit_command
from tests.fakes.console import ADMIN, OPERATOR, VIEWER, browser
from tests.fakes.releases import POLICY, release_room
from tests.integration.console.deployment import HOSTILE, deploy

PATHS = (
    "", "/releases", "/releases/release-2", "/versions", "/versions?a=v1&b=v2", "/versions/v2", "/history", "/rewards?a=r1&b=r2",
    "/labels/i3", "/data", "/trust", "/audit", "/audit?verify=1", "/act/approve/release-2", "/act/roll_back/release-1",
    "/act/unfreeze/tab", "/act/lift/v2", "/act/pin/v2", "/act/unpin/v2", "/pairs/release-2",
    "/readings", "/do/replay_rules/tab", "/do/replay_letter/1", "/do/replay_letters/all?reason=broken",
)  # fmt: skip


class Elements(HTMLParser):
    """Every element with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def elements(text: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed(text)
    return parser.found


def shown(client: TestClient, path: str) -> str:
    answer = client.get(f"/console{path}")
    assert answer.status_code == 200, (path, answer.text[:500])
    return answer.text


def test_every_page_renders_with_its_headers_and_nothing_inline(engine: Engine) -> None:
    deploy(engine)
    client = browser(engine)
    for path in PATHS:
        answer = client.get(f"/console{path}")
        assert answer.status_code == 200, (path, answer.text[:800])
        policy = answer.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert (answer.headers["x-content-type-options"], answer.headers["cache-control"]) == ("nosniff", "no-store")
        for tag, attributes in elements(answer.text):
            assert tag != "style", path
            assert tag != "script" or attributes.get("src"), path
            assert "http-equiv" not in attributes, "nothing reloads under the reader"
            assert not [name for name in attributes if name == "style" or name.startswith("on")], (path, tag, attributes)
        ids = [attributes["id"] for _, attributes in elements(answer.text) if "id" in attributes]
        assert len(ids) == len(set(ids)), path


def test_the_inbox_says_what_waits_and_who_can(engine: Engine) -> None:
    deploy(engine)
    text = shown(browser(engine), "")
    assert "tiny-v2 is ready" in text
    assert "you can approve" in text
    assert "slots in a row came to nothing" in text
    assert "dead letter" in text
    assert "h 59 min left" in text


def test_the_candidate_is_shown_with_every_figure_it_rests_on(engine: Engine) -> None:
    deploy(engine)
    text = shown(browser(engine), "/releases/release-2")
    assert "Safe by every gate: needs 1 more approval" in text
    for title in (
        "Gates, number by number",
        "Who was exposed",
        "Reward shift",
        "Difference to the champion",
        "Lineage and licence",
        "Its way",
        "Its story",
    ):
        assert title in text, title
    assert "The first people meet it: canary starts at" in text
    assert "edit persistence" in text
    assert "12 requests" in text
    assert "<svg" in text


@pytest.mark.parametrize("name", HOSTILE[:2])
def test_what_strangers_wrote_is_shown_and_does_nothing(sqlite_engine: Engine, name: str) -> None:
    """In a version's name, an answer, a comment, a reason, an engine's name, a rule set."""
    word = "\n".join(HOSTILE).replace("\x00", "")  # no database takes a NUL
    deploy(sqlite_engine, name=name, word=word)
    client = browser(sqlite_engine)
    for path in PATHS:
        answer = client.get(f"/console{path}")
        assert answer.status_code == 200, path
        for tag, attributes in elements(answer.text):
            assert tag != "img", path
            assert tag != "script" or (attributes["src"] or "").startswith("/console/static/"), path
            assert not any("hx-" in a for a in attributes) or attributes.get("id") == "live", path
        assert len(answer.content) < 300_000, "a line without an end must not fill the page"
    assert "&lt;img" in client.get("/console/labels/i3").text, "nothing is shown: the test shows nothing"


def test_a_cell_that_would_be_a_formula_is_none(sqlite_engine: Engine) -> None:
    deploy(sqlite_engine, name="=1+1", word="@SUM(A1)")
    client = browser(sqlite_engine)
    for path, sheet in (("/versions", "versions"), ("/data", "letters"), ("/releases", "releases")):
        answer = client.get(f"/console{path}", params={"sheet": sheet, "as": "csv"})
        assert answer.headers["content-type"].startswith("text/csv")
        rows = list(csv.reader(io.StringIO(answer.text.removeprefix("\ufeff"))))
        assert len(rows) > 1
        cells = [cell for row in rows for cell in row if not re.fullmatch(r"-?[\d.e-]+", cell)]
        assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))]
    assert any(
        cell == "'=1+1" for row in csv.reader(io.StringIO(client.get("/console/versions?sheet=versions&as=csv").text)) for cell in row
    )


def test_every_table_is_a_csv_and_a_json_file_with_the_same_rows(sqlite_engine: Engine) -> None:
    deploy(sqlite_engine)
    client = browser(sqlite_engine)
    text = shown(client, "/releases/release-2")
    files = re.findall(r'href="([^"]*(?:as=csv|as=json))"', text)
    assert len(files) >= 8
    for address in files:
        answer = client.get(address.replace("&amp;", "&"))
        assert answer.status_code == 200, address
        assert "attachment" in answer.headers["content-disposition"]
        if "json" in address:
            assert json.loads(answer.text)


def test_a_reader_of_one_policy_sees_no_other(engine: Engine) -> None:
    deploy(engine)
    foreign = browser(engine, visitor=Visitor(actor="user:eve", actions=OPERATOR.actions, policy="composer"))
    for path in PATHS:
        address = f"/console{path}{'&' if '?' in path else '?'}policy={POLICY}"
        answer = foreign.get(address)
        assert answer.status_code == 404, path
        assert "tiny" not in answer.text
    own = browser(engine, visitor=Visitor(actor="user:eve", actions=OPERATOR.actions, policy=POLICY))
    assert own.get("/console").status_code == 200
    assert own.get("/console/data").status_code == 404, "the stream carries every policy"
    assert own.get("/console/audit.jsonl").status_code == 404


def test_a_release_is_found_however_many_came_after_it_and_lists_go_on_by_key(sqlite_engine: Engine) -> None:
    room = release_room(sqlite_engine)
    first = room.ledger.list()[0]
    rows = [
        {
            "id": f"r{n:04}", "policy": POLICY, "digest": f"d{n}", "version_name": f"v{n}", "state": "REJECTED", "generation": 1,
            "champion_digest": "v1", "champion_generation": 1, "config": {}, "created_at": first.created_at, "changed_at": first.created_at,
        }
        for n in range(1001)
    ]  # fmt: skip
    with writing(sqlite_engine) as connection:
        connection.execute(insert(releases), rows)
    client = browser(sqlite_engine)
    assert client.get("/console/releases/release-1").status_code == 200
    seen: list[str] = []
    address: str | None = "/console/releases"
    while address is not None:
        text = client.get(address).text
        seen += re.findall(r"/console/releases/([\w-]+)\?", text)
        older = re.search(r'href="([^"]*after=[^"]*)#', text)
        address = older[1].replace("&amp;", "&") if older else None
    assert len(seen) == len(set(seen)) == 1002


def test_pages_read_rollups_and_never_count_labels(sqlite_engine: Engine) -> None:
    """A version's labels are told by what was added up, whatever the labels say."""
    deploy(sqlite_engine)
    with writing(sqlite_engine) as connection:
        connection.execute(delete(label_rollups).where(label_rollups.c.version == "v2"))
        row = {"policy": POLICY, "version": "v2", "hour": hour_of(utc_now()), "segment": "", "measure": "reward", "n": 7_012}
        connection.execute(insert(label_rollups).values(**row, total=0, squares=0, negative=0))
    assert "7,012" in shown(browser(sqlite_engine), "/versions")


def test_evidence_is_shown_as_it_was_for_ever(sqlite_engine: Engine) -> None:
    room = deploy(sqlite_engine)
    release = room.desk.find("release-2")
    client = browser(sqlite_engine)
    before = client.get(f"/console/releases/release-2@{release.evidence_digest}")
    assert before.status_code == 200
    assert "as it was judged" in before.text
    room.desk.abort("release-2", actor="user:ada", reason="no longer wanted")
    after = client.get(f"/console/releases/release-2@{release.evidence_digest}")
    moving = re.compile(r'<time.*?</code>|"csrf".*?>', re.S)
    assert moving.sub("", after.text) == moving.sub("", before.text)
    assert client.get("/console/releases/release-2@0123").status_code == 404


def test_who_has_access_is_shown_to_who_may_see_it_and_to_nobody_else(sqlite_engine: Engine) -> None:
    deploy(sqlite_engine)
    SqlPeople(sqlite_engine).add("zoe", roles=[Role.OPERATOR], by="user:root")
    text = shown(browser(sqlite_engine, visitor=ADMIN), "/access")
    assert "zoe" in text
    assert "renew anchor" in text
    assert browser(sqlite_engine).get("/console/access").status_code == 404
    assert "/console/access" not in shown(browser(sqlite_engine), "")
    assert "zoe can as well" in shown(browser(sqlite_engine), "")
    assert browser(sqlite_engine, visitor=VIEWER).get("/console/audit").status_code == 404
    assert "you cannot approve; zoe can as well" in shown(browser(sqlite_engine, visitor=VIEWER), "/releases/release-2")


def test_the_proof_of_an_erasure_is_for_admins_and_about_who_was_erased(sqlite_engine: Engine) -> None:
    deploy(sqlite_engine)
    admin = browser(sqlite_engine, visitor=ADMIN)
    assert "/console/erasures/gone" in shown(admin, "/data")
    assert "gone: nothing is left in 1 places" in shown(admin, "/erasures/gone")
    assert admin.get("/console/erasures/somebody").status_code == 404
    assert browser(sqlite_engine).get("/console/erasures/gone").status_code == 404


def test_a_page_names_the_newest_audit_entry_for_who_prints_it(sqlite_engine: Engine) -> None:
    room = deploy(sqlite_engine)
    room.desk.reject("release-2", approver="user:ada", reason="no")
    with reading(sqlite_engine) as connection:
        head = connection.execute(select(audit_head)).one()
    assert f"audit entry {head.seq} <code>{head.hash[:12]}" in shown(browser(sqlite_engine), "/releases/release-2")


def test_any_two_versions_are_compared_by_what_they_are_called_and_what_is_not_there_is_said(sqlite_engine: Engine) -> None:
    deploy(sqlite_engine)
    client = browser(sqlite_engine)
    for a, b in (("tiny-v1", "tiny-v2"), ("v1", "tiny-v2")):
        rows = client.get("/console/versions", params={"a": a, "b": b, "sheet": "compared", "as": "json"}).json()
        assert {"reward", "term:edit_persistence"} <= {row["measure"] for row in rows}
        assert set(rows[0]) == {"measure", "tiny-v1", "tiny-v2", "difference"}
    assert client.get("/console/versions", params={"a": "tiny-v1", "b": "tiny-v9"}).status_code == 404


def test_the_data_page_says_how_long_what_is_kept(sqlite_engine: Engine) -> None:
    deploy(sqlite_engine)
    rows = browser(sqlite_engine).get("/console/data", params={"sheet": "retention", "as": "json"}).json()
    assert {row["under [retention]"]: row["kept for"] for row in rows}["turns_days"] == "90 days"
    assert len(rows) == 8


def test_an_empty_deployment_says_what_to_do_and_what_is_not_there_is_said(sqlite_engine: Engine) -> None:
    client = browser(sqlite_engine)
    assert "ratchet up" in client.get("/console").text
    release_room(sqlite_engine)
    for path in ("/releases/never", "/versions/never", "/labels/never", "/act/explode/release-1", "/find?q=nothing", "/releases?after=x"):
        answer = client.get(f"/console{path}")
        assert answer.status_code in (400, 404), path
        assert "text/html" in answer.headers["content-type"]
    assert client.get("/console/find?q=release-1").headers["location"].startswith("/console/releases/release-1")
    long = client.get(f"/console/find?q={'x' * 200}y").text
    assert ("x" * 200 in long, "xy" in long) == (True, False), "of a long word, its beginning"


def test_the_exported_chain_is_verified_without_a_deployment_and_a_changed_word_is_found(sqlite_engine: Engine, tmp_path: Path) -> None:
    deploy(sqlite_engine, word="café \u202e")
    exported = browser(sqlite_engine).get("/console/audit.jsonl")
    file = tmp_path / "chain.jsonl"
    file.write_text(exported.text)
    intact = CliRunner().invoke(audit_command, ["verify", str(file)])
    assert intact.output.startswith(f"intact: {len(exported.text.splitlines())} entries")
    file.write_text(exported.text.replace("waits for its canary", "waits for its  canary"))
    edited = CliRunner().invoke(audit_command, ["verify", str(file)])
    assert (edited.exit_code, "was edited" in edited.output) == (1, True)
    last = exported.text.splitlines()[-1]
    seen = f"{json.loads(last)['seq']}:{json.loads(last)['hash']}"
    file.write_text("\n".join(exported.text.splitlines()[:-1]))
    assert "cut off" in CliRunner().invoke(audit_command, ["verify", str(file), "--seen", seen]).output
    file.write_text("not a chain")
    assert "line 1 is no entry" in str(CliRunner().invoke(audit_command, ["verify", str(file)]).exception)
