"""Keeps resident what is wanted: makes new versions beside the serving thread, drops what nobody wants, reports both to the ledger.

every POLL_S: wanted (ledger) ─▶ make what is missing, one at a time ─▶ verified, probed ─▶ worker.add ─▶ report ready
                              └▶ unwanted for `linger_s` ─▶ worker.drop (drains) ─▶ report dropped

A version that descends from one that is resident is made from that (`app.policy.patching`): what changed is unpacked, changed and packed
again, and what will be multiplied is unpacked once more for its digest; then the fixed probe is asked, and what it samples is scored too
unless that was found true of the base. Where any of that fails, and where nothing it descends from is here, it is loaded whole. Answers
under way keep their version; while `COPIES` are resident and one of them only finishes its answers, nothing new is made.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from app.contact import Contact, Part
from app.domain.errors import BadInput, RatchetError, Unavailable
from app.domain.ids import utc_now
from app.domain.ports import EngineLedger, EngineState, EngineWeights
from app.policy.decoding.invariance import TEXTS, Invariance, invariance
from app.policy.model import Policy, load_policy
from app.policy.patching import follow
from app.policy.precision import Precision
from app.serving.heads import EVERY_S, Heads
from app.serving.memory import return_holes
from app.serving.probe import MAX_KL, Mismatch, answers_strangely, mismatch, probe
from app.serving.worker import Worker

log = logging.getLogger(__name__)

EXPECTED = (RatchetError, OSError)
"""Errors that say in a sentence what is wrong; any other is a bug, or comes of files that this version's libraries do not know."""
POLL_S = 0.25
"""Between two looks at what is wanted. A version waits for the engine that looks last: of three, three quarters of this on average."""
RETRY_S = 10.0
"""A version that failed to load is tried again after this long."""
COPIES = 3
"""Versions in memory from which on a new one waits for one that is leaving."""
ROUTED_S = 2.0
"""Gateways read their route up to a second late: a version that nobody wants is kept so long at least."""
NICER = 10
"""How much more the making of a version yields than sampling does: at 5 the slowest answers took up to twice as long meanwhile."""
REPORT_EVERY_S = 3.0
"""How often an unchanged state is repeated, so that the ledger knows the engine lives."""


