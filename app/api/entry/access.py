"""Who is asking: API keys, personal tokens, browser sessions; scopes, roles, rate limits.

A service that only its own machine reaches is open until the first key is made, and refuses what a proxy brings. Whether it is,
is decided once, when it starts; from the first key on it is closed for good: a key that expires or is revoked opens nothing.
"""

import asyncio
import base64
import binascii
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Protocol, TypeVar

from starlette.requests import HTTPConnection

from app.api.entry import feedback_tokens
from app.api.entry.feedback_tokens import FEEDBACK_PREFIX, Answered, FeedbackTokens
from app.api.entry.rates import SPENDING, Bucket
from app.api.entry.sessions import RATE_PER_S, SESSION_PREFIX, Sessions
from app.api.entry.uses import Uses
from app.api.workshop import FEW, Share
from app.domain.access import ApiKey, Scope, split_key
from app.domain.errors import RatchetError, Unavailable
from app.domain.people import DEPLOYMENT_WIDE, MAY, OF_SCOPE, PERSONAL, Action, Person, Visitor, actions_of, actions_of_scopes
from app.domain.ports import Clock, Keys
from app.domain.telemetry.events import GATEWAY
from app.listening.errors import HttpError
from app.listening.headers import Headers

log = logging.getLogger("ratchet.api")
T = TypeVar("T")
REFRESH_S = 1.0
"""A revoked key stops working within this time plus one database read."""
WAIT_S = 2.0
"""A request waits for keys read longer ago than this: an idle service must not honour a revoked key once more."""
PATIENCE_S = 1.0
"""And so long for them, once: until the database answers again nobody else does."""
TRUST_S = 60.0
"""How long the last known keys are good while the database does not answer."""
MOST_SESSIONS = 10_000
"""Sessions whose rate is kept in mind; beyond, the one that was silent longest starts with a full bucket again."""


EVERYBODY = Share(line="")
"""On an open deployment nobody is told from anybody."""


class PeopleBook(Protocol):
    """Who is who."""

    def ever(self) -> bool: ...
    def of_session(self, secret: str) -> Person | None: ...
    def of_token(self, key_id: str) -> Person | None: ...


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who is asking, as far as a key says so."""

    name: str
    """`key:<prefix>`, or `anonymous` on an open loopback deployment."""
    scopes: frozenset[Scope]
    policy: str | None
    """The one policy the key is good for."""
    key: str = ""
    """Prefix of the key that is sent, or with which the session was started; empty on an open deployment and for browsers."""
    actor: str = "anonymous"
    """How what it does is signed: `user:<name>` for a person, `service:<name of the key>` for a program."""
    person: Person | None = None
    """Who is signed in, or whom a personal token speaks for."""
    episode_id: str | None = None
    """Set for a session token of `/rl/start_session`."""
    source: str = GATEWAY
    """Of the turns that are asked for: a session may be a rollout's."""
    bucket: "Bucket | None" = field(default=None, compare=False)
    session_bucket: "Bucket | None" = field(default=None, compare=False)
    """Of the session alone; `bucket` is then its parent's."""
    share: Share = field(default=EVERYBODY, compare=False)
    """Of the work beside the loop: a key's, or that of one of the many sessions and answers for which it spoke."""

    @property
    def actions(self) -> frozenset[Action]:
        """Everything it may do, by the one table of roles and actions."""
        if self.person is not None:
            return actions_of(self.person.roles)
        return OPEN if self is ANONYMOUS else actions_of_scopes(self.scopes)

    def visitor(self, csrf: str = "") -> Visitor:
        """As pages and endpoints ask about it."""
        return Visitor(actor=self.actor, actions=self.actions, policy=self.policy, person=self.person, csrf=csrf)


BY_PROXIES = frozenset({b"forwarded", b"via", b"x-real-ip"})
"""Headers with which proxies say for whom they ask; and `x-forwarded-…`."""
OPEN = frozenset(Action) - {Action.MANAGE_PEOPLE}
"""What everybody may do on an open loopback deployment: all but say who people are."""
PEOPLE_SCOPES = frozenset({Scope.READ})
"""Of the endpoints that ask for a scope: people read them, and products do the rest."""
ANONYMOUS = Caller(name="anonymous", scopes=frozenset(Scope), policy=None)


