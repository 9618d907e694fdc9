"""Structured logging on standard error: one line per event, `time level process logger message key=value …`, or one JSON object.

What is logged while a request is answered carries the request's id (`x-request-id` of the answer) as `request=…`.
"""

import json
import logging
import re
import sys
import time
from contextvars import ContextVar

NOISY = ("httpx", "httpcore", "apscheduler", "kafka", "alembic", "mlflow", "urllib3", "ray", "openai")
"""Libraries that log every call; their warnings and errors still show."""

REQUEST: ContextVar[str] = ContextVar("request")
"""Id of the request that is being answered."""
PAIR = re.compile(r"(?<!\S)([a-z][a-z0-9_]*)=(\S*)")


class _Line(logging.Formatter):
    """As a person reads it."""

    converter = time.gmtime

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03dZ %(levelname)s {process} %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, with the request's id at its end."""
        request = REQUEST.get("")
        return super().formatMessage(record) + (f" request={request}" if request else "")


class _Json(logging.Formatter):
    """As a collector reads it: time, level, process, logger, message, and each `key=value` of the message as a field."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One object; what the message says of a key goes behind what we say ourselves."""
        message = record.getMessage()
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        own: dict[str, object] = {
            "time": f"{at}.{int(record.msecs):03d}Z", "level": record.levelname, "process": self._process, "logger": record.name,
            "message": message,
        }  # fmt: skip
        if request := REQUEST.get(""):
            own["request"] = request
        if record.exc_info:
            own["traceback"] = self.formatException(record.exc_info)
        return json.dumps(dict(PAIR.findall(message)) | own)


def configure(process: str, level: str = "INFO", *, form: str = "text") -> None:
    """Send this process's log to standard error, in UTC, replacing whatever was configured."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(process) if form == "json" else _Line(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    # A tick that finds its predecessor still at work is left out on purpose (a cycle takes longer than a tick), not a warning.
    logging.getLogger("apscheduler.scheduler").setLevel(logging.ERROR)
