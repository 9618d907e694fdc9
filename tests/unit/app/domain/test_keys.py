"""Keys: what they let somebody do, until when, and what a text has to look like to be one."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from app.domain.access import USED_EVERY, ApiKey, Order, Scope, hash_secret, key_text, new_secret, split_key

NOW = datetime(2026, 11, 27, 4, tzinfo=UTC)
INSTANT = timedelta(microseconds=1)
KEY = ApiKey(
    id="k1", prefix="rk_0123abcd", hash=hash_secret("k1", "right"), name="ide", scopes=frozenset({Scope.READ, Scope.INGEST}), policy="tab",
    rate_per_s=5.0, created_at=NOW - timedelta(days=1),
)  # fmt: skip


def test_a_key_fits_its_own_secret_and_no_other_and_no_other_keys() -> None:
    assert KEY.matches("right") is True
    assert KEY.matches("wrong") is False
    assert replace(KEY, id="k2").matches("right") is False, "the same secret under another key has another hash"
    assert len(hash_secret("k1", "right")) == 32
    assert hash_secret("k1", "right") != hash_secret("right", "k1")


@pytest.mark.parametrize(
    ("expires_at", "revoked_at", "usable"),
    [
        (None, None, True), (NOW + INSTANT, None, True), (NOW, None, False), (NOW - INSTANT, None, False), (None, NOW, False),
        (NOW + INSTANT, NOW - INSTANT, False),
    ],
)  # fmt: skip
def test_a_key_ends_at_its_very_moment_and_when_it_is_taken_back(
    expires_at: datetime | None, revoked_at: datetime | None, usable: bool
) -> None:
    key = replace(KEY, expires_at=expires_at, revoked_at=revoked_at)
    assert key.usable_at(NOW) is usable
    assert key.told(NOW)["usable"] is usable


def test_others_see_all_of_a_key_but_what_it_is_checked_by() -> None:
    told = KEY.told(NOW)
    assert told == {
        "prefix": "rk_0123abcd", "name": "ide", "personal": False, "made_by": None, "scopes": ["ingest", "read"], "policy": "tab",
        "rate_per_s": 5.0, "created_at": NOW - timedelta(days=1), "expires_at": None, "revoked_at": None, "usable": True,
        "last_used_at": None,
    }  # fmt: skip
    assert replace(KEY, person_id="p1", made_by="user:ada").told(NOW)["personal"] is True


@pytest.mark.parametrize(
    ("asked", "held", "may"),
    [
        (Scope.SAMPLE, {Scope.SAMPLE}, True), (Scope.SAMPLE, {Scope.INGEST}, True), (Scope.SAMPLE, {Scope.READ}, False),
        (Scope.INGEST, {Scope.SAMPLE}, False), (Scope.READ, {Scope.INGEST}, False), (Scope.RELEASE, {Scope.ADMIN}, True),
        (Scope.SAMPLE, {Scope.ADMIN}, True), (Scope.ADMIN, {Scope.RELEASE, Scope.READ, Scope.INGEST}, False),
        (Scope.READ, set[Scope](), False),
    ],
)  # fmt: skip
def test_a_scope_lets_its_holder_do_one_thing_but_that_reporting_includes_asking(asked: Scope, held: set[Scope], may: bool) -> None:
    assert asked.is_within(held) is may


def test_a_new_secret_has_32_bytes_of_chance_and_a_prefix_of_11_characters() -> None:
    drawn = [new_secret() for _ in range(50)]
    assert {len(prefix) for prefix, _ in drawn} == {11}
    assert {len(secret) for _, secret in drawn} == {43}, "32 bytes in base64 without padding: 43 characters"
    assert len(set(drawn)) == 50
    assert all(split_key(key_text(prefix, secret)) == (prefix, secret) for prefix, secret in drawn)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("rk_0123abcd_s", ("rk_0123abcd", "s")), ("rk_0123abcd_a_b", ("rk_0123abcd", "a_b")), ("rk_0123abcd_", None),
        ("rk_0123abcd", None), ("sk_0123abcd_secret", None), ("rk_0123abcdesecret", None), ("rk_0123abc_dsecret", None), ("", None),
    ],
)  # fmt: skip
def test_a_text_of_another_form_is_no_key(text: str, parts: tuple[str, str] | None) -> None:
    assert split_key(text) == parts


def test_a_use_of_a_key_is_noted_once_a_minute_and_an_order_rests_on_nothing_that_was_not_named() -> None:
    assert timedelta(seconds=60) == USED_EVERY
    order = Order(request_id="r", actor="user:ada", act="keys.revoke", subject="rk_0123abcd")
    assert (order.seen, order.moves) == (None, "")
