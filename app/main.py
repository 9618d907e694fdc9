"""The HTTP service: `create_app` puts the collaborators together, `python -m app.main` serves them.

Fed by HTTP / feeds the inbox, the release room and the operators' pages.
"""

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial

import uvicorn
from fastapi import APIRouter, Depends

from app import wiring
from app.access import FormTokens
from app.api import engines, keys, people, releases, webhooks
from app.api.application import Application, TurnAway, build
from app.api.chat.conversations import Conversations
from app.api.chat.gateway import Gateway
from app.api.chat.route import ChatRoute
from app.api.chat.shadows import Shadows
from app.api.data import dead_letters, erasures, rules
from app.api.dialects import areal, langfuse, mlflow, otel, phoenix
from app.api.dialects.counter import Counter
from app.api.entry.access import Access, PeopleBook
from app.api.entry.doorkeeper import Doorkeeper, read_form
from app.api.entry.feedback_tokens import FeedbackTokens
from app.api.entry.sessions import Sessions
from app.api.metrics import Metrics
from app.api.operations import Check, probes, views
from app.api.telemetry import feedback, observations
from app.api.telemetry.door import Door
from app.api.telemetry.drafts import Desk
from app.api.telemetry.events import EventsRoute
from app.api.telemetry.intake import Intake, Limits
from app.api.telemetry.redaction import Redactor
from app.api.workshop import SWITCH_S, Workshop
from app.console.deeds import Hands
from app.console.entrance import Entrance
from app.console.live import Live
from app.console.pages import Pages, static
from app.contact import Contact, Part
from app.domain.errors import BadConfig, RatchetError, Unavailable
from app.domain.ids import utc_now
from app.domain.policies import PolicyConfig
from app.domain.ports import Claims, Clock, Episodes, GatewayEngines, Inbox, Keys, Ledger, Reads, Routes
from app.domain.readings import Readings
from app.domain.retention import Retention, retention
from app.listening.barrier import Barrier, reached_as
from app.listening.connections import Connection, Server
from app.listening.sockets import bound
from app.logging import configure
from app.secret_files import keep_to_owner
from app.settings import LOOPBACK, Settings, from_environment, read_toml
from app.telemetry.traces import NOWHERE, Traces

log = logging.getLogger("ratchet.api")
GRACE_S = 0.5
"""What the commits of answers that were cut off get; with RATCHET_DRAIN_S unset the whole stop stays under two seconds."""


@dataclass(frozen=True, kw_only=True)
class Collaborators:
    """Everything the service needs from outside; tests hand in fakes."""

    inbox: Inbox
    routes: Routes
    engines: GatewayEngines
    policies: Mapping[str, PolicyConfig]
    keys: Keys
    episodes: Episodes
    ledger: Ledger
    reads: Reads
    actor_salt: str
    claims: Claims
    session_secrets: Callable[[], Sequence[str]]
    """Newest first; they sign and check the keys of sessions."""
    answers: Inbox | None = None
    """Where exposures and turns of our own go; the inbox where there is nothing else."""
    spooled_bytes: Callable[[], int] = lambda: 0
    """What of them waits on this machine's disk."""
    alone: bool = False
    """Only this machine reaches the service, by no proxy either: it is open until the first key is made."""
    clock: Clock = utc_now
    limits: Limits = field(default_factory=Limits)
    known_for: timedelta | None = Retention().horizon
    """How long the deployment knows an event again."""
    checks: Mapping[str, Check] = field(default_factory=dict[str, Check])
    notes: Mapping[str, Check] = field(default_factory=dict[str, Check])
    """Told by `/health` beside the checks, without making the service unwell."""
    routers: Sequence[APIRouter] = ()
    """Of other rooms: releases, console."""
    readings: Readings | None = None
    """What the database knows of the loop, for `/metrics`."""
    skew_s: Callable[[], float] = lambda: 0.0
    """This machine's clock ahead of the database's."""
    version: str = ""
    """Of this code, as metrics tell it."""
    contact: Contact = field(default_factory=Contact)
    """With the database."""
    barrier: Barrier = field(default_factory=Barrier)
    people: PeopleBook | None = None
    turn_away: TurnAway | None = None
    """Answers who opens a page without being signed in."""
    traces: Traces = NOWHERE


