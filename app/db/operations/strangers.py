"""Whether a database server asks who comes."""

import secrets

from sqlalchemy import make_url
from sqlalchemy.exc import OperationalError

from app.db.engine import expected_to_answer, open_engine


def hosts_of(url: str) -> list[str]:
    """Where its servers are; nothing of SQLite and of sockets in a folder, which this machine alone has."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return []
    named = parsed.query.get("host", ()) or parsed.host or ()
    several = named if isinstance(named, tuple) else tuple(named.split(","))
    return [host for one in several if (host := one.rpartition(":")[0] if one.count(":") == 1 else one) and not host.startswith("/")]


def lets_strangers_in(url: str) -> bool:
    """Whether our user gets in with a password that nobody chose. Raises `Unavailable` where not even the right one does.

    A certificate (`sslcert`) is no password: whoever needs one is taken to be asked for it.
    """
    with expected_to_answer():
        _connect(url)
    parsed = make_url(url)
    if "sslcert" in parsed.query:
        return False
    try:
        _connect(parsed.set(password=secrets.token_hex(16)).render_as_string(hide_password=False))
    except OperationalError:
        return False
    return True


def _connect(url: str) -> None:
    engine = open_engine(url)
    try:
        engine.connect().close()
    finally:
        engine.dispose()
