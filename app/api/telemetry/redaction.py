"""Personal data out of texts before anything is stored: emails, phones, payment cards, IP addresses, secrets.

Phones by Google's libphonenumber (`phonenumbers`), cards by their Luhn digit, addresses by the standard library, emails and the
well-known forms of keys and tokens by expressions, whose repetitions are all bounded: no text makes them slow. Works offline.
What is found becomes `[EMAIL]`, `[PHONE]`, `[CARD]`, `[IP]`, `[SECRET]`.

Token ids would still carry the text: a turn in which anything was found is stored without its tokens and log-probabilities, and
so is never trained on (`app.api.chat.record`).
"""

import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import msgspec
from phonenumbers import Leniency, PhoneNumberMatcher

from app.api.workshop import unhurried
from app.domain.telemetry.turns import TurnServed

EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+'\-])[A-Za-z0-9._%+'\-]{1,64}@(?:[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}\b"
)
CARD = re.compile(r"(?<![\w.\-])\d(?:[ \-]?\d){12,18}(?![\w\-]|\.\d)")
IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w]|\.\d)")
IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f]{0,4})(?![\w:])")
SECRET = re.compile(
    r"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----.*?(?:-----END (?:[A-Z]+ )?PRIVATE KEY-----|\Z)"
    r"|\b(?:sk|pk|rk)[-_](?=[A-Za-z0-9_\-]{0,200}\d)[A-Za-z0-9_\-]{16,}"  # OpenAI, Anthropic, Stripe, ours
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{30,}|\bglpat-[A-Za-z0-9_\-]{20,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_\-]{35}"  # AWS, Google
    r"|\bxox[abprs]-[A-Za-z0-9\-]{10,}|\bhf_[A-Za-z0-9]{30,}|\bnpm_[A-Za-z0-9]{36}|\bpypi-[A-Za-z0-9_\-]{16,}"
    r"|\bSG\.[A-Za-z0-9_\-]{16,}\.[A-Za-z0-9_\-]{16,}|\bdop_v1_[a-f0-9]{64}"
    r"|\beyJ[A-Za-z0-9_\-]{8,1000}\.eyJ[A-Za-z0-9_\-]{8,8000}\.[A-Za-z0-9_\-]+"  # JSON web tokens
    r"|(?i:\b(?:api[_-]?key|secret|access[_-]?token|auth[_-]?token|password|passwd)\b[\"']?\s*[:=]\s*[\"']?)(?P<named>[^\s\"',;]{8,})",
    re.DOTALL,
)
SECRET_HINT = re.compile(
    r"(?=-----BEGIN |\b(?:sk|pk|rk)[-_]|\bgh[pousr]_|\bgithub_pat_|\bglpat-|\bA(?:KIA|SIA|Iza)|\bxox[abprs]-|\bhf_|\bnpm_|\bpypi-|\bSG\."
    r"|\bdop_v1_|\beyJ|(?i:\b(?:api[_-]?key|secret|access[_-]?token|auth[_-]?token|password|passwd)\b))"
)
"""Where a secret may begin: its first characters alone, so that a text can be searched piece by piece."""
HINT_CHARS, EMAIL_CHARS, NUMBER_CHARS = 16, 700, 64
"""More than what one match looks at: an address has up to 64 + 8 * 64 + 25 characters, a card 37, an IPv6 address 43."""
PIECE_CHARS = 512
"""Searched at once, for at most a quarter of a millisecond."""
MAYBE_PHONE = re.compile(r"\d[\d().\-/ ]{5,}\d")
REGIONS = ("US", "GB")
"""Countries whose national notation is understood; numbers with a country code are found whatever the country."""
Span = tuple[int, int, str]


