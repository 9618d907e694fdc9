"""Fits the demo to the machine: measures it, chooses sizes that end well and in time, and corrects the forecast as it learns the truth.

```
 calibrate (a process, some seconds) ─▶ Speed ─▶ fit ─▶ Plan: a profile of sizes, promotions, seconds per part ─▶ Forecast
                                                                          (what really happened, part by part) ───▲
```

The promise is one promotion, an interval that excludes zero, and a planted regression that is taken back. Sizes below the smallest here
do not keep it (an interval of 80 answers a side is about ±0.13); a slow machine gets more time instead, and a fast one a second promotion.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from pipelines.commands.demonstration.profiles import Profile

TARGET_S = 240.0
"""What the demo likes to end within."""
MOST_PATIENCE = 10.0
LONGEST_ANSWER_S = 8.0
"""People ask so many at a time that an answer takes about this long: more at once are faster together and slower each (on two slow cores
SmolLM2 gives 24 people 130 tokens a second and 64 people 250)."""
FEWEST_PEOPLE = 6
SHARE_WHILE_TRAINING = 0.5
"""Of the cores, that the update gets beside people who go on working."""
BESIDE_OTHERS = 0.5
"""Of the measured speed, what the engine gives beside the demo's other processes on the same cores (0.45 to 0.55 on two slow ones)."""
BESIDE_PEOPLE = 0.4
"""Of the answers, those of the suite or of the panel: people go on asking."""
CANARY_UNITS = 130
"""People a canary of the demo usually sees until it is READY, both arms; twice as many answers pass for labels to come."""
PLANT_UNITS = 30
"""People whom the planted version's canary sees after the comparison is over: it begins beside it."""
PROCESSES_START_S = 10.0
APPROVAL_S = 3.0
LOADING_S = 4.0


class Part(StrEnum):
    """The parts of the demo, in order; those of `CYCLE` come again for a second promotion."""

    START = "the processes start"
    COLLECT = "people use the product until a batch is full"
    UPDATE = "the update runs while people go on working"
    SUITE = "the candidate answers the offline suite, as the champion did meanwhile"
    CANARY = "the candidate answers some of the people"
    COMPARE = "held-out people ask the last champion what they asked the first"
    HARM = "a damaged version was planted and has to be caught"


CYCLE = (Part.COLLECT, Part.UPDATE, Part.SUITE, Part.CANARY)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What was measured in the first seconds."""

    cores: int
    answers_per_s: float
    """With the profile's number of people asking at once."""
    turn_s: float
    """One turn's forward and backward pass, alone."""
    training_threads: int = 0
    """The number of threads with which that was so; 0 for all cores. The engine finds its own as it goes."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was chosen for this machine."""

    profile: Profile
    promotions: int
    parts: tuple[tuple[Part, float], ...]
    """Seconds that each part is expected to take, in order."""

    @property
    def seconds(self) -> float:
        """All parts together."""
        return sum(lasts for _, lasts in self.parts)

    def sentence(self, speed: Speed) -> str:
        """What was found and chosen, for people."""
        how = self.profile
        often = "one promotion" if self.promotions == 1 else f"{self.promotions} promotions"
        return (
            f"this machine ({speed.cores} cores) gives {speed.answers_per_s:.1f} answers a second; so {how.concurrency} people at a time, "
            f"{how.min_turns} labels an update, {how.suite_tasks * how.suite_samples} suite answers a side, {how.panel_turns} questions by "
            f"held-out people before and after, and {often}: about {spoken(self.seconds)}"
        )


