"""Every metric by name: what it counts, with which labels, in which process. docs/metrics.md is this table; a test compares them.

Names are a contract with the dashboards and alerts that people build: a metric may be added, and none is renamed without a line in
CHANGELOG.md. Seconds are `_seconds`, bytes `_bytes`, what only grows ends in `_total`.
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Prometheus' types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Described:
    """One metric."""

    name: str
    """As Prometheus stores it; a histogram's series add `_bucket`, `_sum` and `_count`."""
    kind: Kind
    says: str
    labels: tuple[str, ...] = ()
    of: tuple[str, ...] = ("api",)
    """The processes that show it. What the database knows is shown by the api: aggregate over its replicas with `max`."""
    buckets: tuple[float, ...] = ()


C, G, H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
LOCAL = ("relay", "ingest", "label", "loop", "watch")
"""Processes that show their metrics at RATCHET_METRICS; api and engine do at their own port."""
EVERY = ("api", "engine", *LOCAL)
P = ("policy",)
SECONDS = (0.05, 0.25, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
QUICK = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0)

_PROCESS = (
    Described("ratchet_process_info", G, "Always 1; the labels say what runs.", ("process", "version"), EVERY),
    Described("ratchet_process_ready", G, "1 when the process has begun its work; readiness asks nobody else.", (), EVERY),
    Described("ratchet_process_rounds_total", C, "Rounds of the process's own loop.", (), ("relay", "ingest", "label", "watch")),
    Described("ratchet_process_last_round_timestamp_seconds", G, "When the last round began.", (), ("relay", "ingest", "label", "watch")),
    Described(
        "ratchet_control_plane_silent_seconds",
        G,
        "For how long the `database` or the `storage` has not answered; 0 while it does.",
        ("region", "part"),
        ("api", "engine"),
    ),
    Described("ratchet_clock_skew_seconds", G, "This machine's clock ahead of the database's.", (), ("api", *LOCAL)),
)
_STREAM = (
    Described("ratchet_relay_sent_total", C, "Rows that the broker acknowledged.", (), ("relay",)),
    Described("ratchet_ingest_applied_total", C, "Events that were new and are applied.", (), ("ingest",)),
    Described("ratchet_ingest_waiting", G, "1 while ingestion waits for the broker, the database or the bucket.", (), ("ingest",)),
    Described("ratchet_label_labelled_total", C, "Labels written.", P, ("label",)),
)
_LOOP = (
    Described("ratchet_loop_cycles_ended_total", C, "Cycles that this process ran to their end.", ("policy", "status"), ("loop",)),
    Described("ratchet_loop_step_seconds", H, "Duration of a cycle's step.", ("policy", "step"), ("loop",), SECONDS),
    Described("ratchet_loop_training_memory_bytes", G, "Resident memory of the training workers on this machine.", (), ("loop",)),
    Described("ratchet_watch_tick_seconds", H, "One look at everything that is live.", P, ("watch",), QUICK),
)
_ENGINE = (
    Described("ratchet_engine_load", G, "Answers that are sampled or wait to be.", (), ("engine",)),
    Described("ratchet_engine_capacity", G, "Answers it takes before it refuses with 429.", (), ("engine",)),
    Described("ratchet_engine_sampled_tokens_total", C, "Tokens sampled since the engine started.", (), ("engine",)),
    Described("ratchet_engine_versions", G, "Versions that are wanted here, by state.", ("state",), ("engine",)),
    Described("ratchet_engine_mismatched_versions", G, "Versions whose log-probabilities are not what the weights say.", (), ("engine",)),
    Described("ratchet_engine_swap_seconds", H, "From wanted to ready: fetched, loaded, verified, probed.", (), ("engine",), SECONDS),
    Described(
        "ratchet_engine_gpu_memory_bytes", G, "Memory of each GPU, `used` and `total`; none without one.", ("device", "kind"), ("engine",)
    ),
)
_DOOR = (
    Described("ratchet_api_events_total", C, "Events at the door by answer.", ("status",)),
    Described("ratchet_api_turns_total", C, "Turns served by this process.", ("policy", "version", "arm", "finish_reason")),
    Described(
        "gen_ai_server_request_duration_seconds", H, "Whole answers.", P,
        buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
    ),
    Described(
        "gen_ai_server_time_to_first_token_seconds", H, "Until the first token.", P,
        buckets=(0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    ),
    Described("gen_ai_client_token_usage_total", C, "Tokens.", ("policy", "type")),
    Described("ratchet_api_refused_total", C, "Requests refused before any work.", ("code",)),
    Described("ratchet_api_shadow_total", C, "Answers of shadow traffic, by how they ended.", ("policy", "version", "outcome")),
    Described(
        "ratchet_api_shadow_seconds", H, "Whole answers of shadow traffic.", P, buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
    ),
    Described("ratchet_api_shadow_tokens_total", C, "Tokens that shadow traffic sampled.", ("policy", "version")),
    Described("ratchet_api_in_flight_bytes", G, "Request bodies being worked on."),
    Described("ratchet_api_spooled_bytes", G, "Answers on this machine's disk that wait for the database."),
    Described("ratchet_api_redacted_total", C, "Personal data replaced, by kind.", ("kind",)),
)  # fmt: skip
_DATABASE = (
    Described("ratchet_database_up", G, "Whether the database answers; where it does not, all that it knows is missing, never stale."),
    Described("ratchet_database_synchronous", G, "1 when a commit waits for a standby. Absent on SQLite."),
    Described("ratchet_database_timeline", G, "PostgreSQL's timeline: one more after each failover."),
    Described("ratchet_ledger_total", C, "Durable counts of the loop.", ("policy", "name")),
    Described("ratchet_turns", G, "Turns per version.", ("policy", "version")),
    Described("ratchet_turns_labelled", G, "Labelled turns per version.", ("policy", "version")),
    Described("ratchet_inbox_unsent", G, "Accepted events that wait for the relay."),
    Described("ratchet_inbox_unapplied", G, "Relayed events that wait for ingestion."),
    Described("ratchet_inbox_oldest_unapplied_seconds", G, "Age of the oldest of both."),
    Described("ratchet_stream_lag", G, "Records at the broker that ingestion has not read."),
    Described("ratchet_labels_due", G, "Turns whose wait is over and that have no label."),
    Described("ratchet_dead_letters", G, "Dead letters that nobody replayed."),
    Described("ratchet_observations_parked", G, "Observations whose turn is not known yet."),
    Described("ratchet_files_owing", G, "Segment files to be copied without somebody's turns, or to be removed, since a commit."),
    Described("ratchet_relay_in_office", G, "1 while a relay holds the lease."),
    Described("ratchet_cycles_total", C, "Slots by what became of them.", ("policy", "status")),
    Described("ratchet_cycles_held_in_a_row", G, "Newest cycles that ended held or failed, without a good one between them.", P),
    Described("ratchet_cycle_last_done_timestamp_seconds", G, "When the last cycle made and judged a candidate.", P),
    Described("ratchet_cycle_running_seconds", G, "How long the present cycle runs; absent between cycles.", P),
    Described("ratchet_run_mismatch", G, "Mean KL per token between engine and trainer in the newest run.", P),
    Described("ratchet_run_effective_share", G, "Effective sample size of the newest run as a share.", P),
    Described("ratchet_run_anchor_budget_used", G, "Share of the KL budget to the anchor that the newest run had used up.", P),
    Described("ratchet_run_seconds", G, "Duration of the newest finished run.", P),
    Described("ratchet_progress_ratio", G, "How far long work is; only what moved in the last five minutes.", ("policy", "task")),
    Described("ratchet_releases", G, "Releases by state.", ("policy", "state")),
    Described("ratchet_rollbacks_total", C, "Champions taken back.", P),
    Described("ratchet_harm_e_value", G, "Evidence of harm of what is live (canary, holdback); 1 is none.", ("policy", "subject")),
    Described("ratchet_approval_expires_seconds", G, "Until the release that waits for people expires; absent where none waits.", P),
    Described("ratchet_alarms_open", G, "Open alarms by kind.", ("policy", "kind")),
    Described("ratchet_promotions_frozen", G, "1 while promotions wait for two people.", P),
    Described("ratchet_pointer_generation", G, "Generation of what is live.", P),
    Described("ratchet_pointer_changed_timestamp_seconds", G, "When it changed.", P),
    Described("ratchet_engines_holding_champion", G, "Engines heard of in the last ten seconds that hold the champion.", P),
    Described("ratchet_engines_mismatched", G, "Of those, the ones whose log-probabilities are wrong.", P),
    Described("ratchet_region_engines", G, "Engines of a region heard of in the last ten seconds.", ("policy", "region")),
    Described(
        "ratchet_region_lag_champions",
        G,
        "Champions since the newest that a region holds; absent where it holds none.",
        ("policy", "region"),
    ),
    Described("ratchet_region_lag_seconds", G, "For how long a region has not held the champion; 0 where it does.", ("policy", "region")),
    Described("ratchet_audit_rows_total", C, "Length of the audit chain."),
    Described("ratchet_webhooks_undelivered", G, "Deliveries that are still to be tried."),
    Described("ratchet_backup_age_seconds", G, "since the last `ratchet backup note`; absent before the first."),
    Described("ratchet_drill_age_seconds", G, "Since a backup was last restored and verified; absent before the first."),
)
LIBRARY = ("process_", "python_")
"""Prefixes of what prometheus_client itself shows of a process: CPU, memory, files, garbage collection."""

CATALOGUE: dict[str, Described] = {described.name: described for described in (*_PROCESS, *_STREAM, *_LOOP, *_ENGINE, *_DOOR, *_DATABASE)}
FROM_DATABASE = frozenset(described.name for described in _DATABASE)


def of_process(process: str) -> dict[str, Described]:
    """What a process shows."""
    return {name: described for name, described in CATALOGUE.items() if process in described.of}


def page() -> str:
    """docs/metrics.md."""
    parts = [
        ("Every process", _PROCESS), ("Streaming: relay, ingest, label", _STREAM), ("Loop and watch", _LOOP), ("Engine", _ENGINE),
        ("Gateway and door (api)", _DOOR), ("What the database knows (api)", _DATABASE),
    ]  # fmt: skip
    return _HEAD + "\n".join(f"## {title}\n\n{_table(rows)}" for title, rows in parts)


def _table(rows: tuple[Described, ...]) -> str:
    lines = [f"| `{row.name}` | {row.kind} | {', '.join(row.labels) or '–'} | {', '.join(row.of)} | {_says(row)} |" for row in rows]
    return "\n".join(["| metric | type | labels | process | what it says |", "|---|---|---|---|---|", *lines, ""])


def _says(row: Described) -> str:
    """With the bounds of its buckets, as a rule on `le` must spell them."""
    bounds = ", ".join(str(float(bound)) for bound in row.buckets)
    return f"{row.says} Buckets: {bounds}." if bounds else row.says


_HEAD = """# Metrics

Written from `app/telemetry/catalogue.py` (`python -m app.telemetry.catalogue > docs/metrics.md`). The api shows its own at
`/metrics` (a key with the scope `read`; a key for one policy reads that policy's series), the engine at `/metrics` of its port,
every other process at the address in `RATCHET_METRICS` (`0.0.0.0:9464` in a container; unset: nowhere), beside `/live` and
`/ready`. None but the api asks for a key: keep those ports inside. `ratchet up` counts the port up, process by process. Every
process also shows `process_*` and `python_*` of the Prometheus client.

What the database knows is the same at every replica of the api: aggregate it with `max`. Alerts and dashboards on these names are
in `infra/prometheus` and `infra/grafana`; each alert has its page in [runbooks](runbooks/README.md).

"""

if __name__ == "__main__":
    import sys

    sys.stdout.write(page())
