"""What people are told and where news may go: lengths at their bounds, networks at their edges, signatures and the schedule."""

import base64
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook as Verifier

from app.domain.errors import BadRequest
from app.release.addresses import check_url, is_public
from app.release.news import Message, address_of, mail_of, message_of, slack_body, teams_body
from app.release.webhooks import WAITS, by_receiver, headers_of, new_secret

NOW = datetime(2026, 11, 21, 12, 0, 0, 999_999, tzinfo=UTC)


def told(about: str = "alarm.raised", **data: Any) -> Message:
    event = {"type": about, "data": {"policy": "tab", "subject": "r/1", "actor": "user:ada", **data}}
    return message_of(event, address="https://c")


def test_a_version_s_name_has_a_hundred_characters_and_a_reason_two_thousand() -> None:
    assert told("release.ready", version_name="v" * 101).title == f"tab: {'v' * 100} is READY and waits for people"
    assert told(reason="x" * 2_001).text == f"{'x' * 2_000} (by user:ada)."
    assert told().text == "no reason was given (by user:ada)."
    assert told(reason="late", until="somebody looks").text == "late (by user:ada). It ends when somebody looks."
    assert told(reason="a\nb\x07").text == "a b  (by user:ada)."


@pytest.mark.parametrize(
    ("about", "title", "link"),
    [
        ("release.ready", "tab: v2 is READY and waits for people", "releases/r%2F1"),
        ("release.judging", "tab: v2 waits for blind votes", "releases/r%2F1"),
        ("release.waiting", "tab: half of the time to approve v2 is over", "releases/r%2F1"),
        ("release.aborted", "tab: v2 was stopped", "releases/r%2F1"),
        ("deployment.rollback", "tab: rolled back to v2", None),
        ("gate.decided", "tab: a release is held", "releases/r%2F1"),
        ("alarm.raised", "tab: alarm gap", None),
        ("alarm.ended", "tab: the alarm gap has ended", None),
        ("release.other", "tab: release.other", "releases/r%2F1"),
    ],
)
def test_each_kind_of_news_has_its_words_and_leads_to_what_it_is_about(about: str, title: str, link: str | None) -> None:
    message = told(about, digest="v2", kind="gap")
    assert message.title == title
    assert message.link == (f"https://c/console/{link}?policy=tab" if link else "https://c/console?policy=tab")


def test_nobody_is_mentioned_and_nothing_linked_by_what_somebody_wrote() -> None:
    message = Message(title="<!here> *a* & b", text="[x](y) _z_ `q` #1 ~s~ \\ !", link="https://c")
    assert slack_body(message) == {
        "text": "*&lt;!here&gt; ∗a∗ &amp; b*\n[x](y) _z_ `q` #1 ~s~ \\ !\n<https://c|look at it>", "unfurl_links": False,
    }  # fmt: skip
    card = teams_body(message)["attachments"][0]["content"]
    assert [block["text"] for block in card["body"]] == [
        "<\\!here> \\*a\\* & b", "\\[x\\]\\(y\\) \\_z\\_ \\`q\\` \\#1 \\~s\\~ \\\\ \\!",
    ]  # fmt: skip
    assert all(block["wrap"] is True for block in card["body"])
    assert card["actions"][0]["url"] == "https://c"


def test_a_mail_is_the_same_one_when_it_is_sent_again() -> None:
    mail = mail_of(Message(title="t" * 300, text="words", link="https://c"), to="a@x.de", sender="R <r@y.de>", event_id="e1")
    assert (mail["Message-ID"], mail["To"], mail["Auto-Submitted"]) == ("<e1@y.de>", "a@x.de", "auto-generated")
    assert len(mail["Subject"]) == 200
    assert mail["Subject"].startswith("[Ratchet] tt")
    assert mail.get_content() == "words\n\nhttps://c\n"


@pytest.mark.parametrize("address", ["a@x.de", "a.b+c@x.y.de"])
def test_an_address_is_taken(address: str) -> None:
    assert address_of(f"mailto:{address}") == address


