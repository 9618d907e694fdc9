"""What a process does beside its work every so often, in a thread that nothing ends but the process."""

import logging
import threading
from collections.abc import Callable

from app.domain.errors import RatchetError

log = logging.getLogger(__name__)


def repeat(name: str, work: Callable[[], object], stop: threading.Event, *, every_s: float, at_once: bool = False) -> threading.Thread:
    """Do it every so often until `stop` is set. A round that fails says why, and the next one may not.

    A thread that ended would be missed by nobody until its process is started again: not for a database that failed over, nor for a bug.
    """

    def rounds() -> None:
        wait_s = 0.0 if at_once else every_s
        while not stop.wait(wait_s):
            wait_s = every_s
            try:
                work()
            except (RatchetError, OSError) as error:
                log.warning("event=round_waits what=%s error=%s", name, error)
            except Exception:
                log.exception("event=round_failed what=%s", name)

    thread = threading.Thread(target=rounds, name=name, daemon=True)
    thread.start()
    return thread
