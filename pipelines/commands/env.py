"""`ratchet env`: the tasks that agents practise at (`pipelines.rollouts`)."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from app import wiring
from app.domain.errors import BadConfig, BadInput, Refused, Unavailable
from app.logging import configure
from app.settings import Settings, from_environment, read_toml
from app.stopping import when_told
from pipelines.config import LoopConfig, loop_config
from pipelines.rollouts.bridged import Graders
from pipelines.rollouts.check import HeldTasks, check, validity
from pipelines.rollouts.dispatch import Dispatch, Kept, by_key, forget, group_of
from pipelines.rollouts.episode import Workplace
from pipelines.rollouts.harness import CodingAgent
from pipelines.rollouts.interception import FileJournal
from pipelines.rollouts.permits import Permits
from pipelines.rollouts.searching import Search
from pipelines.rollouts.service import Service, client_of
from pipelines.rollouts.tasks import TaskData, checked
from pipelines.rollouts.tasksets import find_taskset

SOURCES = Path(".cache/tasksets")
NEVER = 1_000


@dataclass(frozen=True)
class Place:
    """What every subcommand needs."""

    settings: Settings
    config: LoopConfig
    sources: Path = SOURCES

    def tasks(self, name: str) -> dict[str, TaskData]:
        """A taskset's tasks by key. Raises `BadInput`."""
        return by_key(checked(find_taskset(name, sources=self.sources, boxes=wiring.boxes()).load()))

    def practised(self, names: Sequence[str]) -> dict[str, dict[str, TaskData]]:
        """Tasksets by what they call themselves, which is what rollouts are written down under. Raises `BadInput`."""
        found: dict[str, dict[str, TaskData]] = {}
        for name in names:
            tasks = self.tasks(name)
            own = own_name(tasks)
            if own in found:
                raise BadInput(f"two of the tasksets {', '.join(names)} are called {own!r}: give each a name of its own")
            found[own] = tasks
        return found

    def one(self, taskset: str, key: str) -> TaskData:
        """One of them."""
        tasks = self.tasks(taskset)
        if key not in tasks:
            raise BadInput(f"{taskset} has no task {key!r}: `ratchet env list {taskset}` lists them")
        return tasks[key]

    def grader(self) -> Graders:
        """Of the configured back end."""
        cluster = self.config.rollouts.sandbox == "ray"
        return Graders(boxes=wiring.cluster_boxes(self.settings) if cluster else wiring.boxes())

    def harness(self) -> CodingAgent:
        """The one that comes with us, with the search of another policy where one is configured."""
        return CodingAgent(search_model=self.config.rollouts.search_policy or None)

    def search(self, policy: str) -> Search | None:
        """That step, for practice of `policy`. Raises `BadConfig` where a policy would search for itself."""
        config = self.config.rollouts
        if not config.search_policy:
            return None
        if config.search_policy == policy:
            raise BadConfig(
                f"rollouts.search_policy is {policy}, which is practised: name another policy, or practise the one that it helps"
            )
        wiring.require_policy(wiring.load_policies(self.settings), config.search_policy)
        return Search(policy=config.search_policy, budget_s=config.search_budget_s, weight=config.search_latency_weight)

    @property
    def held(self) -> HeldTasks:
        """What checks found."""
        return HeldTasks(self.settings.data / "rollouts" / "held.json")


def own_name(tasks: Mapping[str, TaskData]) -> str:
    """What a taskset calls itself, whatever the configuration names it by."""
    return next(iter(tasks.values())).taskset


def here() -> Place:
    """From the environment."""
    settings = from_environment()
    return Place(settings, loop_config(read_toml(settings.config)))


@click.group()
def env() -> None:
    """Tasks for agents at practice: list them, check that they cannot be cheated, try one, run many."""


@env.command("list")
@click.argument("taskset", required=False)
def list_tasks(taskset: str | None) -> None:
    """List the configured tasksets, or the tasks of TASKSET with what they came to."""
    place = here()
    held = place.held.read()
    if taskset is None:
        table = Table("taskset", "tasks", "held", "checked")
        for name in place.config.rollouts.tasksets:
            tasks = place.tasks(name)
            found = held.get(own_name(tasks))
            table.add_row(name, str(len(tasks)), str(len(found or {})), "no" if found is None else "yes")
    else:
        table = Table("task", "hash", "tests", "held")
        for task in place.tasks(taskset).values():
            tests = "bridge" if task.graded_by else str(len(task.expected))
            table.add_row(task.key, task.hash[:12], tests, held.get(task.taskset, {}).get(task.key, ""))
    Console(width=160).print(table)


@env.command("check")
@click.argument("taskset")
@click.option("--task", "keys", multiple=True, help="Only these; the others' findings are kept.")
def check_tasks(taskset: str, keys: tuple[str, ...]) -> None:
    """Check TASKSET: gold passes, hacks do not, and the harness is the same in a box as in production. What fails is held; exit code 2."""
    place = here()
    tasks = place.tasks(taskset)
    chosen = [place.one(taskset, key) for key in keys] or list(tasks.values())
    found = check(
        own_name(tasks), chosen, grader=place.grader(), harness=place.harness(), boxes=wiring.boxes(), plain=wiring.boxes(trusted=True),
        components=tuple(filter(None, [place.config.rollouts.search_policy])),
        seen=lambda key, why: click.echo(f"{key}: {why or 'sound'}"),
    )  # fmt: skip
    looked_at = {one.key for one in chosen}
    place.held.write(found, looked_at=looked_at, but=tasks.keys() - looked_at)
    if found.held:
        reasons = "; ".join(f"{key}: {why}" for key, why in list(found.held.items())[:3])
        raise Refused(f"{len(found.held)} of {taskset} are held, they are not practised until mended and checked again: {reasons}")
    click.echo(f"{len(chosen)} of {len(tasks)} tasks of {taskset} are sound, and the harness is what it is in production")