@pytest.mark.parametrize(
    "address", ["", "a", "@x.de", "a@x", "ä@x.de", "a b@x.de", "a,b@x.de", "a@x.de?cc=b", "a%@x.de", "a@x.de\n", '"a"@x.de']
)
def test_what_is_no_mail_address_is_refused(address: str) -> None:
    with pytest.raises(BadRequest, match="names no mail address") as refused:
        address_of(f"mailto:{address}")
    assert refused.value.param == "url"


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("10.0.0.1", False), ("127.0.0.1", False), ("169.254.169.254", False), ("100.64.0.1", False),
        ("224.0.0.1", False), ("191.255.255.255", True), ("192.0.0.0", False), ("192.0.0.255", False), ("192.0.1.0", True),
        ("192.88.98.255", True), ("192.88.99.0", False), ("192.88.99.255", False), ("192.88.100.0", True), ("::1", False),
        ("fc00::1", False), ("1fff::1", False), ("2000::1", True), ("3ffe:ffff::1", True), ("4000::1", False), ("2001::1", False),
        ("2001:1ff:ffff::1", False), ("2001:200::1", True), ("2001:db7:ffff::1", True), ("2001:db8::1", False), ("2001:db9::1", True),
        ("2001:ffff::1", True), ("2002:808:808::1", False), ("2003::1", True), ("3fff:fff:ffff::1", False), ("3fff:1000::1", True),
        ("64:ff9b::808:808", True), ("64:ff9b::a00:1", False), ("64:ff9b::1:0:0", False), ("64:ff9a::808:808", False),
        ("::ffff:8.8.8.8", False), ("ff0e::1", False),
    ],
)  # fmt: skip
def test_an_address_is_public_where_somebody_in_the_internet_may_have_it(address: str, *, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


def checked(url: str, *addresses: str, loopback: bool = False) -> str:
    return check_url(url, allow_loopback=loopback, resolve=lambda host: addresses)


def test_news_go_to_the_first_address_where_every_one_of_a_name_is_public() -> None:
    assert checked("https://x.de/hook", "8.8.8.8", "9.9.9.9") == "8.8.8.8"
    assert checked("slack+https://x.de/hook", "8.8.8.8") == "8.8.8.8"
    assert checked("mailto:a@x.de") == "a@x.de"
    assert checked("http://localhost:1/h", "127.0.0.1", "::1", loopback=True) == "127.0.0.1"
    for url, addresses, loopback in (
        ("https://x.de/h", ("8.8.8.8", "10.0.0.1"), False), ("https://x.de/h", (), False), ("https://x.de/h", (), True),
        ("http://x.de/h", ("8.8.8.8",), False), ("http://x.de/h", ("127.0.0.1", "8.8.8.8"), True), ("http://x.de/h", ("127.0.0.1",), False),
        ("https://u:p@x.de/h", ("8.8.8.8",), False), ("https://u@x.de/h", ("8.8.8.8",), False), ("ftp://x.de/h", ("8.8.8.8",), False),
        ("https:///h", ("8.8.8.8",), False), ("https://x.de:99999/h", ("8.8.8.8",), False), ("https://x.de/h", ("fe80::1%eth0",), False),
    ):  # fmt: skip
        with pytest.raises(BadRequest) as refused:
            checked(url, *addresses, loopback=loopback)
        assert refused.value.param == "url", url


@dataclass(frozen=True)
class Hook:
    id: str = "w1"
    url: str = "https://x.de"
    secrets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sent:
    webhook: Hook
    event_id: str = "e1"
    payload: bytes = b'{"a":1}'
    attempts: int = 0
    more: Sequence[str] = field(default_factory=tuple)


def test_a_delivery_is_signed_with_each_secret_at_a_whole_second() -> None:
    now = datetime.now(UTC)
    secrets = (new_secret(), new_secret())
    headers = headers_of(Sent(Hook(secrets=secrets)), at=now)
    assert headers["webhook-timestamp"] == str(int(now.timestamp()))
    assert len(headers["webhook-signature"].split(" ")) == 2
    for secret in secrets:
        assert Verifier(secret).verify(b'{"a":1}', headers) == {"a": 1}
        assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
    assert secrets[0] != secrets[1]
    assert headers_of(Sent(Hook()), at=NOW)["webhook-timestamp"] == "1795262400"


def test_a_delivery_is_tried_for_three_days_ever_more_rarely() -> None:
    """Standard Webhooks' own example: 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h."""
    hours = [wait / timedelta(hours=1) for wait in WAITS]
    assert WAITS[:2] == (timedelta(seconds=5), timedelta(minutes=5))
    assert hours[2:] == [0.5, 2, 5, 10, 14, 20, 24]


def test_deliveries_stand_by_receiver_in_their_order() -> None:
    one, two = Hook(id="1"), Hook(id="2")
    due = [Sent(one, "a"), Sent(two, "b"), Sent(one, "c")]
    assert {name: [sent.event_id for sent in sents] for name, sents in by_receiver(due).items()} == {"1": ["a", "c"], "2": ["b"]}
