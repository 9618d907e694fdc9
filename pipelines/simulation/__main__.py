"""`python -m pipelines.simulation`: the simulated product as a process of its own, on the far side of the HTTP API."""

import asyncio
import contextlib
import logging
import random
import signal
from pathlib import Path

import click

from pipelines.simulation.client import Service
from pipelines.simulation.diary import Diary
from pipelines.simulation.product import Editor
from pipelines.simulation.traffic import Tally, Traffic, drive

log = logging.getLogger("simulation")


@click.command()
@click.option("--url", required=True, help="Address of the service, such as http://127.0.0.1:8400.")
@click.option("--api-key", default="none", help="Key with the scope `ingest`; anything where the service runs without keys.")
@click.option("--policy", default="composer")
@click.option("--seed", type=int, default=1)
@click.option("--people", type=int, default=5000)
@click.option("--panel", is_flag=True, help="Held-out people with held-out problems, who never consent to training.")
@click.option("--concurrency", type=int, default=24)
@click.option("--turns", type=int, default=None, help="Stop after this many answers.")
@click.option("--max-tokens", type=int, default=48)
@click.option("--horizons", default="0,2", help="Seconds after which edits are looked at, compressed like the slot.")
@click.option("--ledger", type=click.Path(path_type=Path), default=None)
@click.option("--diary", type=click.Path(path_type=Path), default=None, help="Write a line of JSON about every answer to this file.")
def simulate(
    url: str, api_key: str, policy: str, seed: int, people: int, panel: bool, concurrency: int, turns: int | None,
    max_tokens: int, horizons: str, ledger: Path | None, diary: Path | None,
) -> None:  # fmt: skip
    """Let simulated people use the product behind URL."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    for library in ("httpx", "httpx2", "openai"):
        logging.getLogger(library).setLevel(logging.WARNING)
    traffic = Traffic(
        seed=seed, people=people, held_out=panel, concurrency=concurrency, turns=turns,
        horizons_s=tuple(float(h) for h in horizons.split(",")), ledger=ledger,
        diary=Diary(diary) if diary is not None else None,
    )  # fmt: skip
    random.seed(seed)
    asyncio.run(_run(Service(url, api_key=api_key, policy=policy, max_tokens=max_tokens), Editor(), traffic))


async def _run(service: Service, product: Editor, traffic: Traffic) -> None:
    tally = Tally()
    driving = asyncio.create_task(drive(service, product, traffic, tally))
    loop = asyncio.get_running_loop()
    for stop in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(stop, driving.cancel)
    company = [asyncio.create_task(_tell(tally)), asyncio.create_task(service.send())]
    with contextlib.suppress(asyncio.CancelledError):
        await driving
    for task in company:
        task.cancel()
    await service.close()
    log.info("ended %s", tally.line())


async def _tell(tally: Tally) -> None:
    while True:
        await asyncio.sleep(5)
        log.info("%s", tally.line())


if __name__ == "__main__":
    simulate()
