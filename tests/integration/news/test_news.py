"""News in chats and mail: of what, in which form, how often, and that nobody steers it by what they write."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from email import message_from_string, policy
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from app.db.release.webhooks import SqlWebhookBook
from app.domain.errors import BadRequest
from app.domain.ids import utc_now
from app.domain.release.alarms import AlarmKind
from app.domain.release.gates import GateName, GateResult, Verdict
from app.release.addresses import check_url
from app.release.post import PostOffice
from app.release.webhooks import Courier, new_secret
from tests.fakes.releases import POLICY, ReleaseRoom, answer, release_room
from tests.fakes.sealed import SEAL

PUBLIC = "93.184.216.34"
SLACK, TEAMS, MAIL = "slack+https://hooks.example/T1", "teams+https://flows.example/x", "mailto:ops@example.com"


@pytest.fixture
def room(sqlite_engine: Engine) -> ReleaseRoom:
    room = release_room(sqlite_engine)
    room.clock.now = utc_now()
    return room


class Channel:
    """A receiver of news, and what arrived."""

    def __init__(self, engine: Engine, room: ReleaseRoom, url: str, office: PostOffice | None = None) -> None:
        self.book, self.room = SqlWebhookBook(engine, SEAL), room
        self.hook = self.book.add(policy=None, url=url, secret=new_secret(), events=(), now=room.clock())
        self.requests: list[httpx.Request] = []
        self.courier = Courier(
            self.book,
            clock=room.clock,
            clients=self._clients,
            resolve=lambda host: [PUBLIC],
            post_office=office,
            address="https://ratchet.example",
        )

    def _clients(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self._take))

    def _take(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return httpx.Response(200)

    def news(self) -> list[Any]:
        """The bodies that arrived since the last look."""
        self.courier.deliver_due()
        bodies, self.requests = [json.loads(request.content) for request in self.requests], []
        return bodies


def titles(channel: Channel) -> list[str]:
    return [body["text"].split("\n")[0] for body in channel.news()]


def test_a_channel_hears_what_somebody_has_to_hear_and_nothing_else(sqlite_engine: Engine, room: ReleaseRoom) -> None:
    channel = Channel(sqlite_engine, room, SLACK)
    release = room.ready("v2")
    assert titles(channel) == ["*tab: tiny-v2 is READY and waits for people*"], "opened, queued, canary and gates are no news"
    room.desk.approve(release.id, approver="user:ada", evidence=release.evidence_digest or "")
    room.desk.promote(room.desk.begin_promotion(release.id).id)
    assert titles(channel) == []
    room.desk.roll_back(release.id, actor="system:watch", reason="harm", alarm=AlarmKind.ANCHOR)
    assert titles(channel) == ["*tab: rolled back to v1*", "*tab: alarm anchor*"], "one message for what happened"
    harmed = room.canary("v3")
    room.desk.abort(harmed.id, actor="system:watch", reason="more undone")
    room.desk.abort(room.queued("v4").id, actor="user:ada", reason="changed my mind")
    assert titles(channel) == ["*tab: tiny-v3 was stopped*"], "what people stop, they know of"


def test_what_flaps_is_told_once_and_again_after_a_while(sqlite_engine: Engine, room: ReleaseRoom) -> None:
    channel = Channel(sqlite_engine, room, SLACK)

    def flap() -> list[str]:
        for _ in range(3):
            room.desk.raise_incident(POLICY, release_id=None, reason="limits are burnt")
            room.desk.end_incident(POLICY, reason="kept again")
        return titles(channel)

    assert flap() == ["*tab: alarm incident*", "*tab: the alarm incident has ended*"]
    assert flap() == []
    room.desk.freeze(POLICY, AlarmKind.GAP, actor="system:watch", reason="paid more, no better")
    assert titles(channel) == ["*tab: alarm gap*"], "another alarm is other news"
    room.clock.advance(6 * 3600 + 1)
    assert len(flap()) == 2
    other = Channel(sqlite_engine, room, TEAMS)
    room.desk.raise_incident(POLICY, release_id=None, reason="limits are burnt")
    assert len(other.news()) == 1, "who has not heard hears, and nobody else"


def test_a_doubt_about_what_waits_is_told(sqlite_engine: Engine, room: ReleaseRoom) -> None:
    channel = Channel(sqlite_engine, room, SLACK)
    release = room.ready("v2")
    held = answer(GateName.CANARY, "v2", Verdict.INCONCLUSIVE, note="doubt")
    for _ in range(3):
        room.desk.void(release.id, reason="an arm is missing", because=held)
    assert titles(channel)[1:] == ["*tab: a release is held*"]


def test_at_half_of_its_time_somebody_is_reminded_once(sqlite_engine: Engine, room: ReleaseRoom) -> None:
    channel = Channel(sqlite_engine, room, SLACK)
    release = room.canary("v2")
    passed = answer(GateName.CANARY, "v2")
    passed = type(passed)(**{**vars(passed), "decided_at": room.clock()})
    ready = room.desk.mark_ready(release.id, passed)
    assert ready.approval_expires_at is not None
    half = (ready.approval_expires_at - room.clock()) / 2
    assert not room.desk.remind(release.id)
    room.clock.advance(half.total_seconds() + 1)
    assert [room.desk.remind(release.id) for _ in range(3)] == [True, False, False]
    assert titles(channel) == ["*tab: tiny-v2 is READY and waits for people*", "*tab: half of the time to approve tiny-v2 is over*"]
    room.desk.reject(release.id, approver="user:ada", reason="no")
    assert not room.desk.remind(release.id)


def test_people_who_are_asked_anew_hear_of_it_and_are_reminded_anew(sqlite_engine: Engine, room: ReleaseRoom) -> None:
    channel = Channel(sqlite_engine, room, SLACK)

    def seen(verdict: Verdict, note: str) -> GateResult:
        return replace(answer(GateName.CANARY, "v2", verdict, note=note), decided_at=room.clock())

    release = room.desk.mark_ready(room.canary("v2").id, seen(Verdict.PASS, "first"))
    room.clock.advance(2.1 * 3600)
    assert room.desk.remind(release.id)
    assert len(titles(channel)) == 2
    for note, told in (("again", ["*tab: tiny-v2 is READY again and asks people anew*"]), ("flapping", [])):
        room.desk.void(release.id, reason="labels are late", because=seen(Verdict.INCONCLUSIVE, note))
        titles(channel)
        again = room.desk.rebind(release.id, seen(Verdict.PASS, note))
        assert titles(channel) == told, "what flaps is told once in six hours"
    room.clock.advance(2.1 * 3600)
    assert room.desk.remind(release.id)
    assert titles(channel) == ["*tab: half of the time to approve tiny-v2 is over*"]
    room.desk.approve(release.id, approver="user:ada", evidence=again.evidence_digest or "")
    room.desk.rebind(release.id, seen(Verdict.PASS, "taken again after the approval"))
    assert titles(channel) == ["*tab: tiny-v2 is READY and waits for people*"], "other evidence is another question"


HOSTILE = "<!channel> *[x](https://evil.example)* <https://evil.example|here>\r\nBcc: all@example.com\u202e"


def test_slack_and_teams_show_what_was_written_as_it_was_and_link_to_us(sqlite_engine: Engine, room: ReleaseRoom) -> None:
    slack, teams = Channel(sqlite_engine, room, SLACK), Channel(sqlite_engine, room, TEAMS)
    release = room.canary("v2")
    room.desk.abort(release.id, actor="system:watch", reason=HOSTILE)
    said, card = slack.news()
    assert teams.news() == [], "one courier delivers for all"
    assert "<!channel>" not in said["text"]
    assert said["text"].count("<") == 1
    assert f"<https://ratchet.example/console/releases/{release.id}?policy=tab|look at it>" in said["text"]
    content = card["attachments"][0]["content"]
    assert card["attachments"][0]["contentType"] == "application/vnd.microsoft.card.adaptive"
    assert content["actions"][0]["url"] == f"https://ratchet.example/console/releases/{release.id}?policy=tab"
    assert r"\[x\]\(" in content["body"][1]["text"]
    assert "\u202e" not in content["body"][1]["text"] + said["text"]


def test_a_channel_is_sent_no_signature_and_a_signed_webhook_every_event(sqlite_engine: Engine, room: ReleaseRoom) -> None:
    channel, webhook = Channel(sqlite_engine, room, SLACK), Channel(sqlite_engine, room, "https://ops.example/hook")
    room.queued("v2")
    room.ready("v3")
    channel.courier.deliver_due()
    webhook.courier.deliver_due()
    got = channel.requests + webhook.requests
    plain = [request for request in got if request.headers["host"] == "hooks.example"]
    signed = [request for request in got if request.headers["host"] == "ops.example"]
    assert len(plain) == 1
    assert not [name for name in plain[0].headers if name.startswith("webhook-")]
    assert len(signed) > 5
    assert all("webhook-signature" in request.headers for request in signed)


class Mailbox:
    """An SMTP server of a few words."""

    def __init__(self) -> None:
        self.mails: list[str] = []
        self.refuse = False

    @contextmanager
    def open(self) -> Iterator[str]:
        """Its address."""
        listener = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=self._serve, args=(listener,), daemon=True)
        thread.start()
        try:
            yield f"smtp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            thread.join(5)

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rwb") as lines:
                self._speak(lines)

    def _speak(self, lines: Any) -> None:
        def say(text: str) -> None:
            lines.write(f"{text}\r\n".encode())
            lines.flush()

        say("220 mailbox")
        while line := lines.readline().decode().strip().upper():
            if line == "QUIT":
                say("221 bye")
                return
            if line == "DATA":
                say("354 go on")
                mail = ""
                while (part := lines.readline().decode()) != ".\r\n":
                    mail += part
                self.mails.append(mail)
            say("550 nobody here" if self.refuse and line.startswith("RCPT") else "250 fine")


def test_a_mail_is_handed_over_once_and_says_what_happened(sqlite_engine: Engine, room: ReleaseRoom) -> None:
    box = Mailbox()
    with box.open() as url:
        channel = Channel(sqlite_engine, room, MAIL, PostOffice(url=url, sender="ratchet@example.com"))
        release = room.canary("v2")
        room.desk.abort(release.id, actor="system:watch", reason=HOSTILE)
        assert channel.courier.deliver_due() == 1
        assert channel.courier.deliver_due() == 0
        assert asyncio.run(channel.courier.send_test(channel.hook)) == ("handed over", True)
        box.refuse = True
        room.desk.abort(room.canary("v3").id, actor="system:watch", reason="again")
        assert channel.courier.deliver_due() == 0
    mail = message_from_string(box.mails[0], policy=policy.default)
    assert (mail["to"], mail["subject"], mail["bcc"]) == ("ops@example.com", "[Ratchet] tab: tiny-v2 was stopped", None)
    assert f"https://ratchet.example/console/releases/{release.id}?policy=tab" in mail.get_content()
    sent = channel.book.deliveries(channel.hook.id)
    assert {row["last_status"].split(":")[0] for row in sent} == {"handed over", "SMTPRecipientsRefused"}
    assert f"<{sent[-1]['event_id']}@example.com>" == mail["message-id"]
    room.clock.advance(timedelta(seconds=6).total_seconds())
    with Mailbox().open() as other:
        late = Channel(sqlite_engine, room, "mailto:late@example.com", PostOffice(url=other, sender="r@example.com"))
        assert late.courier.deliver_due() == 1, "what was refused is tried again"


def test_mail_without_a_server_waits_and_says_why(sqlite_engine: Engine, room: ReleaseRoom) -> None:
    channel = Channel(sqlite_engine, room, MAIL)
    room.ready("v2")
    assert channel.courier.deliver_due() == 0
    assert "RATCHET_SMTP" in channel.book.deliveries(channel.hook.id)[0]["last_status"]


@pytest.mark.parametrize(
    "url", ["mailto:", "mailto:a", "mailto:a@b", "mailto:a@b.c?bcc=x@y.z", "mailto:a@b.c,d@e.f", "mailto:a@b.c%0abcc:x", "slack+http://x.example",
            "slack+https://127.0.0.1/x", "teams+https://10.0.0.1/", "slack+mailto:a@b.c"],
)  # fmt: skip
def test_what_is_no_channel_is_refused(url: str) -> None:
    with pytest.raises(BadRequest):
        check_url(url, allow_loopback=False, resolve=lambda host: [host if host[0].isdigit() else PUBLIC])