def create_app(with_: Collaborators) -> Application:
    """The ASGI application. Reads the keys; everything else waits for the first request."""
    metrics = Metrics(with_.readings, version=with_.version, contact=with_.contact)
    metrics.instruments.ready = True
    metrics.skew_s.set_function(with_.skew_s)
    access = Access(with_.keys, clock=with_.clock, sessions=Sessions(with_.session_secrets), people=with_.people, alone=with_.alone)
    access.load()
    intake = Intake(with_.limits)
    metrics.in_flight_bytes.set_function(lambda: intake.in_flight)
    metrics.spooled_bytes.set_function(with_.spooled_bytes)
    redactor = Redactor(lambda kind: metrics.redacted.labels(kind).inc())
    desk = Desk(policies=with_.policies, redactor=redactor, actor_salt=with_.actor_salt, clock=with_.clock, limits=with_.limits)
    workshop = Workshop()
    door = Door(inbox=with_.inbox, desk=desk, ledger=with_.ledger, metrics=metrics, workshop=workshop)
    counter = Counter(access=access, intake=intake, door=door)
    gateway = Gateway(
        inbox=with_.answers or with_.inbox, routes=with_.routes, engines=with_.engines, policies=with_.policies,
        conversations=Conversations(with_.episodes), redactor=redactor, metrics=metrics, clock=with_.clock, limits=with_.limits,
        actor_salt=with_.actor_salt, claims=with_.claims, workshop=workshop,
        tokens=FeedbackTokens(with_.session_secrets), traces=with_.traces,
        shadows=Shadows(with_.engines, with_.routes, metrics),
    )  # fmt: skip
    return build(
        access=access,
        barrier=with_.barrier,
        chat=ChatRoute(access=access, intake=intake, gateway=gateway),
        events=EventsRoute(access=access, intake=intake, door=door, known_for=with_.known_for),
        turn_away=with_.turn_away,
        routers=[
            feedback.router(counter),
            langfuse.router(counter),
            mlflow.router(counter),
            phoenix.router(counter),
            otel.router(counter),
            areal.router(counter, gateway.conversations.last_inference),
            probes(checks=with_.checks, metrics=metrics, notes=with_.notes),
            observations.router(with_.ledger),
            engines.router(reads=with_.reads, engines=with_.engines, clock=with_.clock),
            views(reads=with_.reads, routes=with_.routes, policies=with_.policies, clock=with_.clock),
            *with_.routers,
        ],
    )


class ApiServer(Server):
    """A server that says when it is ready, and that records running turns before it stops."""

    def __init__(self, config: uvicorn.Config, *, chat: ChatRoute, ready: str, drain_s: float) -> None:
        super().__init__(config)
        self._chat = chat
        self._drain_s = drain_s
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        log.info(self._ready)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no new connection, give running answers their time, end the others as aborted, commit all of them, then close."""
        for server in self.servers:
            server.close()
        await self._chat.finish(drain_s=self._drain_s, grace_s=GRACE_S)
        await super().shutdown(sockets)


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises `BadConfig` where the service must not start."""
    adapters = wiring.http_adapters(settings)
    try:
        people = adapters.people.ever()
        refuse_open_door(settings, keyed=people or bool(adapters.keys.all()), ever=people or adapters.keys.ever())
        with listen(settings) as listener:
            _run(settings, adapters, listener)
    finally:
        adapters.close(patience_s=settings.drain_s)


