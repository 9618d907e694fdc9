"""A service as it runs, over a data folder, in a thread: for whoever acts over HTTP."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, event

from app import wiring
from app.main import application
from app.settings import Settings
from tests.fakes.gateway import serving


@contextmanager
def running_service(settings: Settings) -> Iterator[str]:
    """Its address. What it connected to is closed with it, as when a process ends."""
    used: set[Engine] = set()

    def note(connection: Connection) -> None:
        used.add(connection.engine)

    event.listen(Engine, "engine_connect", note)
    adapters = wiring.http_adapters(settings)
    try:
        with serving(application(settings, adapters)) as url:
            yield url
    finally:
        adapters.close()
        event.remove(Engine, "engine_connect", note)
        for engine in used:
            engine.dispose()
