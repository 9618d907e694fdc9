"""An export: a Parquet data set of turns with their tokens and rewards, in folders `policy=…/day=…`, whole or absent.

DuckDB, Spark, pyarrow and Hugging Face `datasets` open it as it is. It is a copy: nothing that is erased or dropped later changes it.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from app.domain.errors import BadInput, Unavailable
from app.domain.learning.batches import TurnPayload
from app.domain.learning.decisions import ExportedTurn
from app.durable import sync
from app.trajectories.segments import SCHEMA, row_of

REWARDED = pa.schema(
    [
        ("segment", pa.string()),
        ("finish_reason", pa.string()),
        ("train_consent", pa.bool_()),
        ("held_out", pa.bool_()),
        ("stage", pa.string()),
        ("arm", pa.string()),
        ("probability", pa.float64()),
        ("reward", pa.float64()),
        ("terms", pa.string()),  # JSON: each term with its value, weight and detail
        ("rule_set", pa.string()),
        ("exclusion", pa.string()),
        ("labelled_at", pa.timestamp("us", tz="UTC")),
    ]
)
EXPORT = pa.unify_schemas([SCHEMA, REWARDED])
FILE_BYTES = 256 * 1024 * 1024
"""Uncompressed; a new file of the same day is begun above it."""


def write_export(
    folder: Path, pages: Iterable[Sequence[ExportedTurn]], read: Callable[[list[tuple[str, str]]], Mapping[str, TurnPayload]], *,
    file_bytes: int = FILE_BYTES,
) -> int:  # fmt: skip
    """Write the turns whose tokens are still there; returns how many. Raises `BadInput` where the folder holds something already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} holds something already: name a folder that is empty or absent")
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    files = _Files(partial, file_bytes)
    try:
        for page in pages:
            payloads = read([(turn.payload_segment, turn.inference_id) for turn in page])
            files.add([(turn, payloads[turn.inference_id]) for turn in page if turn.inference_id in payloads])
        files.close()
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(folder.parent)
    return files.rows


def exported_turns(folder: Path) -> Iterator[str]:
    """Ids of the turns of which the exports in a folder hold a copy. Raises `Unavailable` where a file cannot be read."""
    for path in sorted(folder.rglob("*.parquet")):
        try:
            yield from pq.ParquetFile(path).read(columns=["inference_id"])["inference_id"].to_pylist()
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise Unavailable(f"{path} cannot be read as an export ({error}): delete it, or move it elsewhere") from error


class _Files:
    """The files that are being written, one for each policy: turns come in order of time, so a day is over when the next one begins."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder, self._file_bytes = folder, file_bytes
        self._open: dict[str, tuple[str, pq.ParquetWriter, Path]] = {}
        self._bytes: dict[str, int] = {}
        self.rows = 0

    def add(self, turns: Sequence[tuple[ExportedTurn, TurnPayload]]) -> None:
        by_place: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for turn, payload in turns:
            by_place.setdefault((turn.policy, f"{turn.finished_at:%Y-%m-%d}"), []).append(_row(turn, payload))
        for (policy, day), rows in by_place.items():
            table = pa.Table.from_pylist(rows, schema=EXPORT)
            self._writer(policy, day).write_table(table)
            self._bytes[policy] += table.nbytes
            self.rows += len(rows)

    def close(self) -> None:
        for policy in list(self._open):
            self._close(policy)

    def _writer(self, policy: str, day: str) -> pq.ParquetWriter:
        if policy in self._open and (self._open[policy][0] != day or self._bytes[policy] > self._file_bytes):
            self._close(policy)
        if policy not in self._open:
            place = self._folder / f"policy={quote(policy, safe='')}" / f"day={day}"
            place.mkdir(parents=True, exist_ok=True)
            path = place / f"part-{len(list(place.iterdir())):05d}.parquet"
            self._open[policy] = (day, pq.ParquetWriter(path, EXPORT, compression="zstd"), path)
            self._bytes[policy] = 0
        return self._open[policy][1]

    def _close(self, policy: str) -> None:
        _, writer, path = self._open.pop(policy)
        writer.close()
        sync(path)


def _row(turn: ExportedTurn, payload: TurnPayload) -> dict[str, Any]:
    return row_of(payload) | {
        "segment": turn.segment, "finish_reason": turn.finish_reason, "train_consent": turn.train_consent, "held_out": turn.held_out,
        "stage": turn.stage, "arm": turn.arm, "probability": turn.probability, "reward": turn.reward,
        "terms": msgspec.json.encode(turn.terms).decode(), "rule_set": turn.rule_set, "exclusion": turn.exclusion,
        "labelled_at": turn.labelled_at,
    }  # fmt: skip
