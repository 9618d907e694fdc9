"""`ratchet collect`: watches a working tree and reports how the model's edits persist in it.

An editor registers an edit over HTTP on loopback (`POST /edits`, see `collecting.door`), or by dropping a JSON file into the spool folder
(write it elsewhere, then move it there):

    {"inference_id": "…", "path": "src/a.py", "before": "the whole file before", "start": 120, "replaced": 0, "inserted": "the new text"}

At each horizon after that, the region of the edit is carried through whatever happened to the file since, moves included, and what stands
there now goes to `POST /v1/events` as a `RawEdit`; the rest of the file never leaves the machine. Observation ends, and later horizons are
censored, when the editor says so or the branch is changed; a horizon that passed while nobody watched is left out, because nobody knows.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click
import httpx

from app.logging import configure
from app.stopping import until_told
from pipelines.commands.collecting.door import open_door
from pipelines.commands.collecting.spool import Spool

log = logging.getLogger(__name__)
HORIZONS_S = (0.0, 5.0, 30.0, 120.0, 300.0, 600.0, 900.0)
"""Of the published measure (facts/rl.md, section 5.2)."""
BUSY = (429, 500, 502, 503)


def watch(spool: Spool, client: httpx.Client, stop: threading.Event, *, poll_s: float, clock: Callable[[], float] = time.time) -> None:
    """Report what is due until told to stop; what the service did not take is tried again, what it refuses is logged."""
    while not stop.is_set():
        for report in spool.due(clock()):
            try:
                response = client.post("/v1/events", json=report.event)
            except httpx.TransportError as error:
                log.warning("service away, trying again error=%s", error)
                break
            if response.status_code in BUSY:
                log.warning("service busy, trying again status=%d", response.status_code)
                break
            if response.status_code >= 400:
                log.error("refused file=%s status=%d answer=%s", report.file.name, response.status_code, response.text[:300])
            else:
                log.info("reported turn=%s horizon_s=%g", report.event["inference_id"], report.horizon_s)
            spool.done(report)
        stop.wait(poll_s)


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--url", default="http://127.0.0.1:8400", show_default=True, help="The service.")
@click.option("--key", envvar="RATCHET_API_KEY", required=True, help="API key that may ingest; better in RATCHET_API_KEY.")
@click.option("--spool", type=click.Path(file_okay=False, path_type=Path), help="Where edits are dropped; DIRECTORY/.ratchet/edits.")
@click.option("--port", type=click.IntRange(0, 65535), default=8410, show_default=True, help="Where editors register edits; 0: a free one.")
@click.option("--horizon", "horizons", type=click.FloatRange(min=0), multiple=True, default=HORIZONS_S, show_default=True)
@click.option("--poll", "poll_s", type=click.FloatRange(min=0.05), default=1.0, show_default=True, help="Seconds between two looks.")
def collect(directory: Path, url: str, key: str, spool: Path | None, port: int, horizons: tuple[float, ...], poll_s: float) -> None:
    """Watch DIRECTORY (a git tree or any folder) and report how registered edits persist in it, at each horizon (seconds)."""
    configure("collect", "INFO")
    stop = until_told()
    edits = Spool(spool or directory / ".ratchet" / "edits", directory, horizons)
    headers = {"Authorization": f"Bearer {key}"}
    with open_door(edits, port) as at, httpx.Client(base_url=url, headers=headers, timeout=10.0) as client:
        log.info("collect ready directory=%s edits=http://127.0.0.1:%d/edits", directory, at)
        watch(edits, client, stop, poll_s=poll_s)
