"""`ratchet demo`: the whole loop on this machine with simulated people, live in the terminal."""

import json
import signal
import tempfile
import threading
import time
from pathlib import Path

import click

from app import wiring
from pipelines.commands.demonstration.outcome import Outcome
from pipelines.commands.demonstration.profiles import PROFILES, Profile, seconds, write_config
from pipelines.commands.demonstration.screen import Screen
from pipelines.commands.demonstration.story import Story, TimeIsUp
from pipelines.commands.deployment import Deployment, check, plan, prepare_apart
from pipelines.supervisor import Supervisor, owning


@click.command()
@click.option("--model", type=click.Choice(sorted(PROFILES)), default="smollm2", help="The real model, or a tiny random one (3 minutes).")
@click.option("--slot", default=None, help="Length of a slot, such as 60s; production's is 5h.")
@click.option("--stay", is_flag=True, help="Keep everything running after the summary, until Ctrl-C.")
@click.option("--seed", type=int, default=1, help="Which population of people.")
@click.option("--data", type=click.Path(path_type=Path), default=None, help="Data folder; a fresh temporary one where none is named.")
@click.option("--port", type=click.IntRange(1, 65535), default=None, help="Port of the API and the console; 8400 or a free one.")
@click.option("--minutes", type=click.FloatRange(min=0.5), default=None, help="End after this long at the latest.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write the last view to this file (SVG).")
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON on standard output.")
def demo(  # one parameter per option
    model: str, slot: str | None, stay: bool, seed: int, data: Path | None, port: int | None, minutes: float | None,
    picture: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Watch a language model learn from what people do with its answers, and a bad version being taken back."""
    began = time.monotonic()
    profile = PROFILES[model]
    folder = data.resolve() if data is not None else Path(tempfile.mkdtemp(prefix="ratchet-demo-"))
    slot_s = seconds(slot) if slot is not None else profile.default_slot_s
    with owning(folder):
        config = write_config(profile, folder, slot_s=slot_s)
        deployment = plan(data=folder, config=config, port=port)
        check(deployment.settings)
        prepare_apart(deployment)
        outcome = Outcome(model=model, seed=seed)
        budget_s = minutes * 60 if minutes is not None else profile.budget_s
        _perform(deployment, profile, outcome, deadline=began + budget_s, began=began, stay=stay, picture=picture)
    if as_json:
        click.echo(json.dumps(outcome.as_json()))
    raise SystemExit(1 if outcome.failures else 0)


def _perform(
    deployment: Deployment, profile: Profile, outcome: Outcome, *, deadline: float, began: float, stay: bool, picture: Path | None
) -> None:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: ended.set())
    supervisor = Supervisor(deployment.programs(), logs=deployment.logs)
    screen = Screen(title=f"Ratchet · {profile.base_model}", url=deployment.url)
    story = Story(
        deployment=deployment, profile=profile, supervisor=supervisor, screen=screen, outcome=outcome, seed=outcome.seed, deadline=deadline,
        stopping=ended.is_set,
    )  # fmt: skip
    try:
        supervisor.start_all()
        _announce(screen, deployment, profile)
        with screen.shown():
            _told(story, deployment, outcome)
        _sum_up(story, outcome, began)
        screen.console.print(outcome.table())
        if picture is not None and (sight := story.last_sight()) is not None:
            screen.save(sight, picture)
        if stay and not ended.is_set():
            screen.console.print(f"Everything keeps running: {deployment.url}/console. Ctrl-C ends it.")
            _stay(supervisor, screen, ended)
    finally:
        story.close()
        supervisor.stop()


def _announce(screen: Screen, deployment: Deployment, profile: Profile) -> None:
    screen.say(f"console: {deployment.url}/console   logs: {deployment.logs}")
    screen.say(
        f"compressed: slots of seconds, non-inferiority margins of {profile.margin:.0%} (production: 1.5 %), so that a few hundred people "
        "suffice; false-alarm rates are production's"
    )


def _told(story: Story, deployment: Deployment, outcome: Outcome) -> None:
    try:
        story.tell(wiring.open_operations(deployment.settings))
    except TimeIsUp:
        outcome.trouble = f"time was up while: {story.screen.phase}"
    except KeyboardInterrupt:
        outcome.trouble = "it was interrupted"


def _sum_up(story: Story, outcome: Outcome, began: float) -> None:
    outcome.wall_s = time.monotonic() - began
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
