"""The processes of a deployment, one command each. All of them end within two seconds of SIGTERM or SIGINT and survive SIGKILL."""

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

import click

from app import wiring
from app.domain.retention import days, retention
from app.logging import configure
from app.settings import Settings, from_environment, owner_of, read_toml
from app.stopping import until_told
from pipelines.commands.running.engine_ports import engine_barrier, engine_id, engine_key, keep_server
from pipelines.commands.running.repeating import outlast, repeat

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from app.domain.learning.cycles import Cycle
    from app.domain.policies import PolicyConfig
    from app.domain.ports import CycleBook
    from app.telemetry.instruments import Instruments

log = logging.getLogger(__name__)


def begin(process: str) -> tuple[Settings, threading.Event]:
    """Settings from the environment, logging, and the event that SIGTERM and SIGINT set."""
    settings = from_environment()
    configure(process, settings.log_level, form=settings.log_format)
    return settings, until_told()


@contextlib.contextmanager
def importing() -> "Generator[None]":
    """For the libraries of a model. What is imported stays: to look for garbage in it takes one of the five seconds."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class SkewedClock(Protocol):
    """A clock that knows how far this machine's own is off."""

    def skew_s(self) -> float: ...


def shown(settings: Settings, process: str, clock: SkewedClock) -> "Instruments":
    """The metrics of this process, shown where RATCHET_METRICS says, with how far its clock is off."""
    own = wiring.instruments(settings, process)
    own.gauge("ratchet_clock_skew_seconds").set_function(clock.skew_s)
    return own


def ended_cycles(own: "Instruments", book: "CycleBook") -> "Callable[[Cycle], None]":
    """Counts a cycle that this process ran to its end, and how long each of its steps took."""
    count, steps = own.counter("ratchet_loop_cycles_ended_total"), own.histogram("ratchet_loop_step_seconds")

    def ended(cycle: "Cycle") -> None:
        last = book.find(cycle.policy, cycle.slot)
        count.labels(last.policy, last.status).inc()
        for step, seconds in last.timings.items():
            if step not in cycle.timings:  # an earlier owner's are counted there
                steps.labels(last.policy, step).observe(seconds)

    return ended


def children_memory() -> int:
    """Resident memory of the processes that this one started, the training workers, in bytes."""
    import psutil

    found = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += child.memory_info().rss
    return found


