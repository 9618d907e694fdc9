"""Keeps on one server of other make (vLLM, SGLang) what the deployment wants there, and reports to the ledger only what was seen to answer
as it should.

Two ways, one per server:

    adapters   the server keeps its base; every wanted version is loaded as an adapter beside the others (champion, canary, what may come
               back). For versions trained as LoRA, which are published with one.
    in place   the server holds one version at a time, whole, and follows a role: `champion`, `candidate` or `previous`. The usual
               deployment has a server for the champion and one for the candidate, which holds the previous champion between candidates.

every second: wanted (ledger) ─▶ load or replace ─▶ probe: these weights? its own log-probabilities? ─▶ report ready, or put back

A rollback is a load like every other. Whatever fails leaves the server with what it had.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from json import loads
from pathlib import Path
from typing import Any

from safetensors import safe_open

from app.contact import Contact, Part
from app.domain.errors import BadInput, RatchetError, Refused
from app.domain.ports import EngineLedger, EngineState, WeightStore
from app.policy.scoring.fixed_probe import Expected, expected, not_arrived, strange
from app.policy.storage.snapshot import ADAPTER, ADAPTER_CONFIG, WEIGHTS, verify_snapshot
from app.serving.servers.control import Control, Pause
from app.serving.servers.doubts import doubt
from app.serving.servers.held import UNVERSIONED, Held, Place

log = logging.getLogger(__name__)

ORDER = {
    "champion": ("champion",), "candidate": ("candidate", "previous"), "previous": ("previous", "candidate"),
    "held": ("held", "previous", "candidate"),
}  # fmt: skip
"""By a server's role, what it holds where there is that, else the next."""
RETRY_S = 30.0
"""A version that failed is tried again after this long."""
LINGER_S = 1.5
"""Between saying that a version leaves and replacing it: gateways know who holds what up to half a second late."""


@dataclass(frozen=True, kw_only=True)
class Resident:
    """A version as it was seen to answer on this server."""

    wanted: Expected
    measured: tuple[float, ...]
    """Of the fixed probe, by the server."""
    doubt: str | None
    """Why its turns are not trained on."""


class KeptServer:
    """One server and the weights it may be given; probes are remembered by digest."""

    def __init__(self, control: Control, weights: WeightStore) -> None:
        self.control = control
        self.weights = weights
        self.seen: dict[str, Resident] = {}
        self._expected: dict[str, Expected] = {}

    def expected(self, digest: str) -> Expected:
        """What the version says of the fixed text. Raises `NotFound`."""
        if digest not in self._expected:
            self._expected[digest] = expected(self.weights.path(digest))
        return self._expected[digest]

    def look(self, digest: str, place: Place, *, came_from: str | None = None) -> Resident:
        """Probe a version that the server says it holds. Raises `Refused` where it answers with other weights."""
        wanted = self.expected(digest)
        measured = tuple(self.control.score(place, wanted.tokens))
        fault = strange(measured, wanted)
        before = self.seen.get(came_from or "")
        if fault is None and before is not None:
            fault = not_arrived(before.measured, measured, before.wanted, wanted)
        if fault is not None:
            raise Refused(f"{self.control.url} says it holds {digest[:12]}, but {fault}")
        found = Resident(wanted=wanted, measured=measured, doubt=doubt(self.control, place))
        if found.doubt is not None:
            log.error("version not logged for training digest=%s: %s", digest, found.doubt)
        self.seen[digest] = found
        return found


