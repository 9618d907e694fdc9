"""`ratchet up`: every process of a deployment on this machine, supervised, until Ctrl-C."""

from contextlib import closing
from pathlib import Path

import click

from app.stopping import until_told
from pipelines.commands.running.deployment import Deployment, bring_models, check, plan, prepare_apart
from pipelines.supervisor import Supervisor, owning

CHECK_EVERY_S = 0.5


@click.command()
@click.option("--config", type=click.Path(path_type=Path), default=None, help="TOML file; the quickstart's where none is named.")
@click.option("--data", type=click.Path(path_type=Path), default=None, help="Data folder; `.ratchet` where none is named.")
@click.option("--port", type=click.IntRange(1, 65535), default=None, help="Port of the API and the console; 8400 or a free one.")
def up(config: Path | None, data: Path | None, port: int | None) -> None:
    """Run broker, api, engine, relay, ingest, label, loop and watch on this machine; Ctrl-C ends all of them."""
    with closing(plan(data=data, config=config, port=port)) as deployment:
        bring_models(deployment, say=click.echo)
        check(deployment.settings)
        with owning(deployment.settings.data):
            prepare_apart(deployment)
            click.echo(f"API and console: {deployment.url} · {deployment.url}/console   logs: {deployment.logs}   Ctrl-C ends everything")
            supervise(deployment)


def supervise(deployment: Deployment) -> None:
    """Run the processes until SIGINT or SIGTERM; crashes are told and repaired."""
    ended = until_told()
    supervisor = Supervisor(deployment.programs(), logs=deployment.logs)
    try:
        supervisor.start_all()
        while not ended.wait(CHECK_EVERY_S):
            for crash in supervisor.check():
                click.echo(f"ratchet: {crash} (log: {deployment.logs / crash.name}.log)", err=True)
    finally:
        supervisor.stop()
