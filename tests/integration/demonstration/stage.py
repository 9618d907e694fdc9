"""A stage for the demo: its database, weights, service, people, operator and planter are real; loop, watch and labels are played.

A deployment needs minutes for an update, a canary and the labels of hundreds of answers. Here a thread does in the database what they
would have done, as soon as what they wait for is there.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from io import StringIO
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from rich.console import Console
from sqlalchemy import insert

from app import wiring
from app.api.releases import ReleaseRoom, router
from app.db.engine import writing
from app.db.release.pointer import SqlRoutes
from app.db.tables import exposures
from app.domain.ids import utc_now
from app.domain.learning.cycles import Cycle, CycleStatus
from app.domain.release.gates import GateName
from app.domain.release.releases import IN_FLIGHT, Release, ReleaseState
from app.domain.release.versions import VersionKind
from app.main import create_app
from app.policy.tiny import write_tiny
from app.settings import Settings, from_environment, owner_of, read_toml
from pipelines.commands.demo import Stage
from pipelines.commands.demonstration.planning import Plan, Speed, cycle_parts, last_parts
from pipelines.commands.demonstration.profiles import PROFILES, write_config
from pipelines.commands.demonstration.screen import Screen
from pipelines.commands.demonstration.story import PANEL_AFTER, PANEL_BEFORE, POLICY, Rhythm
from pipelines.commands.running.deployment import PROCESSES, Deployment
from pipelines.config import loop_config
from pipelines.evaluation.config import terms_of
from pipelines.simulation.diary import Diary
from pipelines.supervisor import Program
from tests.fakes.gateway import ScriptedEngines, collaborators, serving
from tests.fakes.releases import answer, deployed
from tests.integration.batching.rows import add_turn

PANEL_TURNS = 8
SPEED = Speed(cores=2, answers_per_s=100.0, turn_s=0.01)
USED = 0.25
"""Share of the anchor's budget that every candidate of the played loop used."""
NOTED = "echo $$ > {logs}/{name}.pid; echo ' ready version ready'; exec sleep 600"


@dataclass(frozen=True, kw_only=True)
class Played(Deployment):
    """Its processes say that they are ready and do nothing."""

    broken: tuple[str, ...] = ()
    """These end at once."""

    def programs(self) -> list[Program]:
        """Under the names of the real ones."""
        commands = {name: "exit 3" if name in self.broken else NOTED.format(logs=self.logs, name=name) for name in PROCESSES}
        return [Program(name=name, command=("/bin/sh", "-c", text), environment=self.environment) for name, text in commands.items()]


