"""`ratchet demo`: the whole loop on this machine with simulated people, live in the terminal."""

import json
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import click

from app import wiring
from app.settings import read_toml
from app.stopping import until_told
from pipelines.commands.demonstration.closing import close, pages
from pipelines.commands.demonstration.outcome import Outcome
from pipelines.commands.demonstration.planning import TARGET_S, Plan, Speed, fit, measuring
from pipelines.commands.demonstration.profiles import PROFILES, Profile, require_memory, seconds, write_config
from pipelines.commands.demonstration.screen import Screen
from pipelines.commands.demonstration.story import LATER, Ended, Rhythm, Story
from pipelines.commands.running.deployment import Deployment, bring_models, check, plan, prepare_apart
from pipelines.config import loop_config
from pipelines.supervisor import Supervisor, owning


@click.command()
@click.option("--model", type=click.Choice(sorted(PROFILES)), default="smollm2", help="The real model, or a tiny random one (a minute).")
@click.option("--slot", default=None, help="Length of a slot, such as 60s; production's is 5h.")
@click.option("--stay", is_flag=True, help="Keep everything running after the summary, until Ctrl-C.")
@click.option("--seed", type=int, default=1, help="Which population of people.")
@click.option("--data", type=click.Path(path_type=Path), default=None, help="Data folder; a fresh temporary one where none is named.")
@click.option("--port", type=click.IntRange(1, 65535), default=None, help="Port of the API and the console; 8400 or a free one.")
@click.option("--minutes", type=click.FloatRange(min=0.5), default=None, help="End after this long at the latest; no limit otherwise.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write the last view to this file (SVG).")
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON on standard output.")
def demo(  # one parameter per option
    model: str, slot: str | None, stay: bool, seed: int, data: Path | None, port: int | None, minutes: float | None,
    picture: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Watch a language model learn from what people do with its answers, and a bad version being taken back."""
    began = time.monotonic()
    profile = PROFILES[model]
    require_memory(profile)
    folder = data.resolve() if data is not None else Path(tempfile.mkdtemp(prefix="ratchet-demo-"))
    slot_s = seconds(slot) if slot is not None else None
    screen = Screen(title=f"Ratchet · {profile.base_model}", url="")
    with owning(folder):
        config = write_config(profile, folder, slot_s=slot_s or profile.default_slot_s)
        with closing(plan(data=folder, config=config, port=port)) as deployment:
            stage = set_up(profile, deployment, slot_s=slot_s, screen=screen)
            outcome = Outcome(model=model, seed=seed, planned_s=stage.plan.seconds)
            deadline = began + minutes * 60 if minutes is not None else None
            perform(stage, outcome, screen, began=began, deadline=deadline, stay=stay, picture=picture)
    if as_json:
        click.echo(json.dumps(outcome.as_json()))
    raise SystemExit(1 if outcome.failures else 0)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What the demo is performed on."""

    deployment: Deployment
    plan: Plan
    speed: Speed
    rhythm: Rhythm = Rhythm()


def set_up(profile: Profile, deployment: Deployment, *, slot_s: int | None, screen: Screen) -> Stage:
    """Prepare, measure the machine, and fit sizes and configuration to what was found."""
    bring_models(deployment, say=screen.say)
    check(deployment.settings)
    screen.url, (declared,) = deployment.url, wiring.load_policies(deployment.settings).values()
    screen.say(f"preparing the database, and measuring this machine with {profile.base_model}")
    with measuring(profile, environment=deployment.environment, snapshot=Path(declared.model)) as measure:
        prepare_apart(deployment)
        speed = measure()
    fitted = fit(profile, speed)
    write_config(fitted.profile, deployment.settings.data, slot_s=slot_s or fitted.profile.default_slot_s)
    check(deployment.settings)
    screen.say(fitted.sentence(speed))
    return Stage(deployment=deployment, plan=fitted, speed=speed)


def perform(
    stage: Stage, outcome: Outcome, screen: Screen, *, began: float, deadline: float | None, stay: bool, picture: Path | None
) -> None:
    """Start everything, tell the story, sum it up, and end everything: after Ctrl-C only with `stay`. What went wrong is in `outcome`."""
    ended = until_told()
    deployment = stage.deployment
    supervisor = Supervisor(deployment.programs(), logs=deployment.logs)
    story = Story(
        deployment=deployment, plan=stage.plan, speed=stage.speed, supervisor=supervisor, screen=screen, outcome=outcome, seed=outcome.seed,
        deadline=deadline, target=began + TARGET_S, stopping=ended.is_set, shares=_shares(deployment),
        rhythm=stage.rhythm,
    )  # fmt: skip
    try:
        for name in supervisor.processes:
            if name not in LATER:
                supervisor.start(name)
        _announce(screen, deployment, stage.plan.profile)
        with screen.shown():
            _told(story, deployment, outcome)
        _sum_up(story, outcome, began)
        close(screen.console, outcome, deployment.url)
        if picture is not None and (sight := story.last_sight()) is not None:
            screen.save(sight, picture, pages(outcome))
        if stay and not ended.is_set():
            screen.console.print(f"Everything keeps running: {deployment.url}/console. Ctrl-C ends it.")
            _stay(supervisor, screen, ended)
    finally:
        supervisor.stop()
        story.close()


def _shares(deployment: Deployment) -> tuple[float, ...]:
    """Of people, that a canary answers, stage by stage."""
    return tuple(stage.share for stage in loop_config(read_toml(deployment.settings.config)).gates.stages)


def _announce(screen: Screen, deployment: Deployment, profile: Profile) -> None:
    screen.say(f"console: {deployment.url}/console   logs: {deployment.logs}")
    screen.say(
        f"compressed: slots of seconds, non-inferiority margins of {profile.margin:.0%} (production: 1.5 %), so that a few hundred people "
        "suffice; false-alarm rates are production's"
    )


def _told(story: Story, deployment: Deployment, outcome: Outcome) -> None:
    try:
        story.tell(wiring.open_operations(deployment.settings))
    except Ended as ended:
        outcome.trouble = str(ended)
    except KeyboardInterrupt:
        outcome.trouble = "it was interrupted"


def _sum_up(story: Story, outcome: Outcome, began: float) -> None:
    outcome.wall_s, outcome.parts = time.monotonic() - began, story.forecast.took
    sight = story.last_sight()
    if sight is not None:
        outcome.time_cycles(list(reversed(sight.cycles)))
        outcome.answers, outcome.events = len(sight.labels) + sight.waiting_turns, sight.accepted_events


def _stay(supervisor: Supervisor, screen: Screen, ended: threading.Event) -> None:
    if supervisor.pid("loop") is None:
        supervisor.start("loop")
    while not ended.wait(0.5):
        for crash in supervisor.check():
            screen.say(str(crash))
