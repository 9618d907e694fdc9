"""The tokens that `ratchet login` keeps: one for each service, in a file of mode 0600 that belongs to whoever runs the command."""

import os
import tempfile
from pathlib import Path

import msgspec

from app.domain.errors import BadConfig


def token_file() -> Path:
    """`$XDG_CONFIG_HOME/ratchet/tokens.json`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "ratchet" / "tokens.json"


def kept_token(url: str) -> str | None:
    """The token for the service at this address; None where there is none. Raises `BadConfig` for a file that others can read."""
    return _read().get(url.rstrip("/"))


def keep_token(url: str, token: str | None) -> Path:
    """Keep a token for this service, or forget the one there is."""
    known = {where: kept for where, kept in _read().items() if where != url.rstrip("/")}
    if token is not None:
        known[url.rstrip("/")] = token
    path = token_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent)  # mode 0600
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(known))
    Path(name).replace(path)
    return path


def _read() -> dict[str, str]:
    path = token_file()
    try:
        status, text = path.stat(), path.read_bytes()
    except FileNotFoundError:
        return {}
    if status.st_mode & 0o077 or status.st_uid != os.getuid():
        raise BadConfig(f"{path} can be read by others than you: chmod 600 {path}, and make fresh tokens (`ratchet login`)")
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.MsgspecError as error:
        raise BadConfig(f"{path} is not what `ratchet login` writes: remove it and sign in again") from error