class Access:
    """Checks keys against a snapshot of the stored ones, refreshed in a thread once a second."""

    def __init__(
        self,
        keys: Keys,
        *,
        clock: Clock,
        sessions: Sessions,
        people: PeopleBook | None = None,
        alone: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._people = people
        self._alone = alone
        self.open = False
        """Everybody may do everything: only this machine can ask, and no key was ever made nor anybody added."""
        self._clock = clock
        self._sessions = sessions
        self._session_buckets: OrderedDict[str, Bucket] = OrderedDict()
        self._monotonic = monotonic
        self._by_prefix: dict[str, tuple[ApiKey, Caller]] = {}
        self._buckets: dict[str, Bucket] = {}
        self._read_at = float("-inf")
        self._tried_at = float("-inf")
        self._refreshing: asyncio.Task[None] | None = None
        self._away = False
        """The last read failed, or is late."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="keys")
        """Reads keys for everybody, and so waits behind nobody's report."""
        self._uses = Uses(keys, clock=clock, thread=self._thread)

    def load(self) -> bool:
        """Read the keys now, and decide whether the service is open; whether there is any key to get in with."""
        self.open = self._alone and not self._ever()
        self._take_over(self._keys.all())
        return bool(self._by_prefix)

    async def caller(self, headers: Headers, scope: Scope, *, cost: int = 1) -> Caller:
        """Who is asking, allowed to do `scope`. Raises `HttpError` 401 and 403, `Overloaded`."""
        caller = await self.identify(headers)
        return self.permit(caller, scope, cost=cost)

    async def identify(self, headers: Headers) -> Caller:
        """Who is asking, whatever for."""
        await self._look(headers)
        token = _token(headers)
        if token is not None and token.startswith(SESSION_PREFIX):
            return self._session(token)
        if self.open:
            return ANONYMOUS
        key, caller = self._check(token)
        found = caller if key.person_id is None else await self._personal(key, caller)
        self._uses.note(key)
        return found

    async def _look(self, headers: Headers) -> None:
        """The keys as they are, and nobody through a proxy while there are none. Raises `HttpError` 403."""
        if self._monotonic() - self._tried_at > REFRESH_S:
            await self._refresh()
        if self.open:
            _refuse_proxied(headers)

    async def reread(self) -> None:
        """Read the keys now: whoever was just given one uses it at once."""
        await self._read()

    async def signed_in(self, session: str) -> Caller | None:
        """Who is signed in with this browser session, read at every request; None for one that has ended."""
        if self._people is None:
            return None
        person = await asyncio.to_thread(self._people.of_session, session)
        return None if person is None else _of_person(person, name=f"session of {person.name}", policy=person.policy)

    async def _personal(self, key: ApiKey, caller: Caller) -> Caller:
        """Whom a token speaks for, read at every request: what a person may do, and whether, changes at once."""
        person = None if self._people is None else await asyncio.to_thread(self._people.of_token, key.id)
        if person is None:
            raise _unauthorized("this token has ended: `ratchet login` makes another")
        if None not in (person.policy, key.policy) and person.policy != key.policy:
            raise _unauthorized(f"this token is for {key.policy}, and {person.name} is there for {person.policy}: make another")
        return _of_person(person, name=caller.name, policy=person.policy or key.policy, bucket=caller.bucket)

    def _ever(self) -> bool:
        return self._keys.ever() or (self._people is not None and self._people.ever())

    def permit(self, caller: Caller, scope: Scope, *, cost: int = 1) -> Caller:
        """The caller again, when it has the scope and is within its rate."""
        if not scope.is_within(caller.scopes):
            has = ", ".join(sorted(caller.scopes)) or "none"
            raise HttpError(403, f"this key has the scopes {has}, not {scope.value}: create one with --scope {scope.value}", code="scope")
        return self._charged(caller, cost)

    def _charged(self, caller: Caller, cost: int) -> Caller:
        buckets = [bucket for bucket in (caller.session_bucket, caller.bucket) if bucket is not None]
        if (spending := SPENDING.get()) is not None:
            spending.buckets = buckets
        for bucket in buckets:
            if cost:
                bucket.take(cost)
        return caller

    def allow(self, caller: Caller, action: Action) -> Caller:
        """The caller again, when it may do that and is within its rate. Raises `HttpError` 403 with who may."""
        if not caller.visitor().may(action):
            raise HttpError(403, why_not(caller, action), code="role" if caller.person else "scope")
        return self._charged(caller, 1)

    async def answered(self, headers: Headers) -> tuple[Answered, Caller] | None:
        """The answer that a feedback token is about and who may speak of it; None where another key is sent, or none.

        Raises `HttpError` 401 for a token that is not ours or whose time is over, `Overloaded`.
        """
        token = _token(headers)
        if token is None or not token.startswith(FEEDBACK_PREFIX):
            return None
        await self._look(headers)
        answered = FeedbackTokens(self._sessions.secrets).read(token, now=self._clock())
        if answered is None:
            raise _unauthorized("this feedback token was not issued here or has ended: it rates the answer it came with, for a week")
        if answered.parent and not self._is_good(answered.parent):
            raise _unauthorized("the key with which this answer was asked for has ended, and what speaks for it with it")
        share = Share(line=f"answers of {answered.parent or answered.policy}", member=answered.answer, most=FEW)
        bucket = self._bucket_of(answered.answer, feedback_tokens.RATE_PER_S)
        caller = Caller(name=f"answer {answered.answer}", scopes=frozenset(), policy=answered.policy, bucket=bucket, share=share)
        return answered, self._charged(caller, 1)

    def _is_good(self, prefix: str) -> bool:
        """Whether the key is neither revoked nor over."""
        known = self._by_prefix.get(prefix)
        return known is not None and known[0].usable_at(self._clock())

    def session_token(self, episode_id: str, caller: Caller, *, source: str = GATEWAY) -> tuple[str, datetime]:
        """A key with which the caller's agent samples one episode, and when it ends."""
        return self._sessions.issue(episode_id, parent=caller.key, now=self._clock(), source=source)

    def _session(self, token: str) -> Caller:
        """Who asks with a session's key: its parent, for one episode and for sampling only, while the parent is good."""
        session = self._sessions.read(token, now=self._clock())
        known = self._by_prefix.get(session.parent) if session else None
        if session is None or (known is None and (session.parent or not self.open)):
            raise _unauthorized("this session key was not issued here or has ended: POST /rl/start_session again")
        if known is not None and not (known[0].usable_at(self._clock()) and Scope.SAMPLE.is_within(known[0].scopes)):
            raise _unauthorized("the key that this session was started with has ended: POST /rl/start_session with another")
        if known is not None:
            self._uses.note(known[0])
        parent = ANONYMOUS if known is None else known[1]
        return replace(
            parent, name=f"session of {parent.name}", scopes=frozenset({Scope.SAMPLE}), episode_id=session.episode,
            source=session.source, session_bucket=self._bucket_of(session.episode),
            share=Share(line=f"sessions of {parent.name}", member=session.episode, most=FEW),
        )  # fmt: skip

    def _bucket_of(self, what: str, rate_per_s: float = RATE_PER_S) -> Bucket:
        """Of an episode, or of the feedback about an answer."""
        bucket = self._session_buckets.pop(what, None) or Bucket(rate_per_s, self._monotonic)
        self._session_buckets[what] = bucket
        if len(self._session_buckets) > MOST_SESSIONS:
            self._session_buckets.popitem(last=False)
        return bucket

    def _check(self, token: str | None) -> tuple[ApiKey, Caller]:
        if token is None:
            raise _unauthorized("no API key: send `Authorization: Bearer rk_…` (create one with `ratchet keys create`)")
        parts = split_key(token)
        known = self._by_prefix.get(parts[0]) if parts else None
        if known is None or parts is None or not known[0].matches(parts[1]) or not known[0].usable_at(self._clock()):
            raise _unauthorized("this API key is wrong, expired or revoked: see `ratchet keys list`")
        return known

    def _caller(self, key: ApiKey) -> Caller:
        name = f"key:{key.prefix}"
        return Caller(
            name=name, key=key.prefix, scopes=key.scopes, policy=key.policy, actor=f"service:{key.name}", bucket=self._buckets.get(key.id),
            share=Share(line=name),
        )  # fmt: skip

    def _bucket(self, key: ApiKey) -> Bucket | None:
        """The bucket it has, or a full one: a new read of the keys must not fill the buckets."""
        if key.rate_per_s is None:
            return None
        return self._buckets.get(key.id) or Bucket(key.rate_per_s, self._monotonic)

    async def _refresh(self) -> None:
        """Start a read of the keys; wait for it where the last one is old, as after a quiet time. A busy service never waits."""
        age_s = self._monotonic() - self._read_at
        if self._refreshing is None or self._refreshing.done():
            self._tried_at = self._monotonic()
            self._refreshing = asyncio.create_task(self._read())
        if age_s > WAIT_S:
            await asyncio.wait({self._refreshing}, timeout=0.0 if self._away else PATIENCE_S)
            self._away = self._away or not self._refreshing.done()
        if self._monotonic() - self._read_at > TRUST_S:
            raise Unavailable("the keys cannot be read: check the database")

    async def _read(self) -> None:
        try:
            if self.open:
                self.open = not await self._beside(self._ever)
            self._take_over(await self._beside(self._keys.all))
            self._away = False
            self._uses.write_soon()
        except RatchetError as error:
            self._away = True
            log.warning("keys_unreadable error=%s", error)

    async def _beside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _take_over(self, keys: list[ApiKey]) -> None:
        self._buckets = {key.id: bucket for key in keys if (bucket := self._bucket(key)) is not None}
        self._by_prefix = {key.prefix: (key, self._caller(key)) for key in keys}
        self._uses.know(keys)
        self._read_at = self._tried_at = self._monotonic()


def requires(what: Scope | Action) -> Callable[[HTTPConnection], "object"]:
    """A FastAPI dependency: the `Caller`, when it may do that. Scopes are asked for by what products use, actions by everything else."""

    async def dependency(connection: HTTPConnection) -> Caller:
        access: Access = connection.app.state.access
        headers = dict(connection.scope["headers"])
        if isinstance(what, Scope):
            caller = await access.caller(headers, what)
        else:
            caller = access.allow(await access.identify(headers), what)
        connection.state.caller = caller
        return caller

    return dependency


def _of_person(person: Person, *, name: str, policy: str | None, bucket: Bucket | None = None) -> Caller:
    return Caller(
        name=name, scopes=PEOPLE_SCOPES, policy=policy, actor=person.actor, person=person, bucket=bucket, share=Share(line=person.actor)
    )


def why_not(caller: Caller, action: Action) -> str:
    """Why somebody may not do that, and who may."""
    who = ", ".join(sorted(MAY[action])) or "products alone, with keys of their own"
    bound = " of all policies" if caller.policy is not None and action in DEPLOYMENT_WIDE else ""
    if caller.person is not None:
        return f"{caller.person.name} is {', '.join(sorted(caller.person.roles))}, and {action.value} is for {who}{bound}: ask an admin"
    if action in PERSONAL:
        return f"{action.value} takes a person ({who}), and this is a program's key, which speaks for nobody: `ratchet login` as yourself"
    scopes = " or ".join(scope.value for scope, actions in OF_SCOPE.items() if action in actions)
    return f"this key has the scopes {', '.join(sorted(caller.scopes)) or 'none'}; {action.value} takes {scopes}{bound}: create one with it"


def _refuse_proxied(headers: Headers) -> None:
    """A proxy in front of an open service would make everybody who reaches it an operator. Raises `HttpError` 403."""
    if any(name in BY_PROXIES or name.startswith(b"x-forwarded") for name in headers):
        message = (
            "a proxy brought this, and the service is open because only its own machine is meant to reach it: make a key "
            "(`ratchet people first`, or `ratchet keys create`), and set RATCHET_PUBLIC_URL or RATCHET_HOSTS to its name"
        )
        raise HttpError(403, message, code="open")


def _token(headers: Headers) -> str | None:
    """The key of a request: Bearer, x-api-key, or the password of Basic (as Langfuse's clients and browsers send it)."""
    plain = headers.get(b"x-api-key") or headers.get(b"authorization")
    if plain is None:
        return None
    kind, _, rest = plain.decode("latin-1").partition(" ")
    if kind.lower() == "basic":
        return _password(rest)
    return rest.strip() if kind.lower() == "bearer" else plain.decode("latin-1")


def _password(basic: str) -> str:
    try:
        return base64.b64decode(basic, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _unauthorized(message: str) -> HttpError:
    return HttpError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": 'Basic realm="ratchet"'})