@dataclass(kw_only=True)
class Backstage:
    """What loop, watch and labeller do."""

    settings: Settings
    logs: Path
    candidates: list[str]
    """Digests in the store that the loop makes one after the other."""
    likes: Mapping[str, Sequence[float]]
    """By digest, what held-out people keep of the answers."""
    at_once: int = 1
    """Candidates that one process of the loop makes before it is started again; a real one needs a slot for each."""
    fails: bool = False
    """The offline gates refuse every candidate."""
    trained_beside: list[bool] = field(default_factory=list[bool])
    """Whether the loop's process ran, at every label of a later panel."""

    def __post_init__(self) -> None:
        terms = terms_of(loop_config(read_toml(self.settings.config)).gates, owner=owner_of(self.settings.config))
        self.desk, self.ledger = wiring.release_desk(self.settings, terms=terms), wiring.release_ledger(self.settings)
        self.state, self.versions, self.cycles = (
            wiring.open_state(self.settings), wiring.version_book(self.settings), wiring.cycle_book(self.settings),
        )  # fmt: skip
        self._cycle: Cycle | None = None
        self._labelled: set[tuple[str, int]] = set()
        self._slot = 0
        self._made: Counter[int] = Counter()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """In a thread; what goes wrong there is raised at the end."""
        stop, wrong = threading.Event(), list[BaseException]()

        def work() -> None:
            try:
                while not stop.wait(0.02):
                    self._label()
                    self._watch()
                    if (process := self._process("loop")) is not None:
                        self._loop(process)
            except BaseException as error:  # noqa: BLE001 - the test has to see it
                wrong.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(30)
            self.state.dispose()
        if wrong:
            raise wrong[0]

    def _process(self, name: str) -> int | None:
        pid = self.logs / f"{name}.pid"
        told = pid.read_text().strip() if pid.exists() else ""
        return int(told) if told and psutil.pid_exists(int(told)) else None

    def _asked(self, name: str) -> int:
        return len(Diary(self.logs / f"{name}.diary").read()[0])

    def _label(self) -> None:
        for name in (PANEL_BEFORE, PANEL_AFTER, *(f"{PANEL_AFTER}-{n}" for n in (2, 3))):
            for entry in Diary(self.logs / f"{name}.diary").read()[0]:
                likes = self.likes.get(entry.version or "")
                if (name, entry.number) not in self._labelled and likes is not None:
                    self._labelled.add((name, entry.number))
                    if name != PANEL_BEFORE:
                        self.trained_beside.append(self._process("loop") is not None)
                    kept = likes[entry.number % len(likes)]
                    terms = [
                        {"name": "edit_persistence", "value": kept, "weight": 1.0, "detail": {"survival": kept}},
                        {"name": "follow_up", "value": kept - 0.5, "weight": 1.0, "detail": {}},
                    ]
                    add_turn(
                        self.state, f"{name}-{entry.number}", version=entry.version or "", segment="task=complete,tier=panel", terms=terms,
                        actor=entry.person,
                    )  # fmt: skip

    def _watch(self) -> None:
        for release in self.ledger.list(policy=POLICY, states=IN_FLIGHT):
            if release.state is ReleaseState.QUEUED:
                self.desk.start_canary(release.id)
            elif release.state is ReleaseState.CANARY and release.initiator == "user:demo-saboteur":
                self._harm(release)
                self.desk.abort(release.id, actor="system:watch", reason="people keep less of its answers")
            elif release.state is ReleaseState.CANARY:
                self.desk.mark_ready(release.id, answer(GateName.CANARY, release.digest))
            elif release.state is ReleaseState.APPROVED:
                self.desk.promote(self.desk.begin_promotion(release.id).id)

    def _harm(self, release: Release) -> None:
        """Three requests of two people were served by it, and two people by the champion meanwhile."""
        now = utc_now()
        for number, (person, digest) in enumerate(
            (("ada", release.digest), ("bob", release.champion_digest), ("eve", release.champion_digest), ("zoe", release.digest),
             ("ada", release.digest))
        ):  # fmt: skip
            row = {
                "id": f"x{number}", "policy": POLICY, "inference_id": f"x{number}", "episode_id": "e", "actor": person, "stage": "canary-0",
                "arm": "candidate", "probability": 0.5, "share": 0.5, "holdback": 0.0, "digest": digest, "release_id": release.id,
                "occurred_at": now + timedelta(milliseconds=number),
            }  # fmt: skip
            with writing(self.state) as connection:
                connection.execute(insert(exposures).values(row))

    def _loop(self, process: int) -> None:
        if self._cycle is not None:
            if self._asked(PANEL_BEFORE) >= PANEL_TURNS:
                self._trained(self._cycle)
                self._cycle = None
        elif self.candidates and self._made[process] < self.at_once and not self.ledger.list(policy=POLICY, states=IN_FLIGHT):
            self._slot, self._made[process] = self._slot + 60, self._made[process] + 1
            self._cycle = self.cycles.elect(POLICY, self._slot, owner="played", now=utc_now(), lease=timedelta(hours=1))

    def _trained(self, cycle: Cycle) -> None:
        digest, champion = self.candidates.pop(0), self.versions.find(POLICY, self.ledger.pointer(POLICY).digest)
        made = replace(
            champion, digest=digest, name=f"tiny-rl-s{self._slot // 60}", kind=VersionKind.RL, parent=champion.digest,
            step=champion.step + 1, created_at=utc_now(),
        )  # fmt: skip
        for step in ("batch", "train"):
            cycle = self.cycles.advance(cycle, step=step, changes={"timings": {**cycle.timings, step: 0.5}})
        self.versions.add(made)
        release = self.desk.start_offline(self.desk.open(made, initiator="system:loop").id)
        self.desk.record(release.id, replace(answer(GateName.TRAINING_HEALTH, digest), evidence={"anchor_budget_used": USED}))
        if self.fails:
            self.desk.stop(release.id, to=ReleaseState.REJECTED, reason="fewer of its answers parse")
        else:
            self.desk.record(release.id, answer(GateName.OFFLINE, digest))
            self.desk.queue(release.id)
        self.cycles.finish(cycle, status=CycleStatus.DONE, reason=None, now=utc_now())


