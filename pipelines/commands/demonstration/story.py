"""What happens in the demo, in order, and what each part waits for.

```
 part        | begins                                   | ends when
 ------------|------------------------------------------|---------------------------------------------------------
 starting    | the processes that answer and listen     | the service is well; then loop and watch start, and people come
 learning    | everybody asks; while the first update   | a candidate was promoted (approved over REST), as many as
             | computes, held-out people ask the first  | were planned and there is time for
             | version (panel 1)                        |
 comparing   | they ask the last champion the very same | enough of their answers are labelled
             | questions (panel 2); meanwhile a damaged |
             | version is made and planted              |
 harming     | the damaged version answers some people  | it was taken back and traffic has left it
 learning on | the gain is not clear yet                | one more was promoted and compared, at half the error
```

Nothing ends by a clock (unless a person gave one: --minutes). A run in which nothing moves any more ends, and says where it stands still;
so does one whose candidates fail one after the other.
"""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from app.domain.errors import Refused
from app.domain.ids import utc_now
from app.domain.learning.cycles import CycleStatus
from app.domain.release.gates import GateName
from app.domain.release.releases import IN_FLIGHT, Release, ReleaseState
from app.domain.views.measures import difference
from app.domain.views.operations import Operations
from pipelines.commands.demonstration.comparing import pairs_of, typical
from pipelines.commands.demonstration.narrator import Narrator
from pipelines.commands.demonstration.operator import Operator
from pipelines.commands.demonstration.outcome import Harm, Outcome
from pipelines.commands.demonstration.planning import Forecast, Part, Plan, Speed, cycle_parts, last_parts
from pipelines.commands.demonstration.screen import Screen
from pipelines.commands.demonstration.sight import Sight, look
from pipelines.commands.demonstration.stillness import Stillness
from pipelines.commands.running.deployment import Deployment
from pipelines.simulation.diary import Diary, Entry
from pipelines.supervisor import Program, Supervisor

POLICY = "composer"
PANEL_BEFORE, PANEL_AFTER = "panel-before", "panel-after"
"""Processes: held-out people who ask the first version, and the last champion the same."""
SHARE_FOR_COMPARING = 0.75
"""Of the panel's answers: some people are in the holdback, meet the planted version, or get no reaction labelled in time."""
COMPARISONS, ERROR = 3, 0.05
"""How often a gain may be looked for at most, and the first interval's error; each further one has half of the one before, so that all
together are wrong in less than a tenth of all demos."""
MOST_REFUSALS = 10
"""Of one approval, a look apart: a service that restarts, or evidence that was taken again, is over by then."""
MOST_FAILURES = 5
"""Candidates in a row that do not pass: more of the same would say nothing new."""
FAILED = frozenset({ReleaseState.REJECTED, ReleaseState.ABORTED, ReleaseState.INCONCLUSIVE, ReleaseState.EXPIRED, ReleaseState.ROLLED_BACK})
LATER = ("loop", "watch")
"""Processes that start when the others have, on cores that those needed: nothing is there to learn from or to be watched before."""


class Ended(Exception):
    """The demo ends before its end; the message says at which part, and why."""


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """Seconds between looks, and at the end."""

    look_every_s: float = 1.0
    quiet_after_rollback_s: float = 4.0
    """Routes are read afresh every second; after this long without a request nobody is on the planted version."""