@contextmanager
def measuring(profile: Profile, *, environment: Mapping[str, str], snapshot: Path) -> Generator[Callable[[], Speed]]:
    """Get ready to ask the machine, in a process of its own that loads the model beside whatever else is done meanwhile.

    The function handed out measures, and wants the machine for itself. It raises `RuntimeError` when that breaks.
    """
    command = [sys.executable, "-m", "pipelines.commands.demonstration.calibrate", str(snapshot), str(profile.concurrency)]
    with subprocess.Popen(command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asked:
        try:
            yield lambda: _measured(asked)
        finally:
            asked.kill()  # harmless where it has answered


def _measured(asked: "subprocess.Popen[str]") -> Speed:
    said, _ = asked.communicate("begin\n")
    if asked.returncode != 0:
        raise RuntimeError(f"this machine could not be measured: exit code {asked.returncode}, its error is above")
    return Speed(**json.loads(said.strip().splitlines()[-1]))


def fit(profile: Profile, speed: Speed, *, target_s: float = TARGET_S) -> Plan:
    """The largest sizes that this machine manages within `target_s`; the smallest where it manages none."""
    patience = min(MOST_PATIENCE, max(1.0, profile.usual_answers_per_s / speed.answers_per_s))
    people = max(FEWEST_PEOPLE, min(profile.concurrency, round(speed.answers_per_s * LONGEST_ANSWER_S)))
    smallest = replace(
        profile, training_threads=speed.training_threads,
        concurrency=people, patience=round(patience, 2), label_wait_s=round(profile.label_wait_s * min(3.0, patience), 1),
        default_slot_s=round(profile.default_slot_s * patience),
    )  # fmt: skip
    larger = replace(
        smallest, min_turns=profile.min_turns * 5 // 4, max_turns=profile.max_turns * 5 // 4, suite_tasks=profile.suite_tasks * 3 // 2,
        panel_turns=profile.panel_turns * 5 // 4,
    )  # fmt: skip
    choices = [_planned(larger, speed, promotions=2), _planned(smallest, speed, promotions=2), _planned(smallest, speed, promotions=1)]
    return next((plan for plan in choices if plan.seconds <= target_s), choices[-1])


def _planned(how: Profile, speed: Speed, *, promotions: int) -> Plan:
    parts = [(Part.START, PROCESSES_START_S * how.patience)]
    for _ in range(promotions):
        parts += cycle_parts(how, speed)
    return Plan(profile=how, promotions=promotions, parts=(*parts, *last_parts(how, speed)))


def cycle_parts(how: Profile, speed: Speed) -> list[tuple[Part, float]]:
    """One promotion, from the first answer to the new champion."""
    answers, wait = speed.answers_per_s * BESIDE_OTHERS, how.label_wait_s + how.window_s
    update = how.min_turns * speed.turn_s * how.turn_share / SHARE_WHILE_TRAINING + LOADING_S * how.patience
    suite = how.suite_tasks * how.suite_samples / (answers * BESIDE_PEOPLE) + LOADING_S * how.patience  # the champion's half is there
    canary = CANARY_UNITS / answers + 3 * wait + APPROVAL_S
    return [(Part.COLLECT, how.min_turns / answers * 1.2 + wait), (Part.UPDATE, update), (Part.SUITE, suite), (Part.CANARY, canary)]


def last_parts(how: Profile, speed: Speed) -> list[tuple[Part, float]]:
    """The comparison, and the planted regression."""
    answers, wait = speed.answers_per_s * BESIDE_OTHERS, how.label_wait_s + how.window_s
    return [(Part.COMPARE, how.panel_turns / (answers * BESIDE_PEOPLE) + wait), (Part.HARM, PLANT_UNITS / answers)]


@dataclass(kw_only=True)
class Forecast:
    """The plan against the truth: what is left, by the parts that are over."""

    parts: list[tuple[Part, float]]
    _began: float = field(default_factory=time.monotonic)
    _expected_s: float = 0.0
    _took_s: float = 0.0
    took: list[tuple[Part, float]] = field(default_factory=list[tuple[Part, float]])
    """Seconds that each part took that is over."""

    @property
    def part(self) -> Part | None:
        """What is under way; None at the end."""
        return self.parts[0][0] if self.parts else None

    def reach(self, part: Part) -> bool:
        """A part has begun, and all before it are over; False where no such part is to come (something has to be done once more)."""
        if self.part is part:
            return True
        if part not in [other for other, _ in self.parts]:
            return False
        self._end_part()
        while self.part is not part:
            self.parts.pop(0)  # it was over before anybody looked
        return True

    def begin_anew(self, parts: list[tuple[Part, float]]) -> None:
        """What was under way came to nothing; these are to come now."""
        self._end_part()
        self.parts = parts

    def _end_part(self) -> None:
        lasted = time.monotonic() - self._began
        if self.parts:
            now, expected = self.parts.pop(0)
            self._expected_s, self._took_s = self._expected_s + expected, self._took_s + lasted
            self.took.append((now, lasted))
        self._began = time.monotonic()

    @property
    def pace(self) -> float:
        """How many times longer things take than was planned, by what is over; 1 until the start is."""
        return max(0.25, self._took_s / self._expected_s) if self._expected_s else 1.0

    def left_s(self) -> float:
        """Seconds until the end, as far as is known."""
        lasted = time.monotonic() - self._began
        now, *later = [expected * self.pace for _, expected in self.parts] or [0.0]
        return max(0.1 * now, now - lasted) + sum(later)


def spoken(seconds: float) -> str:
    """`40 s`, `4 minutes`."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
