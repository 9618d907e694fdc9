"""What happens in the demo, in order, and what each part waits for.

```
 part        | begins                         | ends when
 ------------|--------------------------------|---------------------------------------------------------------
 starting    | the processes                  | the service is well
 measuring   | held-out people ask (panel 1)  | (goes on in the background)
 learning    | everybody asks                 | two candidates were promoted (each approved over REST)
 comparing   | held-out people ask (panel 2)  | enough of their answers by the last champion are labelled
 harming     | a damaged version is planted   | it was taken back and traffic has left it
```

Each part also ends when the demo's time is up; what did not happen then is in the summary and in the exit code.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from app.domain.cycles import CycleStatus
from app.domain.gates import GateName
from app.domain.ids import utc_now
from app.domain.releases import IN_FLIGHT, Release, ReleaseState
from app.domain.views import Operations, difference
from pipelines.commands.demonstration.narrator import Narrator
from pipelines.commands.demonstration.operator import Operator
from pipelines.commands.demonstration.outcome import PROMOTIONS_PROMISED, Harm, Outcome
from pipelines.commands.demonstration.profiles import Profile
from pipelines.commands.demonstration.screen import Screen
from pipelines.commands.demonstration.sight import Sight, look
from pipelines.commands.deployment import Deployment
from pipelines.supervisor import Program, Supervisor

POLICY = "composer"
LOOK_EVERY_S = 1.0
SHARE_FOR_COMPARING = 0.9
"""Of the panel's answers: some people are in the holdback or get no reaction labelled in time."""
QUIET_AFTER_ROLLBACK_S = 4.0
"""Routes are read afresh every second; after this long without a request nobody is on the planted version."""


class TimeIsUp(Exception):
    """The demo's budget is spent."""