def _run(settings: Settings, adapters: wiring.HttpAdapters, listener: socket.socket) -> None:
    app = application(settings, adapters)
    config = uvicorn.Config(
        app, http=Connection, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1, backlog=2048
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn raises the signal again when it is done: then it must not kill us
    settle()
    ready = f"api ready address=http://{settings.host}:{settings.port} policies={','.join(adapters.policies)} ingest={settings.ingest}"
    ApiServer(config, chat=app.chat, ready=ready, drain_s=settings.drain_s).run(sockets=[listener])


COLLECTED_FROM = 50_000
"""Objects made and kept before the collector looks: what one body may hold (`Limits.nodes`) is read and freed without it. From Python's own
700 on it went through everything that is alive at every fourth large body, 5 ms in which nobody is answered."""


def settle() -> None:
    """Make this process one that serves: threads hand over soon, and the collector leaves what is loaded alone, for it stays."""
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()
    gc.set_threshold(COLLECTED_FROM)


def refuse_open_door(settings: Settings, *, keyed: bool, ever: bool) -> None:
    """Without a key nobody gets in from outside, and where none was ever made this machine may do everything. Raises `BadConfig`."""
    reached = settings.reached_by
    if reached is not None:
        wiring.refuse_weak_secrets(settings)
    if keyed:
        return
    if reached is not None:
        raise BadConfig(
            f"{reached}, so other machines reach this service, and there is no API key that is good: run `ratchet keys create "
            "--break-glass --name ops --scope admin` on this machine first, or set RATCHET_HOST=127.0.0.1 and no other names"
        )
    if ever:
        log.warning("api closed: every API key is expired or revoked, so nobody gets in; `ratchet keys create --break-glass` makes one")
    else:
        log.warning(
            "api open: no API key exists, so every process of this machine may do everything; `ratchet people first` closes the door"
        )


def listen(settings: Settings) -> socket.socket:
    """The listening socket. Raises `BadConfig` where the address is taken or not ours."""
    try:
        return bound(settings.host, settings.port)
    except OSError as error:
        raise BadConfig(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror}): set RATCHET_PORT to a free port or stop what uses it"
        ) from error


def application(settings: Settings, adapters: wiring.HttpAdapters) -> Application:
    """The application of a deployment."""
    return create_app(_collaborators(settings, adapters))


