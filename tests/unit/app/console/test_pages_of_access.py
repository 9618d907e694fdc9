"""Who has access, the audit chain, the stream and who was forgotten: every fact of the pages, and for whom they are not."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.console.views import access, data, records
from app.console.views.asked import Asked
from app.domain.access import ApiKey, Scope
from app.domain.errors import NotFound
from app.domain.ids import utc_now
from app.domain.learning.rewards import Exclusion
from app.domain.people import Person, Role
from app.domain.release.releases import AuditEntry
from app.domain.retention import Retention
from app.domain.views.access import HandRow, SessionRow
from app.domain.views.pages import AuditFilter, CutRow, ErasureRow, LetterRow, Page, StreamRow
from tests.fakes.sights import Canned, looking, texts

AT = datetime(2026, 11, 24, 6, tzinfo=UTC)
TOLD = "2026-11-24 06:00:00"
EVE = Person(id="p1", name="eve", roles=frozenset({Role.OPERATOR, Role.VIEWER}), policy=None, created_at=AT, made_by="user:root")
PAT = Person(
    id="p2", name="pat", roles=frozenset({Role.VIEWER}), policy="tab", created_at=AT, made_by="user:eve", email="p@x.de", os_user="patty",
    has_password=True, subject="s", disabled_at=AT,
)  # fmt: skip


def key(prefix: str, **changes: Any) -> ApiKey:
    values: dict[str, Any] = {
        "id": prefix, "hash": b"", "name": f"name of {prefix}", "scopes": frozenset({Scope.READ, Scope.INGEST}), "policy": None,
        "rate_per_s": None, "created_at": AT, "made_by": "user:root",
    }  # fmt: skip
    return ApiKey(prefix=prefix, **{**values, **changes})


KEYS = [
    key("rk_1"),
    key("rk_2", person_id="p2", scopes=frozenset(), policy="tab", rate_per_s=2.5, expires_at=AT, last_used_at=AT, made_by=None),
    key("rk_3", revoked_at=AT), key("rk_4", expires_at=utc_now() + timedelta(days=1)),
]  # fmt: skip
HANDS = [HandRow(what="a password", made_by="user:root", at=AT), HandRow(what="a token", made_by="user:pat", at=AT)]


def seen(*roles: Role, of: str | None = None) -> Asked:
    return looking(
        *roles, of=of, people=[EVE, PAT], every_key=KEYS, hands=HANDS,
        sessions=[SessionRow(created_at=AT, seen_at=AT + timedelta(hours=1), expires_at=AT + timedelta(days=1))],
    )  # fmt: skip


@pytest.mark.parametrize("page", [access.access, lambda asked: access.person(asked, "pat"), lambda asked: access.key(asked, "rk_1")])
@pytest.mark.parametrize(("role", "of"), [(Role.OPERATOR, None), (Role.VIEWER, None), (Role.ADMIN, "tab"), (Role.AUDITOR, "tab")])
def test_who_has_access_is_for_auditors_and_admins_of_every_policy_alone(page: Callable[[Asked], Any], role: Role, of: str | None) -> None:
    page(seen(Role.AUDITOR))
    with pytest.raises(NotFound, match="for auditors and admins of every policy to see"):
        page(seen(role, of=of))


def test_people_and_keys_stand_there_with_all_that_is_known_of_them() -> None:
    values = access.access(seen())
    assert texts(values["sheets"]["people"]) == [
        ["eve", "operator, viewer", "all", "", "no", "no", TOLD, "user:root", "–"],
        ["pat", "viewer", "tab", "p@x.de", "yes", "yes", TOLD, "user:eve", TOLD],
    ]
    assert texts(values["sheets"]["keys"]) == [
        ["rk_1", "name of rk_1", "a program", "ingest, read", "all", "yes", TOLD, "–", "–", "–"],
        ["rk_2", "name of rk_2", "pat", "as the person", "tab", "no", TOLD, TOLD, TOLD, "–"],
        ["rk_3", "name of rk_3", "a program", "ingest, read", "all", "no", TOLD, "–", "–", TOLD],
        ["rk_4", "name of rk_4", "a program", "ingest, read", "all", "yes", TOLD, "–", texts(values["sheets"]["keys"])[3][8], "–"],
    ]
    assert (values["may_manage"], values["may_make"]) == (True, True)
    seen_only = access.access(seen(Role.AUDITOR))
    assert (seen_only["may_manage"], seen_only["may_make"]) == (False, False)


def test_the_table_of_roles_says_what_each_may_do() -> None:
    rows = {row[0]: row[1:] for row in texts(access.access(seen())["sheets"]["roles"])}
    assert rows["approve"] == ["", "yes", "", "", "yes"], "viewer, operator, config admin, auditor, admin"
    assert rows["change rules"] == ["", "", "yes", "", "yes"]
    assert rows["look"] == ["yes"] * 5
    assert rows["sample"] == [""] * 5


def test_a_person_s_page_has_their_facts_keys_and_whose_hands_made_their_credentials() -> None:
    page = access.person(seen(), "pat")
    assert page["title"] == "pat"
    assert page["facts"] == [
        ("roles", "viewer"), ("policy", "tab"), ("e-mail", "p@x.de"), ("user on the machine", "patty"),
        ("signs in with", "a password and an account at the provider"), ("added", f"{TOLD} UTC by user:eve"),
        ("state", f"disabled since {TOLD} UTC"),
    ]  # fmt: skip
    assert [row[:3] for row in texts(page["sheets"]["keys"])] == [["rk_2", "name of rk_2", "pat"]], "nobody else's"
    assert texts(page["sheets"]["sessions"]) == [[TOLD, "2026-11-24 07:00:00", "2026-11-25 06:00:00"]]
    assert texts(page["sheets"]["hands"]) == [
        ["a password", "user:root", TOLD, "2026-11-25 06:00:00"], ["a token", "user:pat", TOLD, "–"]
    ], "a day, and nothing for what they made themselves"  # fmt: skip
    other = dict(access.person(seen(), "eve")["facts"])
    assert (other["policy"], other["e-mail"], other["user on the machine"], other["state"]) == ("all", "none", "none", "active")
    assert other["signs in with"] == "nothing yet: the link was not used"
    with pytest.raises(NotFound, match="nobody is called 'zoe'"):
        access.person(seen(), "zoe")


def test_what_stops_somebody_is_marked_so_and_who_only_looks_is_offered_nothing() -> None:
    def offered(name: str, *roles: Role) -> list[tuple[str, str, bool]]:
        return [(href.split("/do/")[1], word, stops) for href, word, stops in access.person(seen(*roles), name)["acts"]]

    assert offered("eve") == [
        ("change_person/eve?policy=tab", "Change", False), ("invite_person/eve?policy=tab", "Reset the credential", False),
        ("sign_out_person/eve?policy=tab", "Sign out", True), ("disable_person/eve?policy=tab", "Disable", True),
    ]  # fmt: skip
    assert offered("pat") == [("change_person/pat?policy=tab", "Change", False), ("enable_person/pat?policy=tab", "Enable", False)]
    assert offered("eve", Role.AUDITOR) == []


@pytest.mark.parametrize(
    ("prefix", "differs", "acts"),
    [
        ("rk_1", {}, [("rotate_key/rk_1", "Rotate", False), ("revoke_key/rk_1", "Revoke", True)]),
        (
            "rk_2",
            {
                "name": "name of rk_2", "speaks for": "pat", "scopes": "as the person", "policy": "tab", "rate": "2.5 a second",
                "made": f"{TOLD} UTC by nobody known", "ends": f"{TOLD} UTC", "last used": f"{TOLD} UTC", "state": "its time is over",
            },
            [("revoke_key/rk_2", "Revoke", True)],
        ),
        ("rk_3", {"name": "name of rk_3", "state": f"revoked at {TOLD} UTC"}, []),
    ],
)  # fmt: skip
def test_a_key_s_page_says_what_it_is_good_for_and_offers_what_can_be_done(
    prefix: str, differs: dict[str, str], acts: list[tuple[str, str, bool]]
) -> None:
    page = access.key(seen(), prefix)
    usual = {
        "name": "name of rk_1", "speaks for": "a program", "scopes": "ingest, read", "policy": "all", "rate": "no limit",
        "made": f"{TOLD} UTC by user:root", "ends": "when it is revoked", "last used": "never", "state": "good",
    }  # fmt: skip
    assert dict(page["facts"]) == usual | differs
    assert [(href.split("/do/")[1].split("?")[0], word, stops) for href, word, stops in page["acts"]] == acts
    assert page["title"] == f"Key {prefix}"
    assert access.key(seen(Role.AUDITOR), prefix)["acts"] == []


def test_a_key_that_is_not_there_is_not_another_one() -> None:
    with pytest.raises(NotFound, match="no key begins with 'rk_9'"):
        access.key(seen(), "rk_9")


ENTRY = AuditEntry(
    seq=7, occurred_at=AT, actor="user:ada", action="release.aborted", subject="r1",
    detail={"reason": "late", "from": None, "to": "aborted", "other": "x", "generation": 0}, previous_hash="", hash="0123456789abcdef",
)  # fmt: skip


def chain(*roles: Role, of: str | None = None, **query: str) -> tuple[dict[str, Any], Canned]:
    sight = Canned(audit=Page(rows=(ENTRY,), after="6"), verify=(7, "head", None))
    return records.audit(looking(*roles, of=of, query=query, sight=sight)), sight


def test_the_audit_chain_is_read_by_who_may_and_verified_only_when_it_is_asked_for() -> None:
    page, sight = chain(Role.OPERATOR, subject="r1", actor="user:ada", action="release.", after="9")
    assert sight.heard == [("audit", (AuditFilter(subject="r1", actor="user:ada", action="release."),), {"after": "9"})]
    assert (page["checked"], page["whole"]) == (None, True)
    assert texts(page["sheets"]["audit"]) == [
        ["7", TOLD, "user:ada", "release.aborted", "r1", "reason late, to aborted, generation 0", "0123456789ab"]
    ]
    assert page["sheets"]["audit"].after == "6"
    bound, _ = chain(Role.AUDITOR, of="tab", verify="1")
    assert (bound["checked"], bound["whole"], bound["wanted"].policy) == ((7, "head", None), False, "tab")
    with pytest.raises(NotFound, match="the audit chain is for operators"):
        chain(Role.VIEWER)


LETTER = LetterRow(id=5, topic="events", partition=2, offset=9, reason="no", attempts=3, last_seen_at=AT, replayed_at=None)
FORGOTTEN = ErasureRow(
    actor="ab", requested_by="user:root", erased_at=AT, report={"turns": 3, "segments": 1, "trained_versions": ["v1", "v2"]}
)
OTHER = ErasureRow(actor="xy", requested_by="user:root", erased_at=AT, report={})


class Needed:
    """Of what waits, what the page of data shows."""

    counters: dict[str, int] = {"late": 4}  # noqa: RUF012 - read alone
    troubles: tuple[Any, ...] = ()


def stream(topic: str, next_offset: int, end: int | None) -> StreamRow:
    return StreamRow(consumer_group="g", topic=topic, partition=0, next_offset=next_offset, high_water=end, updated_at=AT)


def data_page(*roles: Role, of: str | None = None, kept: Retention | None = None) -> dict[str, Any]:
    sight = Canned(
        needs=Needed(), parked=2, streams=[stream("a", 3, 10), stream("b", 12, 10), stream("c", 3, None), stream("d", 10, 10)],
        letters=Page(rows=(LETTER,), after="4"), erasures=[FORGOTTEN],
    )  # fmt: skip
    return data.data(looking(*roles, of=of, sight=sight), kept=kept or Retention())


def test_the_page_of_data_counts_from_nothing_and_never_below() -> None:
    page = data_page()
    assert page["counters"] == [
        ("early", 0), ("late", 4), ("orphaned", 0), ("duplicate", 0), ("conflict", 0), ("retracted", 0), ("dead_lettered", 0)
    ]  # fmt: skip
    assert [row[5] for row in texts(page["sheets"]["streams"])] == ["7", "0", "–", "0"]
    assert texts(page["sheets"]["letters"]) == [["5", "no", "events:2:9", "3", TOLD, "–"]]
    assert texts(page["sheets"]["erasures"]) == [["ab", "user:root", TOLD, "3", "0", "0", "0", "0", "0", "1", "v1, v2"]]


def test_data_and_its_deeds_are_shown_to_those_whose_they_are() -> None:
    def links(*roles: Role) -> tuple[Any, ...]:
        page = data_page(*roles)
        hrefs = [page["sheets"][name].rows[0][0].href for name in ("letters", "erasures")]
        return (*hrefs, page["may_mend"], page["may_erase"])

    assert links(Role.ADMIN) == ("/console/do/replay_letter/5?policy=tab", "/console/erasures/ab?policy=tab", True, True)
    assert links(Role.OPERATOR) == ("/console/do/replay_letter/5?policy=tab", None, True, False)
    assert links(Role.VIEWER) == (None, None, False, False)
    with pytest.raises(NotFound, match="the stream carries every policy"):
        data_page(of="tab")


def test_retention_is_told_in_days_or_for_ever() -> None:
    page = data_page(kept=Retention(turns_days=1234, dead_letters_days=float("inf")))
    rows = {row[2]: row[1] for row in texts(page["sheets"]["retention"])}
    assert (rows["turns_days"], rows["dead_letters_days"]) == ("1,234 days", "for ever")


@dataclass(frozen=True, kw_only=True)
class Left:
    """One place that was looked into."""

    place: str
    found: int
    cure: str = "erase them again"


def proof(*found: int, actor: str = "ab", roles: tuple[Role, ...] = (), of: str | None = None) -> dict[str, Any]:
    sight = Canned(erasures=lambda newest: [FORGOTTEN, OTHER] if newest == 1_000 else [])
    traces = [Left(place=f"place {n}", found=one) for n, one in enumerate(found)]
    return data.proof(looking(*roles, of=of, sight=sight), actor, left_of=lambda _: traces)


def test_the_proof_of_an_erasure_adds_up_what_is_left_and_says_what_helps_there() -> None:
    assert proof(0, 0)["title"] == "ab: nothing is left in 2 places"
    page = proof(0, 2, 1)
    assert page["title"] == "ab: 3 traces are left in 3 places"
    assert texts(page["sheets"]["proof"]) == [
        ["place 0", "0", ""], ["place 1", "2", "erase them again"], ["place 2", "1", "erase them again"],
    ]  # fmt: skip


def test_the_proof_is_for_who_may_erase_everywhere_and_about_somebody_who_was_erased() -> None:
    with pytest.raises(NotFound, match="for admins of every policy"):
        proof(0, roles=(Role.OPERATOR,))
    with pytest.raises(NotFound, match="for admins of every policy"):
        proof(0, of="tab")
    with pytest.raises(NotFound, match="for admins of every policy"):
        data.proof(looking(erasures=[FORGOTTEN]), "ab", left_of=None)
    with pytest.raises(NotFound, match="nobody with the pseudonym cd was erased"):
        proof(0, actor="cd")


def test_what_waits_for_its_rater_is_counted_in_the_newest_batch_alone() -> None:
    left_out: tuple[dict[str, int], ...] = ({Exclusion.QUARANTINED: 2, Exclusion.RATER_CAP: 1, "other": 4}, {Exclusion.QUARANTINED: 30})
    cuts = [CutRow(id=f"b{n}", slot=n, created_at=AT, items=9, left_out=one) for n, one in enumerate(left_out)]
    page = data.trust(looking(cuts=cuts))
    assert page["waiting"] == 2
    assert texts(page["sheets"]["cuts"]) == [["b0", TOLD, "9", "2", "1", "0", "7"], ["b1", TOLD, "9", "30", "0", "0", "30"]]
    assert data.trust(looking(cuts=[CutRow(id="b", slot=0, created_at=AT, items=1, left_out={})]))["waiting"] == 0
    assert data.trust(looking(cuts=[]))["waiting"] == 0