@dataclass(frozen=True, kw_only=True)
class Theatre:
    """A stage with everybody behind it."""

    stage: Stage
    screen: Screen
    backstage: Backstage
    environment: dict[str, str]
    """Of every process that is started from now on."""

    @property
    def said(self) -> str:
        """Everything on the terminal."""
        file = self.screen.console.file
        assert isinstance(file, StringIO)
        return file.getvalue()


@contextmanager
def theatre(
    folder: Path, database: str, snapshot: Path, *, gains: Sequence[Sequence[float]] = ((0.8, 0.9),), promotions: int = 1, at_once: int = 1,
    fails: bool = False, patience: float = 1.0, candidates: int | None = None, broken: tuple[str, ...] = (), approvers: int = 1,
) -> Iterator[Theatre]:  # fmt: skip
    """A deployment in a folder that does not exist yet. `gains`: what people keep of each candidate; of the first version 0.1 or 0.2."""
    profile = replace(PROFILES["tiny"], model=str(snapshot), panel_turns=PANEL_TURNS, concurrency=4, patience=patience)
    environment = {
        **os.environ,
        "RATCHET_DATA": str(folder),
        "RATCHET_DATABASE_URL": database,
        "RATCHET_CONFIG": str(folder / "ratchet.toml"),
    }
    settings = from_environment(environment)
    first = deployed(settings, snapshot)
    config = write_config(replace(profile, patience=1.0), folder, slot_s=30)
    config.write_text(
        config.read_text().replace("approval = { n_in_doubt = 1 }", f"approval = {{ n = {approvers}, n_in_doubt = {approvers} }}")
    )
    weights = wiring.open_weights(settings)
    made = list[str]()
    for seed in range(1, 1 + (len(gains) if candidates is None else candidates)):
        write_tiny(folder / f"candidate-{seed}", seed=seed)
        made.append(weights.publish(folder / f"candidate-{seed}"))
    backstage = Backstage(
        settings=settings, logs=folder / "logs", candidates=list(made), likes={first: (0.1, 0.2), **dict(zip(made, gains, strict=False))},
        fails=fails, at_once=at_once,
    )  # fmt: skip
    room = ReleaseRoom(desk=backstage.desk, releases=backstage.ledger, views=wiring.release_views(settings))
    service = create_app(
        collaborators(
            routes=SqlRoutes(backstage.state), engines=ScriptedEngines(words=("    return", " None", "\n")), routers=[router(room)]
        )
    )
    with serving(service) as url:
        port = urlsplit(url).port
        assert port is not None
        deployment = Played(settings=replace(settings, port=port), environment=environment, engine_port=port, broken=broken)
        deployment.logs.mkdir()
        parts = (*cycle_parts(profile, SPEED) * promotions, *last_parts(profile, SPEED))
        stage = Stage(
            deployment=deployment, plan=Plan(profile=profile, promotions=promotions, parts=parts), speed=SPEED,
            rhythm=Rhythm(look_every_s=0.05, quiet_after_rollback_s=0.2),
        )  # fmt: skip
        screen = Screen(title="Ratchet", url=url, console=Console(file=StringIO(), width=400))
        with backstage.at_work():
            yield Theatre(stage=stage, screen=screen, backstage=backstage, environment=environment)