def _collaborators(settings: Settings, adapters: wiring.HttpAdapters) -> Collaborators:
    async def ingestion() -> None:
        if said := await asyncio.to_thread(adapters.ingestion_troubles):
            raise Unavailable("; ".join(said))

    async def database() -> None:
        await asyncio.to_thread(adapters.contact.asked, Part.DATABASE, adapters.reads.ping)

    async def control_plane() -> None:
        if (said := adapters.contact.sentence()) is not None:
            served = ", ".join(f"{policy} {digest}" for policy, digest in adapters.routes.champions().items()) or "nothing yet"
            raise Unavailable(f"{said}: what is served is the last that was heard of and may be old ({served})")

    traces = wiring.tracing(settings, "api")
    room = releases.ReleaseRoom(
        desk=wiring.release_desk(settings, traces=traces), releases=wiring.release_ledger(settings), views=wiring.release_views(settings)
    )
    hooks = webhooks.WebhookRoom(
        webhooks=wiring.webhook_book(settings), send_test=wiring.courier(settings).send_test, allow_loopback=settings.reached_by is None,
        policies=adapters.policies,
    )  # fmt: skip
    keyring = keys.router(wiring.key_book(settings), rotate=partial(wiring.rotate_session_secret, settings), policies=adapters.policies)
    desk = wiring.sign_in(settings)
    crowd = people.router(
        people.PeopleRoom(people=adapters.people, keys=adapters.keys, desk=desk, policies=adapters.policies, address=settings.address)
    )
    forms = FormTokens(wiring.session_secrets(settings))
    keeper = Doorkeeper(forms)
    secure = settings.address.startswith("https:")
    entrance = Entrance(desk, provider=wiring.oidc(settings), forms=forms, read_form=read_form, keeper=keeper, secure=secure)
    pages = Pages(
        adapters.pages, desk=room.desk, jury=wiring.jury(settings), readings=wiring.reading_book(settings),
        live=Live(adapters.pages, still_may=keeper.still_lets_in),
        visitor_of=lambda request: request.state.visitor, left_of=lambda actor: wiring.traces(settings).find(actor),
        hands=_hands(settings, adapters), kept=retention(read_toml(settings.config)),
    )  # fmt: skip
    guarded = APIRouter(dependencies=[Depends(keeper)])
    guarded.include_router(pages.router())
    return Collaborators(
        inbox=adapters.inbox, answers=adapters.answers, routes=adapters.routes, engines=adapters.engines, policies=adapters.policies,
        keys=adapters.keys,
        traces=traces, spooled_bytes=lambda: adapters.answers.held_bytes if adapters.answers is not None else 0,
        episodes=adapters.episodes, ledger=adapters.reads, reads=adapters.reads,
        readings=wiring.readings(settings), skew_s=wiring.clock(settings).skew_s, version=wiring.release_of_code(),
        actor_salt=wiring.actor_salt(settings), session_secrets=wiring.session_secrets(settings),
        alone=settings.reached_by is None,
        claims=adapters.claims, notes={"ingestion": ingestion, "control_plane": control_plane},
        contact=adapters.contact, known_for=retention(read_toml(settings.config)).horizon,
        checks={"database": database, "engines": adapters.check_engines},
        routers=[
            releases.router(room), webhooks.router(hooks), keyring, crowd, *_mending(settings, adapters), static(), entrance.router(),
            guarded,
        ],
        people=adapters.people, turn_away=entrance.turn_away,
        barrier=Barrier(
            hosts=settings.hosts | reached_as(settings.host), origins=settings.origins, loopback=settings.host in LOOPBACK
        ),
    )  # fmt: skip


def _hands(settings: Settings, adapters: wiring.HttpAdapters) -> Hands:
    """What pages do to keys, people and stored data."""
    return Hands(
        people=adapters.people, keys=adapters.keys, requests=wiring.requests(settings), letters=wiring.dead_letters(settings),
        rules=wiring.rule_book(settings, ""), replays=wiring.replay_book(settings),
        store=cache(lambda: wiring.effect_store(settings)), pseudonym_of=partial(wiring.pseudonym_of, settings),
        forget=partial(wiring.forget, settings), rotate=partial(wiring.rotate_session_secret, settings), policies=adapters.policies,
        address=settings.address, clock=wiring.clock(settings),
    )  # fmt: skip


def _mending(settings: Settings, adapters: wiring.HttpAdapters) -> list[APIRouter]:
    """What people do to stored data."""
    clock = wiring.clock(settings)
    letters = dead_letters.LetterRoom(
        letters=wiring.dead_letters(settings), store=cache(lambda: wiring.effect_store(settings)),
        note=partial(wiring.write_audit, settings), clock=clock,
    )  # fmt: skip
    forgetting = erasures.ErasureRoom(
        pseudonym_of=partial(wiring.pseudonym_of, settings), forget=partial(wiring.forget, settings),
        left_of=lambda pseudonym: wiring.traces(settings).find(pseudonym), sweep=lambda: wiring.sweep_segments(settings),
        note=partial(wiring.write_audit, settings),
    )  # fmt: skip
    paid = rules.RuleRoom(rules=wiring.rule_book(settings, ""), policies=adapters.policies, clock=clock)
    return [dead_letters.router(letters), erasures.router(forgetting), rules.router(paid)]


def main() -> None:
    """`python -m app.main`; what a person can act on ends in one sentence and exit code 2."""
    keep_to_owner()
    try:
        settings = from_environment()
        configure("api", settings.log_level, form=settings.log_format)
        serve(settings)
    except RatchetError as error:
        sys.stderr.write(f"ratchet: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