@dataclass(kw_only=True)
class Story:
    """The demo's director."""

    deployment: Deployment
    plan: Plan
    speed: Speed
    supervisor: Supervisor
    screen: Screen
    outcome: Outcome
    seed: int
    deadline: float | None
    """Monotonic seconds, where a person gave a limit."""
    target: float
    """Monotonic seconds; there is no second promotion that would end later."""
    stopping: Callable[[], bool]
    """Whether somebody pressed Ctrl-C."""
    shares: tuple[float, ...]
    """Of people, that a canary answers, stage by stage."""
    rhythm: Rhythm = Rhythm()
    operations: Operations | None = None
    _narrator: Narrator = field(default_factory=Narrator)
    _asked: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    _refused: "Counter[tuple[str, str]]" = field(default_factory=Counter[tuple[str, str]])
    _last: Sight | None = None
    _read: dict[str, int] = field(default_factory=dict[str, int])
    _compared: int = 0
    _planting: "subprocess.Popen[str] | None" = None

    def __post_init__(self) -> None:
        self._operator = Operator(self.deployment.url)
        self._stillness = Stillness(longest_s=self.plan.profile.patience * 300.0)
        self.forecast = Forecast(parts=list(self.plan.parts))
        self.screen.forecast, self.screen.shares = self.forecast, self.shares

    def tell(self, operations: Operations) -> None:
        """Run every part. Raises `Ended`, `KeyboardInterrupt`."""
        self.operations = operations
        self._begin(Part.START)
        self._wait(lambda _: self._all_ready() and self._operator.is_well())
        sight = self._look()
        assert sight.pointer is not None
        first = sight.pointer.digest
        self.outcome.first = sight.names[first]
        for name in LATER:
            self.supervisor.start(name)
        self._people("people", "--concurrency", str(self.plan.profile.concurrency), "--seed", str(self.seed))
        self._learn()
        self._plant()
        last = self._compare()
        self._harm(last)
        self._gain(first, last)
        while not self.outcome.is_clear and self._compared < COMPARISONS:
            self._learn_on()
            last = self._compare()
            self._gain(first, last)
        self.forecast.begin_anew([])

    # --- parts

    def _learn(self) -> None:
        self.screen.say("simulated developers ask, keep, edit, revert and complain; held-out ones only measure. Every slot tries to learn")
        wanted = 1
        while wanted <= self.plan.promotions:
            self._wait(lambda sight, wanted=wanted: self._follow(sight) and len(sight.champions) >= wanted)
            left = self.plan.promotions - wanted
            if left and self._now_left(left) > self.target - time.monotonic():
                self.screen.say("the next update would end later than planned on this machine: it is left out")
                break
            wanted += 1
        self._rest()

    def _learn_on(self) -> None:
        """One more promotion: the last one's gain may be chance."""
        found = self.outcome.persistence
        seen = "" if found is None else f" ({found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}])"
        self.screen.say(f"the gain is not clear yet{seen}: learning goes on from this champion")
        had = len(self._look().champions)
        self.forecast.begin_anew([*cycle_parts(self.plan.profile, self.speed), last_parts(self.plan.profile, self.speed)[0]])
        self.supervisor.start("loop")
        self._wait(lambda sight: self._follow(sight) and len(sight.champions) > had)
        self._rest()

    def _rest(self) -> None:
        self.supervisor.end("loop")
        self.screen.say("training rests while the demo measures what was learned")

    def _now_left(self, promotions: int) -> float:
        """Seconds until the end with so many more promotions, at the pace so far."""
        parts = [*cycle_parts(self.plan.profile, self.speed) * promotions, *last_parts(self.plan.profile, self.speed)]
        return sum(lasts for _, lasts in parts) * self.forecast.pace

    def _follow(self, sight: Sight) -> bool:
        """Keep forecast and screen at the part of the cycle that is under way. Raises `Ended` after too many failures."""
        failed = _failures(sight)
        if len(failed) >= MOST_FAILURES:
            reasons = "; ".join(f"{release.version_name} {release.state}: {release.reason}" for release in failed)
            raise Ended(f"{len(failed)} candidates in a row did not pass ({reasons})")
        part = _part_of(sight)
        if part is not Part.COLLECT and PANEL_BEFORE not in self.supervisor.processes:
            self._panel(PANEL_BEFORE, share=3)  # nobody waits for these answers while the update computes
        if not self.forecast.reach(part):
            left = max(1, self.plan.promotions - len(sight.champions))
            profile = self.plan.profile
            self.forecast.begin_anew([*cycle_parts(profile, self.speed) * left, *last_parts(profile, self.speed)])
            self.forecast.reach(part)
        self.screen.phase = part.value
        return True

    def _compare(self) -> str:
        """Held-out people ask the last champion; returns its digest."""
        self._begin(Part.COMPARE)
        sight = self._look()
        assert sight.pointer is not None
        last, wanted = sight.pointer.digest, int(self.plan.profile.panel_turns * SHARE_FOR_COMPARING * (1 - sight.pointer.holdback))
        self.outcome.last = sight.names[last]
        self._compared += 1
        self._panel(self._panel_after, share=1)
        self._wait(lambda sight: len(sight.panel(last)) >= wanted)
        return last

    @property
    def _panel_after(self) -> str:
        """The process of the newest comparison's people."""
        return PANEL_AFTER if self._compared < 2 else f"{PANEL_AFTER}-{self._compared}"

    def _gain(self, first: str, last: str) -> None:
        """What was learned: the same people and questions, before and after."""
        sight, error = self._look(), ERROR / 2 ** (self._compared - 1)
        self.outcome.persistence = difference(sight.panel(first), sight.panel(last), error=error)
        self.outcome.dissatisfied = difference(sight.panel_dissatisfied(first), sight.panel_dissatisfied(last), error=error)
        self.outcome.lengths = difference(sight.panel_lengths(first), sight.panel_lengths(last))
        self.outcome.anchor_budget_used = self._anchor_budget_used(sight)
        before, after = (self._diary(name).read()[0] for name in (PANEL_BEFORE, self._panel_after))
        self.outcome.pairs = typical(pairs_of(before, after, first=first, last=last))

    def _harm(self, champion: str) -> None:
        self._begin(Part.HARM)
        release_id = self._planted()
        self._wait(lambda sight: _find(sight, release_id).state not in IN_FLIGHT)
        ended = time.monotonic()
        self._wait(lambda _: time.monotonic() - ended >= self.rhythm.quiet_after_rollback_s)
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

    def _begin(self, part: Part) -> None:
        self.forecast.reach(part)
        self.screen.phase = part.value

    def _all_ready(self) -> bool:
        """Whether every process that people need has said so, and the engine holds the first version."""
        needed = {program.name: " ready " for program in self.deployment.programs() if program.name not in LATER} | {
            "engine": "version ready"
        }
        logs = {self.deployment.logs / f"{name}.log": said for name, said in needed.items()}
        return all(log.exists() and said in log.read_text(errors="replace") for log, said in logs.items())

    def _plant(self) -> None:
        """Begin to make the damaged version, in a process of its own; it tells the id of the release."""
        self.screen.say("now the demo plants a damaged version, and forces it past the offline gates, which would have refused it")
        command = [sys.executable, "-m", "pipelines.commands.demonstration.plant", POLICY]
        with (self.deployment.logs / "plant.log").open("ab") as log:
            environment = dict(self.deployment.environment)
            self._planting = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)

    def _planted(self) -> str:
        planting = self._planting
        assert planting is not None
        self._wait(lambda _: planting.poll() is not None)
        told = planting.communicate()[0].split()
        if planting.returncode != 0 or not told:
            raise RuntimeError(f"planting failed with exit code {planting.returncode}: see {self.deployment.logs / 'plant.log'}")
        return told[-1]

    def _people(self, name: str, *options: str) -> None:
        command = (
            sys.executable, "-m", "pipelines.simulation", "--url", self.deployment.url, "--policy", POLICY,
            "--max-tokens", str(self.plan.profile.max_tokens), "--horizons", self.plan.profile.horizons,
            "--ledger", str(self.deployment.logs / f"{name}.accepted"), "--diary", str(self._diary(name).path), *options,
        )  # fmt: skip
        self.supervisor.add(Program(name=name, command=command, environment=self.deployment.environment, once="--turns" in options))
        self.supervisor.start(name)

    def _panel(self, name: str, *, share: int) -> None:
        """Held-out people ask their questions: the same people and the same questions before and after."""
        turns, at_once = str(self.plan.profile.panel_turns), str(max(3, self.plan.profile.concurrency // share))
        self._people(name, "--panel", "--turns", turns, "--concurrency", at_once, "--seed", str(self.seed))

    def _diary(self, name: str) -> Diary:
        return Diary(self.deployment.logs / f"{name}.diary")

    def _approve(self, sight: Sight) -> None:
        """Approve what is READY, once per evidence. Raises `Ended` where that is refused again and again."""
        for release in sight.releases:
            bound = (release.id, release.evidence_digest or "")
            if release.state is ReleaseState.READY and bound not in self._asked and not _is_planted(release):
                try:
                    self.screen.say(self._operator.approve(release))
                    self._asked.add(bound)
                except Refused as refused:
                    self._refused[bound] += 1
                    if self._refused[bound] >= MOST_REFUSALS:
                        raise Ended(str(refused)) from refused

    # --- waiting

    def _wait(self, done: Callable[[Sight], bool]) -> None:
        """Look, show, tell, repair and approve, until it is done. Raises `Ended` and `KeyboardInterrupt`."""
        self._stillness.begin(time.monotonic())
        while not done(sight := self._look()):
            if self.stopping():
                raise KeyboardInterrupt
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise Ended(f"the time given with --minutes was over while: {self.screen.phase}")
            if (still := self._stillness.seen(sight, now=time.monotonic())) is not None:
                raise Ended(f"nothing has moved for {still:.0f} s while: {self.screen.phase}. {self._why_still()}")
            time.sleep(self.rhythm.look_every_s)

    def _why_still(self) -> str:
        down = self.supervisor.down()
        return f"{'Not running: ' + ', '.join(down) + '. ' if down else ''}The logs are in {self.deployment.logs}"

    def _look(self) -> Sight:
        assert self.operations is not None
        for crash in self.supervisor.check():
            self.screen.say(f"{crash} (log: {self.deployment.logs / crash.name}.log)")
        sight = look(self.operations, POLICY, utc_now(), self._last)
        for sentence in self._narrator.tell(sight, self.shares):
            self.screen.say(sentence)
        self._approve(sight)
        self._wait_of_people(sight)
        self.outcome.promoted = [version.name for version in sight.champions]
        if self.outcome.promoted and self.outcome.first_promotion_s is None:
            self.outcome.first_promotion_s = round(self.screen.elapsed_s, 1)
        self.screen.sampled = self._sampled(sight)
        self.screen.update(sight)
        self._last = sight
        return sight

    def _wait_of_people(self, sight: Sight) -> None:
        """How long people waited for their answers since the last look: while an update computes, and otherwise."""
        training = any(cycle.status is CycleStatus.RUNNING and cycle.step in ("elected", "batch") for cycle in sight.cycles)
        for name in ("people", PANEL_BEFORE, self._panel_after):
            new: list[Entry]
            new, self._read[name] = self._diary(name).read(self._read.get(name, 0))
            (self.outcome.waits_training if training else self.outcome.waits).extend(entry.waited_s for entry in new)
            self.screen.waits.extend(entry.waited_s for entry in new)

    def _sampled(self, sight: Sight) -> tuple[int, int]:
        live, wanted = (sight.pointer.digest if sight.pointer is not None else ""), self.plan.profile.min_turns
        eligible = sum(label.version == live and label.exclusion is None for label in sight.labels)
        return min(eligible, wanted), wanted

    def last_sight(self) -> Sight | None:
        """The newest look, for the summary."""
        return self._last

    def close(self) -> None:
        """Close the operator's connection, and end a planter that nobody waits for: a damaged version must not come after the demo."""
        self._operator.close()
        if self._planting is not None:
            with self._planting as planting:
                planting.kill()  # harmless where it has ended


def _part_of(sight: Sight) -> Part:
    """What the loop is doing: a release on its way to people, a cycle before or after its update, or neither yet."""
    if any(release.state in IN_FLIGHT - {ReleaseState.TRAINED, ReleaseState.OFFLINE} for release in sight.releases):
        return Part.CANARY
    running = next((cycle for cycle in sight.cycles if cycle.status is CycleStatus.RUNNING), None)
    if running is None:
        return Part.COLLECT
    return Part.UPDATE if running.step in ("elected", "batch") else Part.SUITE


def _failures(sight: Sight) -> list[Release]:
    """Candidates of the loop that did not pass, since the last one that did."""
    failed: list[Release] = []
    for release in sight.releases:  # newest first
        if release.state in (ReleaseState.CHAMPION, ReleaseState.SUPERSEDED):
            break
        if release.state in FAILED and not _is_planted(release):
            failed.append(release)
    return failed


def _is_planted(release: Release) -> bool:
    return "planted" in release.version_name


def _find(sight: Sight, release_id: str) -> Release:
    return next(release for release in sight.releases if release.id == release_id)