@env.command("try")
@click.argument("taskset")
@click.argument("key")
@click.option("--gold", is_flag=True, help="Grade the task's own solution and its hacks; no model is asked.")
@click.option("--policy", default="composer", show_default=True)
@click.option("--url", default="http://127.0.0.1:8400", show_default=True, help="The service.")
@click.option("--key", "api_key", envvar="RATCHET_API_KEY", help="API key that may ingest; better in RATCHET_API_KEY.")
def try_task(taskset: str, key: str, gold: bool, policy: str, url: str, api_key: str | None) -> None:
    """Try one task of TASKSET once, and show what was said and how it is graded. Its turns are a rollout's like any other's."""
    place = here()
    task = place.one(taskset, key)
    if gold:
        why = validity(task, place.grader())
        click.echo(why or "sound: gold passes, nothing else does")
        return
    kept = Kept(place.settings.data / "rollouts")
    work = _workplace(place, policy, url, api_key, kept, permits=None)
    rollout = group_of(task, policy=policy, harness=work.harness, size=1)[0]
    closed = work.attempt(rollout, task, begun=lambda episode: click.echo(f"episode {episode}"), holds=lambda: None)
    for exchange in FileJournal(kept.folder / f"{rollout.id}.jsonl").read():
        click.echo(f"── {exchange.version[:12]}\n{exchange.answer['choices'][0]['message']}")
    forget(kept.folder, rollout)
    flags = ", ".join(closed.flags) or "none"
    click.echo(f"{closed.outcome.value}, reward {closed.reward}, {closed.turns} turns, {closed.duration_s:.1f} s, flags: {flags}")


@env.command("run")
@click.argument("taskset", required=False)
@click.option("--policy", default="composer", show_default=True)
@click.option("--groups", type=click.IntRange(1), help="Groups of rollouts.group_size tries; without it, on and on.")
@click.option("--url", default="http://127.0.0.1:8400", show_default=True, help="The service.")
@click.option("--key", "api_key", envvar="RATCHET_API_KEY", help="API key that may ingest; better in RATCHET_API_KEY.")
def run_tasks(taskset: str | None, policy: str, groups: int | None, url: str, api_key: str | None) -> None:
    """Practise at TASKSET (at all configured ones without it) while people leave the engines idle; goes on with what another left."""
    place = here()
    configure("env", place.settings.log_level)
    config = place.config.rollouts
    tasksets = place.practised((taskset,) if taskset else config.tasksets)
    kept = Kept(place.settings.data / "rollouts")
    service = _service(policy, url, api_key)
    permits = Permits(
        probe=service.pressure, most=config.slots, bound_s=config.live_first_token_s, most_waiting=config.most_live_queue,
        probe_s=config.probe_s,
    )  # fmt: skip
    slot_s = place.config.schedule.slot_s
    dispatch = Dispatch(
        policy=policy, book=wiring.rollout_book(place.settings), tasks=tasksets, config=config,
        workplace=_workplace(place, policy, url, api_key, kept, permits=permits), kept=kept, held=place.held.read(),
        looked_at=place.held.looked_at(), hold=place.held.hold,
        until_promotion_s=lambda: slot_s - time.time() % slot_s + config.staleness * slot_s,
    )  # fmt: skip
    when_told(dispatch.stop)
    counted = dispatch.run(groups=groups, taskset=next(iter(tasksets)) if taskset else None)
    click.echo(", ".join(f"{count} {outcome}" for outcome, count in sorted(counted.items())) or "nothing was to be done")


def _service(policy: str, url: str, api_key: str | None) -> Service:
    return Service(partial(client_of, url), policy, key=api_key)


def _workplace(place: Place, policy: str, url: str, api_key: str | None, kept: Kept, *, permits: Permits | None) -> Workplace:
    settings = place.settings
    wiring.require_policy(wiring.load_policies(settings), policy)
    versions = wiring.version_book(settings)

    def champion() -> str:
        """Of the version that serves now; empty where this deployment's database says of none."""
        try:
            return wiring.release_desk(settings).pointer(policy).digest
        except Unavailable:
            return ""

    def lag(old: str, new: str) -> int:
        """How many versions lie between; `NEVER` where one does not descend from the other."""
        steps = 0
        while new != old:
            parent = versions.find(policy, new).parent
            if parent is None:
                return NEVER
            new, steps = parent, steps + 1
        return steps

    workplace = Workplace(
        boxes=wiring.boxes(), grader=place.grader(), service=_service(policy, url, api_key), harness=place.harness(),
        journal_of=kept.journal, session_of=kept.session, keep_session=kept.keep, champion=champion, lag=lag,
        staleness=place.config.rollouts.staleness, search=place.search(policy), ahead=place.config.rollouts.ahead,
    )  # fmt: skip
    if permits is not None:
        workplace.permit = permits
    return workplace
