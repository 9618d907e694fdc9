"""Mail is handed over encrypted, to the port that is meant, by whoever it has to be, and the connection ends."""

import ssl
from email.message import EmailMessage
from typing import Any, cast

import pytest

from app.domain.errors import BadConfig
from app.release.post import PostOffice


class Server:
    """Writes down what is done to it, in order."""

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.settings: dict[str, Any] = {}

    def opened(self, kind: str) -> Any:
        def connect(host: str, port: int, **settings: Any) -> "Server":
            self.did.append((kind, host, port))
            self.settings = settings
            return self

        return connect

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.did.append("closed")

    def starttls(self, *, context: ssl.SSLContext) -> None:
        assert context.verify_mode is ssl.CERT_REQUIRED
        self.did.append("starttls")

    def login(self, user: str, password: str) -> None:
        self.did.append(("login", user, password))

    def send_message(self, mail: EmailMessage) -> None:
        self.did.append(("sent", mail["To"]))


def handed_over(url: str) -> Server:
    server, mail = Server(), EmailMessage()
    mail["To"] = "a@x.de"
    office = PostOffice(
        url=url, sender="r@y.de", plain=cast("Any", server.opened("plain")), encrypted=cast("Any", server.opened("encrypted"))
    )
    office.send(mail)
    return server


@pytest.mark.parametrize(
    ("url", "did"),
    [
        ("smtp://mail.example.com", [("plain", "mail.example.com", 587), "starttls"]),
        ("smtp://mail.example.com:25", [("plain", "mail.example.com", 25), "starttls"]),
        ("smtps://mail.example.com", [("encrypted", "mail.example.com", 465)]),
        ("smtps://mail.example.com:2465", [("encrypted", "mail.example.com", 2465)]),
        ("smtp://127.0.0.1:25", [("plain", "127.0.0.1", 25)]), ("smtp://localhost", [("plain", "localhost", 587)]),
        ("smtps://localhost", [("encrypted", "localhost", 465)]),
        ("smtp://a%40x:p%2Fw@mail.example.com", [("plain", "mail.example.com", 587), "starttls", ("login", "a@x", "p/w")]),
        ("smtps://ada@mail.example.com", [("encrypted", "mail.example.com", 465), ("login", "ada", "")]),
    ],
)  # fmt: skip
def test_a_mail_goes_the_way_that_its_address_says_and_nothing_is_said_before_it_is_encrypted(url: str, did: list[Any]) -> None:
    server = handed_over(url)
    assert server.did == [*did, ("sent", "a@x.de"), "closed"]
    assert server.settings["timeout"] == 15.0
    context = server.settings.get("context")
    assert (context is not None) is url.startswith("smtps")
    assert context is None or context.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize("url", ["", "mail.example.com", "http://mail.example.com", "smtp://", "smtp:///x"])
def test_what_is_no_address_of_a_server_is_refused_with_what_one_looks_like(url: str) -> None:
    with pytest.raises(BadConfig, match="RATCHET_SMTP is no address"):
        handed_over(url)


def test_a_password_is_in_no_log() -> None:
    assert "secret" not in repr(PostOffice(url="smtp://ada:secret@mail.example.com", sender="r@y.de"))