class Residency:
    """The loading thread of an engine."""

    def __init__(
        self,
        worker: Worker,
        ledger: EngineLedger,
        weights: EngineWeights,
        *,
        load: Callable[..., Policy] = load_policy,
        precision: Precision = Precision.BF16,
        check: Callable[[Policy], str | None] = probe,
        only: frozenset[str] | None = None,
        poll_s: float = POLL_S,
        linger_s: float = 5.0,
        retry_s: float = RETRY_S,
        report_every_s: float = REPORT_EVERY_S,
        heads_every_s: float = EVERY_S,
        brought: Callable[[float], None] = lambda seconds: None,
        freed: Callable[[], object] = return_holes,
        contact: Contact | None = None,
    ) -> None:
        self._worker = worker
        self._ledger = ledger
        self._weights = weights
        self._load = load if precision is Precision.BF16 else partial(load, precision=precision)
        self.precision = precision
        """What versions are rounded to before they are served."""
        self._heads = Heads(worker, weights, every_s=heads_every_s)
        self._mismatches: dict[str, Mismatch] = {}
        self._check = check
        """Says what is wrong with a version's log-probabilities."""
        self._only = only
        """Policies this engine serves; all of them where None."""
        self._freed = freed
        """Called when versions have left."""
        self._brought = brought
        """Hears how many seconds a version took from wanted to ready."""
        self.contact = contact or Contact()
        """With the ledger, and with where the weights come from."""
        self._poll_s = poll_s
        self._retry_s = retry_s
        self._report_every_s = report_every_s
        self._linger_s = linger_s
        """A version is dropped this long after it was last wanted, for somebody may want it once more."""
        self._states: dict[str, tuple[EngineState, str | None]] = {}
        self._wanted_at: dict[str, float] = {}
        self._failed_at: dict[str, float] = {}
        self._policies: dict[str, set[str]] = {}
        """Names per digest: two policies may start from the same base."""
        self._reported: dict[tuple[str, str], tuple[EngineState, float]] = {}
        self._reporting = threading.RLock()
        """States and what was told of them: a version that is fetched for minutes must not make an engine silent for as long."""
        self._left = 0
        """Versions that left, of which it was told."""
        self.last_swap: dict[str, Any] | None = None
        """The newest version that was taken up: which, when, and what it cost."""
        self.invariance: Invariance | None = None
        """Whether this machine computes the same bits whatever else is in the batch; asked of the first version."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-residency", daemon=True)
        self._telling = threading.Thread(target=self._tell, name="engine-reports", daemon=True)

    def start(self) -> None:
        """Begin polling."""
        self._thread.start()
        self._telling.start()

    def close(self) -> None:
        """Stop polling; a load in progress is abandoned with the process."""
        self._stop.set()
        for thread in (self._thread, self._telling):
            thread.join(timeout=2)

    @property
    def alive(self) -> bool:
        """Whether the thread runs; when it does not (a bug of ours), nothing new is taken up, and the process has to be started again."""
        return self._thread.is_alive()

    def states(self) -> dict[str, tuple[EngineState, str | None]]:
        """State and detail per digest, as last known."""
        return dict(self._states)

    def mismatches(self) -> dict[str, Mismatch]:
        """How far each version that is served rounded is from what was published, by digest."""
        return dict(self._mismatches)

    def drafters(self) -> dict[str, dict[str, Any]]:
        """By version and drafter: what was drafted and drawn."""
        return self._heads.said()

    def _run(self) -> None:
        with suppress(OSError):  # of this thread alone; whatever threads it starts inherit it
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICER)
        while not self._stop.is_set():
            with suppress(RatchetError):  # the ledger does not answer, which is noted: keep serving what is here
                self.contact.asked(Part.DATABASE, self.turn)
            self._stop.wait(self._poll_s)

    def _tell(self) -> None:
        """Repeat what is held while the other thread makes a version."""
        while not self._stop.wait(self._report_every_s):
            try:
                self._report_all()
            except RatchetError as error:
                self.contact.lost(Part.DATABASE, str(error))

    def turn(self) -> None:
        """One round: load, drop, report."""
        now = time.monotonic()
        wanted = {(policy, digest) for policy, digest in self._ledger.wanted() if self._only is None or policy in self._only}
        for policy, digest in wanted:
            self._policies.setdefault(digest, set()).add(policy)
            self._wanted_at[digest] = now
        missing = [digest for digest in sorted({digest for _, digest in wanted}) if self._missing(digest, now)]
        self._leave(now, room=bool(missing) and self._worker.copies > 1)
        for digest in missing:
            if self._stop.is_set():
                return
            if not (self._worker.is_dropping and self._worker.copies >= COPIES):
                self._bring(digest)
        for digest, (state, _) in list(self._states.items()):
            if state is EngineState.READY and digest in self._worker.digests:
                self._heads.look(digest)
        if self._worker.freed > self._left:
            self._left = self._worker.freed
            self._freed()
        if all(self._worker.holds(digest) for _, digest in wanted):
            self.contact.let_go(Part.STORAGE)
        self._report_all()

    def _leave(self, now: float, *, room: bool) -> None:
        """Drop what nobody wants; sooner where another version needs the `room`."""
        linger_s = min(self._linger_s, ROUTED_S) if room else self._linger_s
        for digest, (state, _) in list(self._states.items()):
            if state in (EngineState.READY, EngineState.FAILED) and now - self._wanted_at[digest] >= linger_s:
                self._worker.drop(digest)
                self._settle(digest, EngineState.DROPPED, "nobody wants it any more")

    def _missing(self, digest: str, now: float) -> bool:
        state = self._states.get(digest, (None, None))[0]
        if state is EngineState.FAILED:
            return now - self._failed_at[digest] >= self._retry_s
        return state is not EngineState.READY

    def _bring(self, digest: str) -> None:
        """Load, verify and hand over one version; a failure is recorded, reported and retried later."""
        self._settle(digest, EngineState.LOADING, None)
        started = time.monotonic()
        try:
            policy, fault, way = self._patched(digest) or self._loaded(digest)
            self._measure(policy)
            self.contact.heard(Part.STORAGE)
        except Exception as error:  # whatever its files make a library raise, the others are served on
            if isinstance(error, Unavailable):
                self.contact.lost(Part.STORAGE, str(error))
            self._failed_at[digest] = time.monotonic()
            why = _told(error)
            log.error("version failed to load digest=%s error=%s", digest, why, exc_info=not isinstance(error, EXPECTED))
            self._settle(digest, EngineState.FAILED, why)
            return
        pause_s = self._worker.add(policy, logged=fault is None)
        if fault is not None:
            log.error("version not logged for training digest=%s: %s", digest, fault)
        took_s = time.monotonic() - started
        log.info("version ready digest=%s way=%s took_s=%.1f", digest, way, took_s)
        self.last_swap = {
            "digest": digest, "at": utc_now().isoformat(), "way": way, "took_s": round(took_s, 3), "pause_ms": round(1e3 * pause_s, 3),
            **({} if digest not in self._mismatches else {"mismatch": asdict(self._mismatches[digest])}),
        }  # fmt: skip
        self._brought(took_s)
        self._settle(digest, EngineState.READY, fault)

    def _measure(self, policy: Policy) -> None:
        """How far a rounded version is from what was published: known, told, and left to the update's guard to judge."""
        if (found := mismatch(policy)) is None:
            return
        self._mismatches[policy.digest] = found
        is_far = found.kl > MAX_KL
        log.log(
            logging.WARNING if is_far else logging.INFO, "version rounded digest=%s precision=%s mismatch_kl=%.4f p99=%.3f tokens=%d%s",
            policy.digest, policy.precision, found.kl, found.p99, found.tokens,
            ": an update holds what it samples, unless training.guards allows that" if is_far else "",
        )  # fmt: skip

    def _loaded(self, digest: str) -> tuple[Policy, str | None, str]:
        """The version from its snapshot, what is wrong with its log-probabilities, and how it came."""
        policy = self._load(self._weights.path(digest), digest=digest)
        if self.invariance is None:
            self.invariance = found = invariance(policy, texts=TEXTS[:3], tokens=4)
            said = "is" if found.holds else "is not"
            log.info(
                "sampling %s bit-invariant here differing=%d compared=%d dtype=%s",
                said, found.differing_bits, found.compared, str(policy.model.dtype).removeprefix("torch."),
            )  # fmt: skip
        return policy, self._check(policy), "load"

    def _patched(self, digest: str) -> tuple[Policy, str | None, str] | None:
        """The same from a resident version it descends from; None where there is none, or that went wrong."""
        try:
            way = self._weights.way(digest, self._worker.digests)
            if way is None:
                return None
            policy = follow(self._worker.policy(way.base), way, digest=digest)
            # what its trainer wrote down is of the published weights: rounded ones are measured, and their live bits were checked
            if self.precision is Precision.BF16 and way.probe is not None and (fault := answers_strangely(policy, way.probe)) is not None:
                raise BadInput(fault)
            # a fixed text is scored and not sampled: whoever samples wrongly for the base does so for what is made of it
            sound = way.probe is not None and self._states.get(way.base) == (EngineState.READY, None)
            return policy, None if sound else self._check(policy), "patch"
        except Unavailable:  # nor is it loaded whole from a storage that does not answer
            raise
        except Exception as error:  # noqa: BLE001 - it is loaded whole then, and whatever is wrong with it shows there
            log.warning("version not patched, it is loaded whole digest=%s error=%s", digest, _told(error))
            return None

    def _settle(self, digest: str, state: EngineState, detail: str | None) -> None:
        with self._reporting:
            self._states[digest] = (state, detail)
            self._report(digest)

    def _report_all(self) -> None:
        with self._reporting:
            for digest in list(self._states):
                self._report(digest)

    def _report(self, digest: str) -> None:
        """Tell the ledger, at once when the state changed, else every few seconds; a dropped version is told once and forgotten."""
        state, detail = self._states[digest]
        for policy in tuple(self._policies.get(digest, ())):
            told, at = self._reported.get((policy, digest), (None, 0.0))
            if told is state and time.monotonic() - at < self._report_every_s:
                continue
            self._ledger.report(policy, digest, state, detail)
            self._reported[(policy, digest)] = (state, time.monotonic())
        if state is EngineState.DROPPED:
            for policy in self._policies.pop(digest, set()):
                self._reported.pop((policy, digest), None)
            del self._states[digest]
            self._mismatches.pop(digest, None)
            self._heads.forget(digest)


def _told(error: Exception) -> str:
    """Why a version failed, in a sentence of ours or with the kind of an error that nobody expected."""
    if isinstance(error, EXPECTED):
        return str(error)
    return f"its files cannot be read here ({type(error).__name__}: {error}): publish a version that `load_policy` reads, or correct them"
