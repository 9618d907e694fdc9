"""Mail by SMTP, for `mailto:` receivers: RATCHET_SMTP says where, RATCHET_MAIL_FROM from whom."""

import smtplib
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import EmailMessage
from urllib.parse import unquote, urlsplit

from app.domain.errors import BadConfig

TIMEOUT_S = 15.0
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, kw_only=True)
class PostOffice:
    """Sends mail. `smtp://` is encrypted with STARTTLS before anything is said, but on this machine; `smtps://` from the start."""

    url: str = field(repr=False)
    """`smtp[s]://[user:password@]host[:port]`"""
    sender: str
    plain: Callable[..., smtplib.SMTP] = field(default=smtplib.SMTP, repr=False)
    encrypted: Callable[..., smtplib.SMTP] = field(default=smtplib.SMTP_SSL, repr=False)

    def send(self, mail: EmailMessage) -> None:
        """Hand it over. Raises `smtplib.SMTPException`, `OSError`, `BadConfig`."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("smtp", "smtps") or not parts.hostname:
            raise BadConfig("RATCHET_SMTP is no address: write smtp://user:password@mail.example.com:587, or smtps://…:465")
        safely = ssl.create_default_context()
        if parts.scheme == "smtps":
            server = self.encrypted(parts.hostname, parts.port or 465, timeout=TIMEOUT_S, context=safely)
        else:
            server = self.plain(parts.hostname, parts.port or 587, timeout=TIMEOUT_S)
        with server:
            if parts.scheme == "smtp" and parts.hostname not in LOOPBACK:
                server.starttls(context=safely)
            if parts.username is not None:
                server.login(unquote(parts.username), unquote(parts.password or ""))
            server.send_message(mail)
