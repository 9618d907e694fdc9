"""A service as it runs, over a data folder, in a thread: for whoever acts over HTTP."""

from collections.abc import Iterator
from contextlib import contextmanager

from app import wiring
from app.main import application
from app.settings import Settings
from tests.fakes.gateway import serving


@contextmanager
def running_service(settings: Settings) -> Iterator[str]:
    """Its address."""
    adapters = wiring.http_adapters(settings)
    try:
        with serving(application(settings, adapters)) as url:
            yield url
    finally:
        adapters.close()
