"""How a process of ours hears that it is to end: SIGTERM (a supervisor, a container) or SIGINT (Ctrl-C)."""

import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue


def until_told() -> threading.Event:
    """The event that SIGTERM and SIGINT set."""
    stop = threading.Event()
    when_told(stop.set)
    return stop


def when_told(act: Callable[[], object]) -> None:
    """Call `act` at every SIGTERM and SIGINT, in a thread of its own; for the main thread to call, once.

    Never in the handler itself: it interrupts the main thread anywhere, inside `Event.wait` too, which then holds the lock that `Event.set`
    waits for, and the process never ends. A `SimpleQueue.put` may interrupt anything (the library reference says so).
    """
    told: SimpleQueue[None] = SimpleQueue()

    def listen() -> None:
        while True:
            told.get()
            act()

    threading.Thread(target=listen, name="told", daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: told.put(None))