class Redactor:
    """Replaces personal data; `found` is called with the kind of each replacement."""

    def __init__(self, found: Callable[[str], None] | None = None) -> None:
        self._found = found or (lambda _kind: None)

    def text(self, text: str) -> str:
        """The text with placeholders; the same object where nothing was found."""
        spans = _without_overlaps(iter(unhurried(spans_in(text), chars=len(text))))
        if not spans:
            return text
        parts: list[str] = []
        at = 0
        for start, end, kind in spans:
            parts += (text[at:start], f"[{kind}]")
            at = end
            self._found(kind)
        return "".join([*parts, text[at:]])

    def value(self, value: object) -> Any:  # noqa: ANN401 - any JSON value in, the same shape out
        """A JSON value with every text in it redacted; the keys of objects stay."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in cast("list[object]", value)]
        if isinstance(value, dict):
            return self.mapping(cast("dict[str, object]", value))
        return value

    def mapping(self, value: "dict[str, Any]") -> dict[str, Any]:
        """A JSON object, such as a chat message."""
        return {key: self.value(item) for key, item in value.items()}


def redact(turn: TurnServed, redactor: Redactor) -> TurnServed:
    """The turn without personal data; where any was found its tokens go too, because they would still spell it out."""
    messages = [redactor.mapping(message) for message in turn.messages]
    completion = redactor.text(turn.completion)
    calls = [msgspec.structs.replace(call, arguments=redactor.text(call.arguments)) for call in turn.tool_calls]
    if messages == turn.messages and completion == turn.completion and calls == turn.tool_calls:
        return turn
    return msgspec.structs.replace(
        turn, messages=messages, completion=completion, tool_calls=calls, prompt_tokens=[], completion_tokens=[], logprobs=None,
        routed_experts=None, kept_log_mass=None, shape=msgspec.UNSET, tags={**turn.tags, "redacted": "true"},
    )  # fmt: skip


def spans_in(text: str) -> Iterator[Span]:
    """Everything found, overlaps included: (start, end, kind)."""
    done = 0
    for hint in pieces(SECRET_HINT, text, reach=HINT_CHARS):
        match = SECRET.match(text, hint.start()) if hint.start() >= done else None
        if match is not None:
            done = match.end()
            group = "named" if match.group("named") else 0
            yield match.start(group), match.end(group), "SECRET"
    if "@" in text:
        for match in pieces(EMAIL, text, reach=EMAIL_CHARS):
            yield match.start(), match.end(), "EMAIL"
    for match in pieces(CARD, text, reach=NUMBER_CHARS):
        if luhn(match.group()):
            yield match.start(), match.end(), "CARD"
    for pattern in (IPV4, IPV6):
        for match in pieces(pattern, text, reach=NUMBER_CHARS):
            if _is_address(match.group()):
                yield match.start(), match.end(), "IP"
    if MAYBE_PHONE.search(text):
        yield from _phones(text)


def pieces(pattern: re.Pattern[str], text: str, *, reach: int, piece: int = PIECE_CHARS) -> Iterator[re.Match[str]]:
    """What `finditer` finds, looked for in one piece of the text after the other: each search keeps the interpreter to its end.

    `reach`: more than the characters that one match can look at.
    """
    at = 0
    for begin in range(0, len(text), piece):
        end = begin + piece
        for match in pattern.finditer(text, max(begin, at), end + reach):
            if match.start() >= end:
                break
            yield match
            at = match.end()


def luhn(number: str) -> bool:
    """Whether the digits end in their Luhn check digit (ISO/IEC 7812-1, annex B) and begin like a payment card."""
    digits = [int(c) for c in number if c.isdigit()]
    doubled = [d * 2 - 9 * (d > 4) if i % 2 else d for i, d in enumerate(reversed(digits))]
    return digits[0] in (2, 3, 4, 5, 6) and sum(doubled) % 10 == 0


def _phones(text: str) -> Iterator[Span]:
    for region in REGIONS:
        found: list[Span] = []
        matches = PhoneNumberMatcher(text, region, leniency=Leniency.VALID, max_tries=200)
        for match in unhurried(matches, chars=len(text)):
            if not match.raw_string.isdigit() or len(match.raw_string) >= 10:
                found.append((match.start, match.end, "PHONE"))
        yield from found
        text = _blanked(text, found)  # what one country found need not be found again: a number is what costs most


def _blanked(text: str, spans: Sequence[Span]) -> str:
    """The text with the spans crossed out, as long as before."""
    parts, at = list[str](), 0
    for start, end, _ in spans:
        parts += (text[at:start], "x" * (end - start))
        at = end
    return "".join([*parts, text[at:]])


def _is_address(text: str) -> bool:
    if text.count(":") >= 2 and not re.search(r"[0-9A-Fa-f]", text):
        return False  # `::` alone is punctuation in several languages
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _without_overlaps(spans: Iterator[Span]) -> list[Span]:
    """Left to right; of two that overlap the longer one."""
    chosen: list[Span] = []
    for span in sorted(spans):
        if not chosen or span[0] >= chosen[-1][1]:
            chosen.append(span)
        elif span[1] - span[0] > chosen[-1][1] - chosen[-1][0]:
            chosen[-1] = span
    return chosen