class Residency:
    """What both ways share: failures are remembered, reported and tried again later."""

    def __init__(
        self,
        server: KeptServer,
        ledger: EngineLedger,
        *,
        only: frozenset[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        contact: Contact | None = None,
    ) -> None:
        self._server = server
        self._control = server.control
        self._ledger = ledger
        self._only = only
        """Policies that this server serves; all of them where None."""
        self.contact = contact or Contact()
        """With the ledger."""
        self._clock = clock
        self._failed: dict[str, tuple[float, str]] = {}

    def _wanted(self) -> dict[str, list[str]]:
        """Policies by digest: two may start from the same base."""
        said = self.contact.asked(Part.DATABASE, self._ledger.wanted)
        wanted: dict[str, list[str]] = {}
        for policy, digest in sorted(said):
            if self._only is None or policy in self._only:
                wanted.setdefault(digest, []).append(policy)
        return wanted

    def _report(self, policies: Sequence[str], digest: str, state: EngineState, detail: str | None = None) -> None:
        for policy in policies:
            self._ledger.report(policy, digest, state, detail)

    def _waits(self, digest: str) -> bool:
        return digest in self._failed and self._clock() - self._failed[digest][0] < RETRY_S

    def _fail(self, policies: Sequence[str], digest: str, error: RatchetError) -> None:
        log.error("version failed to load digest=%s error=%s", digest, error)
        self._failed[digest] = (self._clock(), str(error))
        self._report(policies, digest, EngineState.FAILED, str(error))

    def _resident(self, digest: str, held: Held, *, came_from: str | None = None) -> Resident:
        place = held.place(digest, self._control.url)
        assert place is not None
        return self._server.seen.get(digest) or self._server.look(digest, place, came_from=came_from)


class Adapters(Residency):
    """Every wanted version beside the others, on the base that the server was started with."""

    def turn(self) -> None:
        """One round. Raises `Unavailable` while the server or the ledger does not answer."""
        wanted, held = self._wanted(), self._control.held()
        if any(held.place(digest, self._control.url) is None for digest in self._server.seen):  # it was started anew
            self._server.seen.clear()
        for digest, policies in wanted.items():
            if self._waits(digest):
                self._report(policies, digest, EngineState.FAILED, self._failed[digest][1])
                continue
            try:
                found = self._bring(digest, policies, held)
            except RatchetError as error:
                self._fail(policies, digest, error)
            else:
                self._failed.pop(digest, None)
                self._report(policies, digest, EngineState.READY, found.doubt)
        for digest in sorted(held.adapters - set(wanted)):
            if digest in self._server.seen:  # loaded by us; what others loaded is theirs
                self._control.unload_adapter(digest)
                del self._server.seen[digest]

    def _bring(self, digest: str, policies: Sequence[str], held: Held) -> Resident:
        if held.place(digest, self._control.url) is not None:
            return self._resident(digest, held, came_from=held.base_digest)
        self._report(policies, digest, EngineState.LOADING)
        folder = self._server.weights.path(digest)
        require_adapter(folder, digest, base=held.base_digest)
        self._control.load_adapter(digest, folder)
        try:
            place = Place(url=self._control.url, model=digest, label=held.version, adapter=True)
            return self._server.look(digest, place, came_from=held.base_digest)
        except RatchetError:
            self._control.unload_adapter(digest)
            raise


class InPlace(Residency):
    """One version at a time, the whole weights, by role."""

    def __init__(
        self, server: KeptServer, ledger: EngineLedger, *, policy: str, role: str = "champion", pause: Pause = Pause.KEEP,
        linger_s: float = LINGER_S, clock: Callable[[], float] = time.monotonic, contact: Contact | None = None,
    ) -> None:  # fmt: skip
        super().__init__(server, ledger, only=frozenset({policy}), clock=clock, contact=contact)
        self._policy = policy
        self._role = role
        self._pause = pause
        self._linger_s = linger_s

    def turn(self) -> None:
        """One round. Raises `Unavailable` while the server or the ledger does not answer."""
        held = self._control.held()
        now = held.base_digest
        wanted = self._wanted()
        goal = self._goal(now, wanted)
        if goal is not None and goal != now and not self._waits(goal):
            try:
                self._swap(goal, held)
            except RatchetError as error:
                self._fail([self._policy], goal, error)
            held = self._control.held()
            now = held.base_digest
        elif goal is not None and goal != now:
            self._report([self._policy], goal, EngineState.FAILED, self._failed[goal][1])
        if now is not None and now in wanted:
            self._confirm(now, held)

    def _goal(self, now: str | None, wanted: Mapping[str, Sequence[str]]) -> str | None:
        """What this server should hold. Only the champion's server leaves a wanted version that nobody else is ready with."""
        roles = self._ledger.roles(self._policy)
        order = ORDER[self._role]
        goals = [digest for role in order for digest in roles.get(role, ())]
        if not goals:
            return None
        others = set(self._ledger.addresses(str(now))) - {f"{self._control.scheme}{self._control.url}"}
        alone = now in wanted and not others
        return now if alone and self._role != "champion" and now not in roles.get("previous", ()) else goals[0]

    def _swap(self, goal: str, held: Held) -> None:
        folder = self._server.weights.path(goal)
        if verify_snapshot(folder) != goal:
            raise BadInput(f"{folder} does not hold the weights {goal[:12]}: publish the version again")
        now = held.base_digest
        if now is None:
            raise Refused(f"{self._control.url} does not say which weights it has: start it with --served-model-name DIGEST of a version")
        before = self._server.weights.path(now)
        require_same_shapes(before, folder)
        with suppress(Refused):  # answers otherwise than its digest says: all the more reason to load another
            self._resident(now, held)
        self._report([self._policy], now, EngineState.DROPPED, f"makes room for {goal[:12]}")
        self._report([self._policy], goal, EngineState.LOADING)
        time.sleep(self._linger_s)
        started = self._clock()
        self._control.replace_weights(goal, folder, back_to=(now, before), pause=self._pause)
        try:
            self._server.look(goal, Place(url=self._control.url, model=held.base, label=goal), came_from=now)
        except RatchetError:
            self._control.replace_weights(now, before, back_to=None, pause=self._pause)
            raise
        log.info("version replaced digest=%s before=%s swap_s=%.2f", goal, now, self._clock() - started)
        self._failed.pop(goal, None)

    def _confirm(self, now: str, held: Held) -> None:
        if self._waits(now):
            self._report([self._policy], now, EngineState.FAILED, self._failed[now][1])
            return
        if held.version == UNVERSIONED:  # just started, perhaps anew: what was seen before is of another process
            self._control.label(now)
            self._server.seen.clear()
        try:
            found = self._resident(now, held)
        except Refused as error:
            self._fail([self._policy], now, error)
            self._control.replace_weights(now, self._server.weights.path(now), back_to=None, pause=self._pause)
        else:
            self._failed.pop(now, None)
            self._report([self._policy], now, EngineState.READY, found.doubt)


def require_adapter(folder: Path, digest: str, *, base: str | None) -> None:
    """Raises `Refused` unless the snapshot has an adapter, whole, that lies on the base the server has."""
    if not (folder / ADAPTER_CONFIG).is_file():
        raise Refused(
            f"{digest[:12]} is a whole model: keep it on a server with `ratchet engine --vllm URL --in-place` (or --sglang URL), or start "
            f"one with --served-model-name {digest} on {folder}"
        )
    stated: dict[str, Any] = loads((folder / ADAPTER_CONFIG).read_text()).get("ratchet", {})
    if stated.get("sha256") != sha256((folder / ADAPTER).read_bytes()).hexdigest():
        raise BadInput(f"the adapter in {folder} is damaged: publish the version again")
    if stated.get("base") != base:
        raise Refused(
            f"{digest[:12]} is an adapter on {str(stated.get('base'))[:12]} and this server has {str(base)[:12]}: start it with that "
            "version as its model and --served-model-name"
        )


def require_same_shapes(before: Path, after: Path) -> None:
    """Raises `Refused` where two snapshots are not of one architecture: names, shapes and dtypes, from the files' headers."""
    old, new = _header(before), _header(after)
    if old != new:
        odd = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        raise Refused(
            f"{after.name[:12]} has other tensors than {before.name[:12]} ({', '.join(odd[:3])}): start a server of its own on it"
        )


def _header(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    with safe_open(folder / WEIGHTS, framework="pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        return {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in slices.items()}


def keep_versions(residency: Adapters | InPlace, *, stop: threading.Event, every_s: float = 1.0) -> None:
    """Keep one server as the ledger wants it until `stop` is set; a server or database that is away is waited for."""
    is_told = False
    while not stop.is_set():
        try:
            residency.turn()
            is_told = False
        except RatchetError as error:
            if not is_told and not residency.contact.silences():
                log.warning("residency waits error=%s", error)
            is_told = True
        stop.wait(every_s)
