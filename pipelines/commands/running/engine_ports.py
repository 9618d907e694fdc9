"""What the engine's command starts besides our own engine: who may reach it, and servers of other make that are kept as wanted."""

import logging
import threading
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from app import wiring
from app.contact import Contact
from app.domain.errors import BadConfig
from app.settings import LOOPBACK, Settings, is_loopback

if TYPE_CHECKING:
    from app.listening.barrier import Barrier
    from app.serving.servers.control import Control

log = logging.getLogger(__name__)


def engine_barrier(settings: Settings, host: str) -> "Barrier":
    """An engine answers to its own address and to the names by which gateways of this deployment are told of engines."""
    from app.listening.barrier import Barrier, reached_as

    named = frozenset(name for url in settings.engines if (name := urlsplit(url).hostname))
    return Barrier(hosts=settings.hosts | reached_as(host) | named, loopback=host in LOOPBACK)


def engine_id(settings: Settings, place: str) -> str:
    """What an engine is called in the ledger: names of machines come again in other regions."""
    return f"{settings.region}/{place}" if settings.region else place


def engine_key(settings: Settings, host: str) -> str | None:
    """What an engine asks of whoever samples from it. Where other machines reach it and it would ask nobody, that is said: gateways of the
    version before send no key, so it can be set only when all of them are replaced."""
    if settings.engine_key is None and not is_loopback(host):
        log.warning("engine open to whoever reaches it host=%s cure=set RATCHET_ENGINE_KEY for every process", host)
    return settings.engine_key


def keep_server(
    settings: Settings, control: "Control", *, only: tuple[str, ...], role: str | None, pause: str, stop: threading.Event
) -> None:
    """Keep a server of other make as the deployment wants it until `stop` is set."""
    from app.serving.servers.control import Pause
    from app.serving.servers.residency import Adapters, InPlace, KeptServer, keep_versions

    if role is not None and len(only) != 1:
        raise BadConfig(f"a server whose weights are replaced in place serves one policy and {len(only)} are meant: name it with --policy")
    address = f"{control.scheme}{control.url}"
    ledger = wiring.engine_ledger(settings, engine_id=engine_id(settings, control.url), address=address)
    server = KeptServer(control, wiring.open_weights(settings))
    contact = Contact(region=settings.region)
    residency = (
        Adapters(server, ledger, only=frozenset(only), contact=contact)
        if role is None
        else InPlace(server, ledger, policy=only[0], role=role, pause=Pause(pause), contact=contact)
    )
    own = wiring.instruments(settings, "engine")
    own.sampled("ratchet_control_plane_silent_seconds", contact.seconds)
    own.ready = True
    log.info("engine ready address=%s kind=%s way=%s", address, control.name, role or "adapters")
    keep_versions(residency, stop=stop)
    ledger.forget()
    control.close()
