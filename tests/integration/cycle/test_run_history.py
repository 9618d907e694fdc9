"""The runs behind a champion's line, on both databases."""

from sqlalchemy import Engine, insert

from app.db.engine import reading, writing
from app.db.learning.run_history import run_history
from app.db.tables import batches, gate_results, training_runs, versions
from tests.integration.batching.rows import NOON, add_version


def _trained(engine: Engine, digest: str, *, parent: str, anchor: str, canary: str | None) -> None:
    run = f"run-{digest}"
    rows = {
        batches: {
            "id": f"batch-{digest}", "policy": "composer", "slot": int(digest[1:]), "champion": parent, "anchor": anchor, "rule_set": "r",
            "window_from": NOON, "window_to": NOON, "left_out": {}, "created_at": NOON,
        },
        training_runs: {
            "id": run, "policy": "composer", "batch_id": f"batch-{digest}", "parent": parent, "status": "succeeded", "candidate": digest,
            "metrics": {"kl_anchor": 0.1}, "config": {}, "started_at": NOON,
        },
        versions: {
            "digest": digest, "policy": "composer", "name": digest, "kind": "rl", "parent": parent, "step": 1, "run_id": run,
            "base_model": "tiny", "licence": "MIT", "tags": {}, "created_at": NOON,
        },
    }  # fmt: skip
    with writing(engine) as connection:
        for table, row in rows.items():
            connection.execute(insert(table).values({k: v for k, v in row.items() if k in table.c}))
        if canary is not None:
            result = {
                "release_id": f"release-{digest}", "gate": "g3_canary", "digest": digest, "verdict": canary, "action": "ready",
                "reason": "", "evidence": {"of": digest}, "config_hash": "c", "evidence_hash": "e", "decided_at": NOON,
            }  # fmt: skip
            connection.execute(insert(gate_results).values(result))


def test_a_line_is_told_oldest_first_with_what_its_passing_canaries_measured(engine: Engine) -> None:
    add_version(engine, "v0")
    _trained(engine, "v1", parent="v0", anchor="v0", canary="pass")
    _trained(engine, "v2", parent="v1", anchor="v0", canary="inconclusive")
    _trained(engine, "v3", parent="v2", anchor="v2", canary=None)
    _trained(engine, "v4", parent="v1", anchor="v0", canary="pass")  # another branch
    with reading(engine) as connection:
        line = run_history(connection, "composer", "v3")
        assert [(past.candidate, past.anchor, past.canary) for past in line] == [
            ("v1", "v0", {"of": "v1"}), ("v2", "v0", None), ("v3", "v2", None),
        ]  # fmt: skip
        assert [past.candidate for past in run_history(connection, "composer", "v3", newest=1)] == ["v3"]
        assert run_history(connection, "composer", "v0") == []