@dataclass(kw_only=True)
class Story:
    """The demo's director."""

    deployment: Deployment
    profile: Profile
    supervisor: Supervisor
    screen: Screen
    outcome: Outcome
    seed: int
    deadline: float
    """Monotonic seconds."""
    stopping: Callable[[], bool]
    """Whether somebody pressed Ctrl-C."""
    operations: Operations | None = None
    shares: tuple[float, ...] = (0.05, 0.25, 0.50)
    _narrator: Narrator = field(default_factory=Narrator)
    _asked: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    _last: Sight | None = None
    _quiet: bool = False

    def __post_init__(self) -> None:
        self._operator = Operator(self.deployment.url)

    def tell(self, operations: Operations) -> None:
        """Run every part. Raises `TimeIsUp`, `KeyboardInterrupt`."""
        self.operations = operations
        with self._timed("start"):
            self.screen.phase = "the processes start"
            self._wait(lambda _: self._all_ready() and self._operator.is_well())
        sight = self._look()
        assert sight.pointer is not None
        first = sight.pointer.digest
        self.outcome.first = sight.names[first]
        self._people("people", "--concurrency", str(self.profile.concurrency), "--seed", str(self.seed))
        self._panel("panel-before")
        self._learn()
        last = self._compare(first)
        self._harm(last)

    # --- parts

    def _learn(self) -> None:
        self.screen.phase = "people use the product; every slot tries to learn from it"
        self.screen.say("thousands of simulated developers ask, keep, edit, revert and complain; held-out ones only measure")
        with self._timed("learning"):
            self._wait(lambda sight: len(sight.champions) >= PROMOTIONS_PROMISED)
        self.supervisor.end("loop")
        self.screen.say(f"{PROMOTIONS_PROMISED} candidates were promoted; training rests while the demo measures")

    def _compare(self, first: str) -> str:
        """Held-out people ask the last champion; returns its digest."""
        self.screen.phase = "held-out people ask the last champion held-out questions"
        sight = self._look()
        assert sight.pointer is not None
        last, wanted = sight.pointer.digest, int(self.profile.panel_turns * SHARE_FOR_COMPARING * (1 - sight.pointer.holdback))
        self.outcome.last = sight.names[last]
        self._panel("panel-after")
        with self._timed("comparing"):
            self._wait(lambda sight: len(sight.panel(last)) >= wanted)
        sight = self._look()
        self.outcome.persistence = difference(sight.panel(first), sight.panel(last))
        self.outcome.dissatisfied = difference(sight.panel_dissatisfied(first), sight.panel_dissatisfied(last))
        self.outcome.lengths = difference(sight.panel_lengths(first), sight.panel_lengths(last))
        self.outcome.anchor_budget_used = self._anchor_budget_used(sight)
        return last

    def _harm(self, champion: str) -> None:
        self.screen.phase = "a harmful candidate is planted on purpose"
        self.screen.say("now the demo plants a damaged version, and forces it past the offline gates, which would have refused it")
        with self._timed("planting"):
            release_id = self._plant()
        with self._timed("catching"):
            self._wait(lambda sight: _find(sight, release_id).state not in IN_FLIGHT)
        ended = time.monotonic()
        self._wait(lambda _: time.monotonic() - ended >= QUIET_AFTER_ROLLBACK_S)
        self.outcome.harm = self._harm_done(_find(self._look(), release_id))
        back = self._last is not None and self._last.pointer is not None and self._last.pointer.digest == champion
        self.screen.say("everybody is served by the champion again" if back else "the champion is not what it was")

    def _harm_done(self, release: Release) -> Harm:
        assert self.operations is not None
        exposed = self.operations.exposed(release.digest)
        decided = release.changed_at
        began, last = exposed.first_at or decided, exposed.last_at or decided
        return Harm(
            version=release.version_name, state=release.state.value, reason=release.reason, requests=exposed.requests,
            people=exposed.people, people_meanwhile=exposed.people_meanwhile, units=exposed.units,
            detect_s=(decided - began).total_seconds(), roll_back_s=max(0.0, (last - decided).total_seconds()),
        )  # fmt: skip

    def _anchor_budget_used(self, sight: Sight) -> list[float]:
        """Of each promoted version, oldest first: the share of its budget of divergence from the anchor, as the health gate recorded it."""
        assert self.operations is not None
        promoted = {version.digest for version in sight.champions}
        made = [release for release in reversed(sight.releases) if release.digest in promoted]
        health = [gate for release in made for gate in self.operations.gates(release.id) if gate.gate == GateName.TRAINING_HEALTH]
        return [float(gate.evidence["anchor_budget_used"]) for gate in health]

    # --- steps

    def _all_ready(self) -> bool:
        """Whether every process has said so: people who came earlier would take the cores that the others start on."""
        logs = [self.deployment.logs / f"{program.name}.log" for program in self.deployment.programs()]
        return all(log.exists() and " ready " in log.read_text(errors="replace") for log in logs)

    def _plant(self) -> str:
        planting = subprocess.Popen(
            [sys.executable, "-m", "pipelines.commands.demonstration.plant", POLICY], env=dict(self.deployment.environment),
            stdout=subprocess.PIPE, stderr=(self.deployment.logs / "plant.log").open("ab"), text=True,
        )  # fmt: skip
        self._wait(lambda _: planting.poll() is not None)
        told = planting.communicate()[0].split()
        if planting.returncode != 0 or not told:
            raise RuntimeError(f"planting failed with exit code {planting.returncode}: see {self.deployment.logs / 'plant.log'}")
        return told[-1]

    def _people(self, name: str, *options: str) -> None:
        command = (
            sys.executable, "-m", "pipelines.simulation", "--url", self.deployment.url, "--policy", POLICY,
            "--max-tokens", str(self.profile.max_tokens), "--horizons", self.profile.horizons,
            "--ledger", str(self.deployment.logs / f"{name}.accepted"), *options,
        )  # fmt: skip
        self.supervisor.add(Program(name=name, command=command, environment=self.deployment.environment, once="--turns" in options))
        self.supervisor.start(name)

    def _panel(self, name: str) -> None:
        seed = self.seed if name == "panel-before" else self.seed + 1
        turns, at_once = str(self.profile.panel_turns), str(max(4, self.profile.concurrency // 2))
        self._people(name, "--panel", "--turns", turns, "--concurrency", at_once, "--seed", str(seed))

    def _approve(self, sight: Sight) -> None:
        """Approve what is READY, once per evidence."""
        for release in sight.releases:
            bound = (release.id, release.evidence_digest or "")
            planted = "planted" in release.version_name
            if release.state is ReleaseState.READY and bound not in self._asked and not planted:
                self._asked.add(bound)
                for sentence in self._operator.approve(release):
                    self.screen.say(sentence)

    def _pace(self, sight: Sight) -> None:
        """A quiet hour for as long as an update or an offline suite computes on the same cores as the engine."""
        busy = any(cycle.status is CycleStatus.RUNNING for cycle in sight.cycles)
        if busy != self._quiet and "people" in self.supervisor.processes:
            self._quiet = busy
            for name in ("people", "panel-before"):
                self.supervisor.signal(name, signal.SIGUSR1 if busy else signal.SIGUSR2)
            self.screen.say("a quiet hour: these cores compute the update now" if busy else "everybody is back at work")

    # --- waiting

    def _wait(self, done: Callable[[Sight], bool]) -> None:
        """Look, show, tell, repair and approve, until it is done."""
        while not done(self._look()):
            if self.stopping():
                raise KeyboardInterrupt
            if time.monotonic() > self.deadline:
                raise TimeIsUp
            time.sleep(LOOK_EVERY_S)

    def _look(self) -> Sight:
        assert self.operations is not None
        for crash in self.supervisor.check():
            self.screen.say(f"{crash} (log: {self.deployment.logs / crash.name}.log)")
        sight = look(self.operations, POLICY, utc_now(), self._last)
        for sentence in self._narrator.tell(sight, self.shares):
            self.screen.say(sentence)
        self._approve(sight)
        self._pace(sight)
        self.outcome.promoted = [version.name for version in sight.champions]
        self.screen.sampled = self._sampled(sight)
        self.screen.update(sight)
        self._last = sight
        return sight

    def _sampled(self, sight: Sight) -> tuple[int, int]:
        live = sight.pointer.digest if sight.pointer is not None else ""
        eligible = sum(label.version == live and label.exclusion is None for label in sight.labels)
        return min(eligible, self.profile.min_turns), self.profile.min_turns

    def _timed(self, name: str) -> "_Timed":
        return _Timed(self.outcome, name)

    def last_sight(self) -> Sight | None:
        """The newest look, for the summary."""
        return self._last

    def close(self) -> None:
        """Close the operator's connection."""
        self._operator.close()


@dataclass
class _Timed:
    """Adds the wall time of a block to the outcome's stages, also when the block is left early."""

    outcome: Outcome
    name: str
    began: float = 0.0

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.outcome.stages_s[f"wall, {self.name}"].append(time.monotonic() - self.began)


def _find(sight: Sight, release_id: str) -> Release:
    return next(release for release in sight.releases if release.id == release_id)
