"""News in the words of a chat or a mail: which events are news, `app.domain.release.news` says."""

from collections.abc import Mapping
from dataclasses import dataclass
from email.message import EmailMessage
from typing import Any
from urllib.parse import quote

from app.domain.errors import BadRequest
from app.domain.release.news import MAIL

LONGEST_TEXT = 2000
"""Characters of a sentence that somebody wrote; chats cut long messages anyway, in places of their own choice."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """What somebody is told."""

    title: str
    text: str
    link: str


def message_of(event: Mapping[str, Any], *, address: str) -> Message:
    """What an event says, for people; `address` is where the console is."""
    data: Mapping[str, Any] = event["data"]
    policy, version = data["policy"], str(data.get("version_name") or data.get("digest") or "")[:100]
    reason = str(data.get("reason") or "no reason was given")[:LONGEST_TEXT]
    link = f"{address}/console?policy={quote(policy, safe='')}"
    if event["type"].startswith("release.") or event["type"] == "gate.decided":
        link = f"{address}/console/releases/{quote(data['subject'], safe='')}?policy={quote(policy, safe='')}"
    title = {
        "release.ready": f"{policy}: {version} is READY and waits for people",
        "release.rebound": f"{policy}: {version} is READY again and asks people anew",
        "release.judging": f"{policy}: {version} waits for blind votes",
        "release.waiting": f"{policy}: half of the time to approve {version} is over",
        "release.aborted": f"{policy}: {version} was stopped",
        "deployment.rollback": f"{policy}: rolled back to {version}",
        "gate.decided": f"{policy}: a release is held",
        "alarm.raised": f"{policy}: alarm {data.get('kind', '')}",
        "alarm.ended": f"{policy}: the alarm {data.get('kind', '')} has ended",
    }.get(event["type"], f"{policy}: {event['type']}")
    until = f" It ends when {data['until']}." if data.get("until") else ""
    return Message(title=_printable(title), text=_printable(f"{reason} (by {data['actor']}).{until}"), link=link)


def slack_body(message: Message) -> dict[str, Any]:
    """As incoming webhooks of Slack, and of what speaks like it (Mattermost, Rocket.Chat), take it."""
    title, text = (_escaped(part) for part in (message.title, message.text))
    return {"text": f"*{title}*\n{text}\n<{message.link}|look at it>", "unfurl_links": False}


def teams_body(message: Message) -> dict[str, Any]:
    """As workflows of Microsoft Teams take it: an adaptive card."""
    card = {
        "type": "AdaptiveCard", "$schema": "http://adaptivecards.io/schemas/adaptive-card.json", "version": "1.4",
        "body": [
            {"type": "TextBlock", "text": _plain(message.title), "weight": "Bolder", "wrap": True},
            {"type": "TextBlock", "text": _plain(message.text), "wrap": True},
        ],
        "actions": [{"type": "Action.OpenUrl", "title": "Look at it", "url": message.link}],
    }  # fmt: skip
    return {"type": "message", "attachments": [{"contentType": "application/vnd.microsoft.card.adaptive", "content": card}]}


def mail_of(message: Message, *, to: str, sender: str, event_id: str) -> EmailMessage:
    """As a mail; its id is the event's, so that one that is sent again is the same mail."""
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = sender, to, f"[Ratchet] {message.title}"[:200]
    mail["Message-ID"] = f"<{event_id}@{sender.rpartition('@')[2].strip('>')}>"
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(f"{message.text}\n\n{message.link}\n")
    return mail


def address_of(url: str) -> str:
    """The mail address of a `mailto:` receiver. Raises `BadRequest`."""
    to = url.removeprefix(MAIL)
    name, _, host = to.partition("@")
    if not name or "." not in host or not to.isascii() or not to.isprintable() or any(c in to for c in " ,;<>\"'\\:%?"):
        raise BadRequest(f"{url!r} names no mail address: write mailto:somebody@example.com", param="url")
    return to


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _escaped(text: str) -> str:
    """Nobody is mentioned and nothing is linked by what somebody wrote (Slack's three characters)."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("*", "∗")


def _plain(text: str) -> str:
    """The same for the Markdown of cards."""
    return "".join(f"\\{c}" if c in "\\[]()*_`#!~" else c for c in text)
