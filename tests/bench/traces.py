"""What tracing costs ingestion: the same events with and without it, in turns. `make bench-traces` (`ARGS="--rounds 3"` for a short form)

A round takes as many turns, each with three ratings, from the gateway's span through inbox, relay, the real broker and ingestion to labels,
three times in changing order: without a collector, with one and the default share of turns, and with every turn traced. What counts is the
CPU time of this process, in which all of that and the sending of spans happens; broker and collector are processes of their own.

| bound                                                               | most |
|---------------------------------------------------------------------|------|
| `default_share`: median over rounds of the default's cost above off | .03  |

`every_turn` has no bound: a caller who asks for every trace gets it. Exit code 1 where the bound is missed.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from app.api.chat.recording import turn_event
from app.db.engine import open_engine
from app.db.migrate import upgrade
from app.domain.ids import utc_now, uuid7
from app.domain.telemetry.events import CloudEvent
from app.domain.telemetry.traceparent import TRACEPARENT
from app.settings import Settings
from app.telemetry.traces import SpanKind, Traces, open_traces
from tests.bench.ingesting.streams import PATIENCE_S, Faults, Line, label_all, until
from tests.broker import Broker, running_broker
from tests.fakes.served import START, event_of, observation, turn

MOST = 0.03
ARMS = {"off": None, "default_share": Settings.traces_share, "every_turn": 1.0}
COLLECTOR = """
import sys
from tests.collector import collecting
with collecting() as collector:
    print(collector.url, flush=True)
    sys.stdin.readline()
    print(len(collector.spans), flush=True)
"""


def main() -> int:
    """Measure and print the JSON line."""
    parser = argparse.ArgumentParser(description="What tracing costs; the last line is JSON.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turns", type=int, default=3_000, help="in each arm of each round, with three ratings each")
    given = parser.parse_args()
    summary = measure(given.rounds, given.turns)
    print(json.dumps(summary))
    return 1 if summary["default_share"]["median"] > MOST else 0


def measure(rounds: int, turns: int) -> dict[str, Any]:
    """The cost of both ways of tracing above none, round by round."""
    cost: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with collector() as (url, told):
        arms = list(ARMS)
        once(1.0, 200, url)  # imports and first times
        for number in range(rounds):
            order = arms[number % 3 :] + arms[: number % 3]
            for arm in order:
                cost[arm].append(once(ARMS[arm], turns, url))
            print(f"# round {number + 1}: {', '.join(f'{arm} {cost[arm][-1]:.2f} s' for arm in arms)}", flush=True)
        spans = told()
    return {"rounds": rounds, "turns": turns, "spans": spans, "cpu_s_off": round(statistics.median(cost["off"]), 3)} | {
        arm: compared(cost[arm], cost["off"]) for arm in ARMS if arm != "off"
    }


def compared(with_: list[float], without: list[float]) -> dict[str, float]:
    """How much more a round cost, at the median and at its ends."""
    more = sorted(one / other - 1 for one, other in zip(with_, without, strict=True))
    return {"median": round(statistics.median(more), 4), "least": round(more[0], 4), "most": round(more[-1], 4)}


def once(share: float | None, turns: int, url: str) -> float:
    """CPU seconds of this process for so many turns."""
    traces = open_traces(None if share is None else url, process="bench", share=share or 0.0)
    with tempfile.TemporaryDirectory() as name, running_broker(Path(name)) as broker:
        made = line(Path(name), broker, traces)
        gc.collect()
        gc.freeze()
        began = time.process_time()
        said = [event for number in range(turns) for event in served(number, traces)]
        made.take(said)
        until(made.term.send_inbox, len(said), PATIENCE_S)
        until(made.member.step, len(said), PATIENCE_S)
        label_all(made.engine, traces)
        traces.close()  # what waits is sent within the time that counts
        spent = time.process_time() - began
        made.close()
        gc.unfreeze()
    return spent


def line(folder: Path, broker: Broker, traces: Traces) -> Line:
    """Inbox, relay and ingestion over a fresh database."""
    upgrade(f"sqlite:///{folder}/state.db")
    return Line(open_engine(f"sqlite:///{folder}/state.db"), folder, broker, Faults(traces=traces))


def served(number: int, traces: Traces) -> list[CloudEvent]:
    """A turn as the gateway makes it, and three ratings of it, all in time."""
    id_, ended_s = str(uuid7()), (utc_now() - START).total_seconds() - 600
    made = turn(id_, finished=ended_s, actor=f"actor-{number % 999}")
    span = traces.begin(
        "chat composer", kind=SpanKind.SERVER, gen_ai__operation__name="chat", gen_ai__request__model="composer", ratchet__inference_id=id_,
        ratchet__episode_id=made.episode_id, ratchet__version="v" * 64, ratchet__arm="champion",
    )  # fmt: skip
    if span is not None:
        made = msgspec.structs.replace(made, tags={TRACEPARENT: span.traceparent})
        with traces.span("commit", parent=span.traceparent, kind=SpanKind.PRODUCER):
            pass
        span.set(gen_ai__usage__input_tokens=3, gen_ai__usage__output_tokens=2, gen_ai__response__finish_reason="stop")
        span.end()
    said = [observation(str(uuid7()), of=id_, value=0.5, occurred=ended_s + second) for second in (5, 10, 15)]
    return [turn_event(made), *(event_of(one) for one in said)]


@contextmanager
def collector() -> Iterator[tuple[str, Any]]:
    """A collector in a process of its own: its address, and how many spans it has at the end."""
    with subprocess.Popen([sys.executable, "-c", COLLECTOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None

        def told() -> int:
            assert running.stdin is not None
            assert running.stdout is not None
            running.stdin.write("\n")
            running.stdin.flush()
            return int(running.stdout.readline())

        try:
            yield running.stdout.readline().strip(), told
        finally:
            running.kill()


if __name__ == "__main__":
    sys.exit(main())
