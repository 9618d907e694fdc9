"""Every subcommand of `ratchet` is run by a test with what it does looked at; whoever adds one names its test here."""

from collections.abc import Iterator

import click
import pytest

from pipelines.__main__ import ratchet
from tests.architecture.sources import ROOT

LOOKED_AT = {
    "tests/e2e/test_up.py": "up api engine broker relay ingest label loop watch",
    "tests/e2e/test_demo.py": "demo",
    "tests/integration/operations/test_prepare.py": "prepare",
    "tests/integration/operations/test_commands_nobody_ran.py": (
        "cycle-list db-check db-contract db-recount db-upgrade model-fetch model-list model-tiny model-prune keys-rotate-sessions "
        "release-explain release-list release-show dlq-purge suite-list suite-run suite-sealed audit-show audit-verify"
    ),
    "tests/integration/api/test_api_process.py": "keys-create keys-list keys-revoke",
    "tests/integration/release/test_release_commands.py": (
        "release-abort release-alarms release-anchor release-approve release-lift release-pin release-plant release-reject "
        "release-rollback release-unfreeze release-unpin"
    ),
    "tests/integration/operations/test_terminal.py": (
        "status top releases diff slots tail logs login logout completion people-first people-list people-add people-change people-invite "
        "people-roles people-sign-out"
    ),
    "tests/integration/release/test_release_plan.py": "release-plan",
    "tests/integration/release/test_holdout.py": "release-holdout",
    "tests/integration/labelling/test_label_book.py": "rules-activate rules-diff rules-replay rules-show rules-validate labels-report",
    "tests/integration/labelling/test_readings.py": "labels-reviewed",
    "tests/integration/labelling/test_judge_for_follow_ups.py": "labels-sample labels-agreement labels-distil",
    "tests/integration/streaming/test_streaming_commands.py": (
        "dlq-list dlq-replay dlq-show erase export-dsjson export-parquet upkeep-run upkeep-show"
    ),
    "tests/integration/labelling/test_collecting_and_importing.py": "import-sharegpt collect",
    "tests/integration/cycle/test_suite_commands.py": "suite-build suite-probe",
    "tests/integration/cycle/test_lineage.py": "lineage",
    "tests/integration/operations/test_recovery.py": "recover-acknowledged recover-check recover-erasures",
    "tests/unit/app/test_actor_salt.py": "recover-salt",
    "tests/integration/news/test_webhook_commands.py": (
        "webhooks-add webhooks-deliveries webhooks-list webhooks-remove webhooks-rotate webhooks-test"
    ),
    "tests/integration/rollouts/test_env_commands.py": "env-list env-check env-try env-run",
    "tests/integration/cycle/test_pretrained_cycle.py": "pretrain",
    "tests/integration/training/test_draft_command.py": "model-draft",
    "tests/integration/operations/test_doctor.py": "doctor backup-note",
}
"""Which test file runs which: the words of a subcommand with dashes between."""


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every subcommand that does something, by its words."""
    if not isinstance(command, click.Group):
        yield path
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from leaves(found, (*path, name))


def test_every_subcommand_has_a_test_and_every_named_one_is_there() -> None:
    named = [word for words in LOOKED_AT.values() for word in words.split()]
    assert sorted(named) == sorted("-".join(path) for path in leaves(ratchet))


@pytest.mark.parametrize("file", sorted(LOOKED_AT.keys() - {"tests/e2e/test_up.py"}))  # `ratchet up` starts the others there
def test_the_named_test_speaks_of_its_subcommands(file: str) -> None:
    source = (ROOT / file).read_text()
    for command in LOOKED_AT[file].split():
        assert command.rpartition("-")[2] in source, command
