"""What a process does as long as it lives, its work and what it does beside it: over a database that is away, and over bugs beside it."""

import logging
import threading
from collections.abc import Callable

from app.domain.errors import RatchetError

log = logging.getLogger(__name__)
AGAIN_S = 1.0


def outlast(name: str, work: Callable[[], object], stop: threading.Event, *, away: tuple[type[Exception], ...]) -> None:
    """Do the work until it ends by itself; where the database went `away` under it, begin it again a second later.

    Nothing is lost by that, nor by ending: but a process that ends takes ten seconds to be back, and Kubernetes lets one that ends again
    and again wait for minutes, while a failover takes twenty seconds.
    """
    while not stop.is_set():
        try:
            work()
            return
        except away as error:
            log.warning("event=database_away what=%s error=%s", name, " ".join(str(error).split())[:300])
            stop.wait(AGAIN_S)


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
