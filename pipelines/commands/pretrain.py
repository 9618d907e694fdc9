"""`ratchet pretrain`: continue pretraining a policy's live version on a corpus; the result enters the same gates as any candidate."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.table import Table

from app import wiring
from app.domain.errors import BadInput
from app.domain.ids import utc_now, uuid7
from app.domain.policies import PolicyConfig
from app.domain.release.versions import RunStatus, TrainingRun, Version, VersionKind, version_name
from app.settings import Settings, from_environment
from pipelines.training.pretraining import Document, PretrainingConfig, Tokenizer, read_folder, tokenise
from pipelines.training.pretraining import pretrain as train_on

if TYPE_CHECKING:
    from pipelines.training.ports import Trainers


@click.command()
@click.option("--policy", required=True, help="Whose live version to continue from.")
@click.option(
    "--corpus", required=True, type=click.Path(exists=True, path_type=Path), help="A folder of text, or a Parquet file (column `text`)."
)
@click.option("--steps", default=50, show_default=True, help="Optimizer steps.")
@click.option("--learning-rate", default=2e-5, show_default=True)
@click.option("--sequence-tokens", default=512, show_default=True)
@click.option("--sequences-per-step", default=8, show_default=True)
def pretrain(policy: str, corpus: Path, steps: int, learning_rate: float, sequence_tokens: int, sequences_per_step: int) -> None:
    """Train the next-token loss on a corpus, packed; held-out perplexity per domain is shown before and after."""
    settings = from_environment()
    declared = wiring.require_policy(wiring.load_policies(settings), policy)
    config = PretrainingConfig(
        steps=steps, learning_rate=learning_rate, sequence_tokens=sequence_tokens, sequences_per_step=sequences_per_step,
        warmup_steps=min(10, max(1, steps // 5)), micro_batch_tokens=max(512, sequence_tokens),
    )  # fmt: skip
    from pipelines.training.elsewhere.storage import Storage
    from pipelines.training.ray_actors import RayTrainers

    trainers = RayTrainers(wiring.ray_token(settings), Storage.of(weights=settings.weights, states=settings.states))
    try:
        version, figures = continue_from_live(settings, policy, declared, corpus, config, trainers)
    finally:
        trainers.stop()
    table = Table("domain", "perplexity before", "after")
    for domain, before in figures["perplexity_before"].items():
        table.add_row(domain, f"{before:.3f}", f"{figures['perplexity_after'][domain]:.3f}")
    console = Console()
    console.print(table)
    console.print(f"{version.name} ({version.digest[:12]}) is judged by the loop's next slot: `ratchet release list --policy {policy}`")


def continue_from_live(
    settings: Settings, policy: str, declared: PolicyConfig, corpus: Path, config: PretrainingConfig, trainers: "Trainers"
) -> tuple[Version, dict[str, dict[str, float]]]:
    """Train, publish, record the version and open its release; returns the version and the figures."""
    from app.policy.chat import Chat
    from pipelines.cycle import PRETRAINER
    from pipelines.training.trainer import TrainerSetup

    desk, versions, weights = wiring.release_desk(settings), wiring.version_book(settings), wiring.open_weights(settings)
    parent = versions.find(policy, desk.pointer(policy).digest)
    snapshot = weights.path(parent.digest)
    chat = Chat.load(snapshot)
    if chat.end_token is None:
        raise BadInput(f"the tokenizer in {snapshot} names no end token: add eos_token to its tokenizer_config.json")
    texts = tokenise(_documents(corpus), Tokenizer(chat.encode, chat.end_token), config)
    started = utc_now()
    with tempfile.TemporaryDirectory(dir=settings.data) as scratch:
        setup = TrainerSetup(snapshot=snapshot, scratch=Path(scratch), dtype=config.dtype, threads=config.threads)
        with trainers.opened(setup, workers=1, timeout_s=3600.0) as trainer:
            figures = train_on(trainer, texts, config, policy=policy, progress=wiring.progress_log(settings))
            trainer.save_weights_for_sampler(Path(scratch) / "candidate", snapshot)
        digest = weights.publish(Path(scratch) / "candidate")
    now = utc_now()
    name = version_name(base=declared.base_name, kind=VersionKind.PRETRAIN, created_at=now, step=parent.step + 1)
    run = TrainingRun(
        id=f"{policy}-pretrain-{uuid7()}", policy=policy, batch_id=texts.id, parent=parent.digest, status=RunStatus.SUCCEEDED,
        candidate=digest, metrics=figures, config=msgspec.to_builtins(config), started_at=started, finished_at=now,
    )  # fmt: skip
    version = Version(
        digest=digest, policy=policy, name=f"{name}-{digest[:6]}", kind=VersionKind.PRETRAIN, parent=parent.digest, step=parent.step + 1,
        run_id=run.id, created_at=now, base_model=parent.base_model, licence=parent.licence,
        tags={"corpus": str(corpus), "code": wiring.code_version()},
    )  # fmt: skip
    wiring.run_store(settings).put(run)
    versions.add(version)
    desk.open(version, initiator=PRETRAINER)
    return version, figures


def _documents(corpus: Path) -> Iterator[Document]:
    if corpus.is_dir():
        yield from read_folder(corpus)
        return
    for name, domain, text in wiring.read_texts(corpus):
        yield Document(name=name, domain=domain, text=text)
