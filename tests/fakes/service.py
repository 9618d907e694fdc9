"""A service as it runs, over a data folder, in a thread: for whoever acts over HTTP."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Engine, event

from app import wiring
from app.main import application
from app.settings import Settings
from tests.fakes.gateway import serving


@contextmanager
def running_service(settings: Settings, *, engines: Any = None) -> Iterator[str]:
    """Its address. What it connected to is closed with it, as when a process ends. `engines` take the place of those that are named."""
    used: set[Engine] = set()

    def note(connection: Connection) -> None:
        used.add(connection.engine)

    event.listen(Engine, "engine_connect", note)
    adapters = wiring.http_adapters(settings)
    if engines is not None:
        adapters = replace(adapters, engines=engines)
    try:
        with serving(application(settings, adapters)) as url:
            yield url
    finally:
        adapters.close()
        event.remove(Engine, "engine_connect", note)
        for engine in used:
            engine.dispose()
