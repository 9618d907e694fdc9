"""The error tree, drawn once.

RatchetError                 something a person can act on; the message names the cure
├── BadInput                 what the caller sent or configured is wrong
│   ├── BadConfig            a TOML file or environment variable is wrong (exit code 2)
│   ├── BadRequest           an HTTP body or record is wrong (4xx, or the dead-letter queue)
│   └── UnknownPolicy        no policy of that name is declared
├── Refused                  allowed in form, not in this state (409, exit code 2)
│   ├── AlreadyRunning       a second supervisor or process on the same data folder
│   ├── StaleGeneration      a compare-and-swap lost: somebody moved the pointer first
│   ├── LeaseLost            the fencing token is no longer the newest: another replica took over
│   └── Quarantined          the version was rolled back and may never serve again
├── DoneAlready              this request was carried out before; nothing is done twice, and that is no failure (200)
├── NotFound                 an id that names nothing
├── Unavailable              a dependency does not answer; retrying later may help (503)
│   ├── DamagedState         a saved state is not what was written: it is set aside, and the next update does without
│   └── Overloaded           a limit is reached; `retry_after_s` says when to come back (429)
├── OwnFault                 code and database do not agree, or every record fails alike: nothing is buried, the process stops
└── Held                     a training run that refuses to update; `reason` is from `HoldReason`

Anything else that escapes is a bug of ours and crashes loudly.
"""

import re
from typing import Any


class RatchetError(Exception):
    """Something a person can act on."""

    exit_code = 2
    """Of a command that ends with it."""


class BadInput(RatchetError):
    """What the caller sent or configured is wrong."""


class BadConfig(BadInput):
    """A configuration file or environment variable is wrong."""


class BadRequest(BadInput):
    """A request body or record is wrong; `param` names the field where that is known."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnknownPolicy(BadInput):
    """No policy of that name is declared."""


class Refused(RatchetError):
    """Allowed in form, not in this state."""


class AlreadyRunning(Refused):
    """Another process already owns this data folder."""


class StaleGeneration(Refused):
    """A compare-and-swap lost: the pointer moved since it was read."""


class LeaseLost(Refused):
    """The fencing token is no longer the newest one."""


class Quarantined(Refused):
    """The version was rolled back and may never serve again."""


class DoneAlready(RatchetError):
    """The same request was carried out before: asking again is how a lost answer is found out."""


class NotFound(RatchetError):
    """An id that names nothing."""


class Unavailable(RatchetError):
    """A dependency does not answer."""


class DamagedState(Unavailable):
    """A saved state at `place` is not what was written."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.place)  # it comes from a worker of another machine


class Overloaded(Unavailable):
    """A limit is reached; come back in `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def asked_to_wait_s(retry_after: str | None, *, default: float = 1.0) -> float:
    """Seconds that a Retry-After asks for; the default where there is none, or no number, such as a date that a proxy wrote."""
    said = retry_after is not None and re.fullmatch(r"[0-9]{1,5}(\.[0-9]+)?", retry_after)
    return float(said[0]) if said else default


class OwnFault(RatchetError):
    """A fault of ours, not of the data: whoever meets it stops and says so, and buries nothing."""


class Held(RatchetError):
    """A training run refuses to update; `reason` is a value of `app.domain.release.versions.HoldReason`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