def owner() -> str:
    """Who this process is, in leases and ledgers: unique per process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def end_within(stop: threading.Event, seconds: float = 1.5) -> None:
    """End the process that long after it was told to, even when a broker or a database does not answer: every process may be killed."""

    def wait() -> None:
        stop.wait()
        time.sleep(seconds)
        os._exit(0)

    threading.Thread(target=wait, name="end", daemon=True).start()


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), default=None, help="19092, the last start's, or a free one where none is named.")
def broker(port: int | None) -> None:
    """Become the embedded Kafka-protocol broker, on loopback and in memory."""
    settings, _ = begin("broker")
    log.info("broker ready data=%s", settings.data)
    wiring.become_broker(settings, port=port)


@click.command()
def relay() -> None:
    """Send the inbox and the outbox to Kafka, and again what got lost on the way; one at a time is in office."""
    from pipelines.ingestion.config import streaming_config
    from pipelines.ingestion.relay import Relay

    settings, stop = begin("relay")
    ingestion, config = streaming_config(read_toml(settings.config))
    clock = wiring.clock(settings)
    own = shown(settings, "relay", clock)
    candidate = Relay(
        office=wiring.relay_office(settings, group=ingestion.group), sink=wiring.event_sink(settings),
        store=wiring.effect_store(settings), config=config, owner=owner(), clock=clock,
        sweep=wiring.claim_sweep(settings).sweep, keep_payloads=days(retention(read_toml(settings.config)).inbox_days),
        sent=own.counter("ratchet_relay_sent_total").inc, traces=wiring.tracing(settings, "relay"),
    )  # fmt: skip
    end_within(stop)
    gc.freeze()
    log.info("relay ready owner=%s", candidate.owner)
    own.ready = True
    outlast("relay", partial(candidate.run, own.rounds(stop.is_set)), stop, away=wiring.database_away())


@click.command()
def ingest() -> None:
    """Apply events from Kafka to the database, exactly once in effect."""
    from pipelines.ingestion.config import streaming_config
    from pipelines.ingestion.ingest import Ingest

    settings, stop = begin("ingest")
    config, _ = streaming_config(read_toml(settings.config))
    source = wiring.event_source(settings, group=config.group, max_records=config.max_records)
    clock, troubles = wiring.clock(settings), wiring.troubles(settings, name=f"ingest {owner()}")
    own = shown(settings, "ingest", clock)
    waiting = own.gauge("ratchet_ingest_waiting")

    def report(trouble: str | None) -> None:
        waiting.set(trouble is not None)
        troubles.report(trouble)

    member = Ingest(
        source=source, store=wiring.effect_store(settings), config=config, clock=clock, report=report,
        applied=own.counter("ratchet_ingest_applied_total").inc, traces=wiring.tracing(settings, "ingest"),
    )  # fmt: skip
    end_within(stop)
    gc.freeze()
    log.info("ingest ready group=%s", config.group)
    own.ready = True
    member.run(own.rounds(stop.is_set))


@click.command()
def label() -> None:
    """Label turns whose wait is over, with the rule set in force for each policy."""
    from pipelines.commands.ruling import parsed, require_practice, usable
    from pipelines.config import loop_config
    from pipelines.labelling.follow_up.agreement import open_reader
    from pipelines.labelling.labeller import label_due
    from pipelines.labelling.proposals import settle
    from pipelines.labelling.replay import ASKED_TURNS, answer
    from pipelines.labelling.rule_set import starting_toml

    settings, stop = begin("label")
    policies = wiring.load_policies(settings)
    whole = loop_config(read_toml(settings.config))
    config = whole.labelling
    book, backlog, clock = wiring.label_book(settings), wiring.backlog(settings), wiring.clock(settings)
    rules = wiring.rule_book(settings, starting_toml(config.rule_set, config=settings.config))
    read, replays, traces = open_reader(config), wiring.replay_book(settings), wiring.tracing(settings, "label")
    gc.freeze()  # the garbage collector need not look at the imported code again: a sixth of the labeller's time
    for name, policy in policies.items():
        settle(rules, policy=name, read=partial(usable, policy=policy, loop=whole, read=read), clock=clock)  # may mend what is in force
        require_practice(parsed(rules.active(name), policy=policy, loop=whole, read=read), whole)
    log.info("label ready policies=%s", ",".join(policies))
    own = shown(settings, "label", clock)
    counted, stopping, own.ready = own.counter("ratchet_label_labelled_total"), own.rounds(stop.is_set), True

    def labelling() -> None:
        while not stopping():
            labelled, complete_until = 0, backlog.complete_until(now=clock())
            for name, policy in policies.items():
                settle(rules, policy=name, read=partial(usable, policy=policy, loop=whole, read=read), clock=clock)
                rule_set = parsed(rules.active(name), policy=policy, loop=whole, read=read)
                done = label_due(
                    book, policy=name, config=policy, rule_set=rule_set, now=clock(), limit=config.batch_turns,
                    complete_until=complete_until, learn_from_rollouts=whole.batching.rollout_share > 0, traces=traces,
                )  # fmt: skip
                counted.labels(name).inc(done)
                labelled += done
            if labelled:
                log.info("turns labelled count=%d", labelled)
            replayed = [
                answer(
                    replays, partial(wiring.labelled_turns, settings, name, limit=ASKED_TURNS), policy=name, config=policy, clock=clock,
                    read=partial(parsed, policy=policy, loop=whole, read=read), learn_from_rollouts=whole.batching.rollout_share > 0,
                )
                for name, policy in policies.items()
            ]  # fmt: skip
            if not labelled and not any(replayed):
                stop.wait(config.poll_s)

    outlast("label", labelling, stop, away=wiring.database_away())


@click.command()
def loop() -> None:
    """Run one cycle per slot and policy: batch, update, judge, queue."""
    with importing():
        from pipelines.commands.maintenance.upkeep import keep_house_and_say
        from pipelines.commands.running.drafting import DUE_EVERY_S, drafting_beside
        from pipelines.commands.running.loop_ports import loop_world
        from pipelines.config import loop_config
        from pipelines.cycle import run_cycle
        from pipelines.projection import Projection, project_once
        from pipelines.schedule import Ticker, run_forever

    settings, stop = begin("loop")
    policies = wiring.load_policies(settings)
    config = loop_config(read_toml(settings.config))
    traces, clock = wiring.tracing(settings, "loop"), wiring.clock(settings)
    world = loop_world(settings, config, policies, traces=traces)
    own = shown(settings, "loop", clock)
    own.sampled("ratchet_loop_training_memory_bytes", lambda: {(): float(children_memory())})
    ended = ended_cycles(own, world.ports.cycles)

    def run(cycle: "Cycle", policy: "PolicyConfig") -> None:
        run_cycle(cycle, policy=policy, config=config, ports=world.ports)
        ended(cycle)

    tickers = [
        Ticker(
            policy=name, owner=owner(), book=world.ports.cycles, config=config.schedule, clock=clock, close_orphans=world.close_orphans,
            blocked=world.blocked, thin=world.thin,
            run=lambda cycle, policy=policy: run(cycle, policy),
        )
        for name, policy in policies.items()
    ]  # fmt: skip
    ports = world.ports
    projection = Projection(
        releases=wiring.release_ledger(settings), versions=ports.versions, weights=ports.weights, runs=ports.training.runs,
        registry=ports.registry,
    )  # fmt: skip
    repeat("projection", lambda: project_once(policies, projection), stop, every_s=PROJECT_EVERY_S, at_once=True)
    repeat("prune", pruning(settings), stop, every_s=PRUNE_EVERY_S)
    repeat("upkeep", lambda: keep_house_and_say(settings, stop), stop, every_s=HOUSE_EVERY_S)
    if config.drafting.after_answers:
        beside = drafting_beside(settings, policies, ports.cycles, config=config.drafting, owner=owner())
        repeat("drafting", partial(beside.once, stop), stop, every_s=DUE_EVERY_S)
    # In this thread, because Ray's own processes die with the thread that started them; and it takes SIGTERM, which is given back to us.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    world.warm()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    end_within(stop)  # a cycle that runs goes on elsewhere from its last durable step; waited for, it would hold us for minutes
    log.info("loop ready policies=%s slot_s=%d", ",".join(policies), config.schedule.slot_s)
    own.ready = True
    run_forever(tickers, stop)


PROJECT_EVERY_S = 60.0
PRUNE_EVERY_S = 3600.0
HOUSE_EVERY_S = 600.0
PRUNE_AGE_S = 24 * 3600.0
"""Weights younger than this are never removed: a file may be on its way to somebody who has no row yet."""


def pruning(settings: Settings) -> "Callable[[], None]":
    """Removes weights that nothing needs any more (`ratchet model prune`)."""
    from app.policy.storage.prune import prune

    rows, weights = wiring.needed_weights(settings), wiring.open_weights(settings)

    def once() -> None:
        log.info("weights pruned count=%d", len(prune(weights, known=rows.known(), needed=rows.needed, min_age_s=PRUNE_AGE_S)))

    return once


@click.command()
def api() -> None:
    """Serve the HTTP API and the console: this process becomes `python -m app.main`, because pipelines/ never imports the HTTP side."""
    os.execv(sys.executable, [sys.executable, "-m", "app.main"])


@click.command()
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; where other machines reach it, set RATCHET_ENGINE_KEY."
)
@click.option("--port", type=click.IntRange(1, 65535), default=8401, show_default=True)
@click.option("--policy", "only", multiple=True, help="Serve only this policy (repeatable); all by default.")
@click.option("--rows", type=click.IntRange(1, 1024), default=16, show_default=True, help="Sequences decoded together, per version.")
@click.option("--threads", type=click.IntRange(1), envvar="RATCHET_ENGINE_THREADS", help=(
    "CPU threads at most, all cores by default: fewer are used while fewer are faster, beside other programs."
))  # fmt: skip
@click.option("--precision", type=click.Choice(["bf16", "mxfp8", "nvfp4"]), default="bf16", envvar="RATCHET_ENGINE_PRECISION", help=(
    "Round weights to this when they are taken up, an emulation that shows mismatch and never speed; bf16, as published, by default."
))  # fmt: skip
@click.option("--vllm", metavar="URL", help="Sample nothing here: keep what is wanted on this vLLM server and report what it holds.")
@click.option("--sglang", metavar="URL", help="The same for an SGLang server.")
@click.option("--in-place", type=click.Choice(["champion", "candidate", "previous", "held"]), help=(
    "With --vllm or --sglang, and one --policy: replace the server's weights as a whole and follow this role, instead of loading adapters."
))  # fmt: skip
@click.option("--pause", type=click.Choice(["keep", "abort"]), default="keep", show_default=True, help=(
    "With --in-place: answers being written go on with the new weights and are not trained on, or end and are asked for again."
))  # fmt: skip
@click.option("--drain", "drain_s", type=click.FloatRange(0), default=0.0, show_default=True, metavar="SECONDS", help=(
    "When it is stopped: finish the answers being written, for so long at most. Other replicas get what comes meanwhile."
))  # fmt: skip
def engine(
    host: str, port: int, only: tuple[str, ...], rows: int, threads: int | None, precision: str, vllm: str | None, sglang: str | None,
    in_place: str | None, pause: str, drain_s: float,
) -> None:  # fmt: skip
    """Serve the embedded engine: every version the deployment wants, sampled over HTTP. With --vllm or --sglang: look after a server."""
    settings, stop = begin("engine")
    if vllm is not None or sglang is not None:
        if precision != "bf16":
            raise click.UsageError("--precision (RATCHET_ENGINE_PRECISION) is of the embedded engine: start the server itself in its own")
        control = wiring.server_control(settings, vllm=vllm, sglang=sglang)
        keep_server(settings, control, only=only or tuple(wiring.load_policies(settings)), role=in_place, pause=pause, stop=stop)
        return
    with importing():
        from app.policy.precision import Precision
        from app.serving.process import serve_engine

    key = engine_key(settings, host)
    address = f"http://{host}:{port}"
    ledger = wiring.engine_ledger(settings, engine_id=engine_id(settings, f"{socket.gethostname()}:{port}"), address=address)
    weights = wiring.open_weights(settings)
    serve_engine(
        ledger,
        weights,
        host=host,
        port=port,
        only=frozenset(only) or None,
        rows=rows,
        threads=threads,
        precision=Precision(precision),
        stop=stop,
        drain_s=drain_s,
        version=wiring.release_of_code(),
        region=settings.region,
        barrier=engine_barrier(settings, host),
        key=key,
    )


@click.command()
def watch() -> None:
    """Ask the live gates every second or two: abort, ramp, promote, roll back; and deliver webhooks."""
    from pipelines.config import loop_config
    from pipelines.evaluation.config import check, terms_of
    from pipelines.labelling.rule_set import parse_rule_set, starting_toml
    from pipelines.watch import Watch, WatchPorts, run_watch

    settings, stop = begin("watch")
    config = loop_config(read_toml(settings.config))
    gates, clock = config.gates, wiring.clock(settings)
    ports = WatchPorts(
        desk=wiring.release_desk(
            settings, terms=terms_of(gates, owner=owner_of(settings.config)), traces=wiring.tracing(settings, "watch")
        ),
        releases=wiring.release_ledger(settings),
        evidence=wiring.evidence_book(settings), holdouts=wiring.holdout_book(settings),
        progress=wiring.progress_log(settings), clock=clock,
    )  # fmt: skip
    policies = wiring.load_policies(settings)
    rules = wiring.rule_book(settings, starting_toml(config.labelling.rule_set, config=settings.config))
    for name in policies:
        rule_set = parse_rule_set(rules.active(name), allowed=config.labelling.allowed_terms)
        check(gates, rewarded=frozenset(term.name for term, _ in rule_set.terms))
    end_within(stop)
    courier = wiring.courier(settings)
    threading.Thread(target=courier.run, args=(stop,), name="webhooks", daemon=True).start()
    log.info("watch ready policies=%s", ",".join(policies))
    own = shown(settings, "watch", clock)
    looked, own.ready = own.histogram("ratchet_watch_tick_seconds"), True
    watches = [Watch(policy=name, config=gates, ports=ports) for name in policies]
    watching = partial(
        run_watch, watches, stop, interval_s=gates.interval_s, stopping=own.rounds(stop.is_set),
        looked=lambda policy, seconds: looked.labels(policy).observe(seconds),
    )  # fmt: skip
    outlast("watch", watching, stop, away=wiring.database_away())
