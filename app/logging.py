"""Structured logging on standard error: one line per event, `time level process logger message key=value …`."""

import logging
import sys
import time

NOISY = ("httpx", "httpcore", "apscheduler", "kafka", "alembic", "mlflow", "urllib3", "ray", "openai")
"""Libraries that log every call; their warnings and errors still show."""


def configure(process: str, level: str = "INFO") -> None:
    """Send this process's log to standard error, in UTC, replacing whatever was configured."""
    formatter = logging.Formatter(f"%(asctime)s.%(msecs)03dZ %(levelname)s {process} %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    # A tick that finds its predecessor still at work is left out on purpose (a cycle takes longer than a tick), not a warning.
    logging.getLogger("apscheduler.scheduler").setLevel(logging.ERROR)
