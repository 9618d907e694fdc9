"""Segments: immutable Parquet files (zstd) of token payloads, in a local folder or under s3://bucket/prefix.

A segment is whole or absent: it is written beside its place, synchronised, and renamed (S3: an object appears when its upload ends).
The only change ever made to one is leaving turns out of it when their person is erased. Small segments are not merged: one holds what one
transaction of ingestion brought, so a quiet product has many small files. A turn too large for an event has a segment of its own
(`claims/`), written by the gateway; the turn's row points at it like at any other.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pyarrow.compute import invert, is_in  # type: ignore[attr-defined] - made at import

from app.domain.batches import TurnPayload
from app.domain.errors import BadConfig, BadInput, Unavailable
from app.domain.turns import PayloadClaim
from app.durable import sync

SCHEMA = pa.schema(
    [
        ("inference_id", pa.string()),
        ("episode_id", pa.string()),
        ("policy", pa.string()),
        ("version", pa.string()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("completion_tokens", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float64())),
        ("routed_experts", pa.list_(pa.list_(pa.list_(pa.int16())))),
        ("kept_log_mass", pa.list_(pa.float64())),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("finished_at", pa.timestamp("us", tz="UTC")),
        ("messages", pa.string()),  # JSON: a chat has no fixed columns
        ("completion", pa.string()),
    ]
)


CLAIM = "claim-"
"""Segments that begin so hold one turn each and were written before its event."""


class ParquetSegments:
    """The TrajectoryStore and Claims ports."""

    def __init__(self, location: str) -> None:
        self._filesystem, self._root = _open(location)

    def write(self, name: str, payloads: Sequence[TurnPayload]) -> str:
        """Write one segment; the same name and payloads again change nothing. Returns the name."""
        self._replace(self._path(name), _table(payloads))
        return name

    def write_sized(self, name: str, payloads: Sequence[TurnPayload]) -> int:
        """`write`, answering the segment's size in bytes."""
        return self.size(self.write(name, payloads))

    def size(self, name: str) -> int:
        """Bytes of a segment; 0 where there is none."""
        return self._filesystem.get_file_info(self._path(name)).size or 0

    def read(self, locations: Iterable[tuple[str, str]]) -> dict[str, TurnPayload]:
        """Payloads by inference id for (segment, inference_id) pairs; what is gone is absent from the answer."""
        wanted: dict[str, list[str]] = {}
        for name, inference_id in locations:
            wanted.setdefault(name, []).append(inference_id)
        return {payload.inference_id: payload for name, ids in wanted.items() for payload in self._read(name, ids)}

    def erase(self, name: str, inference_ids: frozenset[str] | None) -> int:
        """Rewrite a segment without these turns; returns how many were removed. An empty one is deleted; None deletes it unread."""
        path = self._path(name)
        if inference_ids is None:
            return self._remove(path)
        table = self._load(path)
        if table is None:
            return 0
        kept = table.filter(invert(_is_in(table, inference_ids)))
        removed = table.num_rows - kept.num_rows
        if not kept.num_rows:
            self._filesystem.delete_file(path)
        elif removed:
            self._replace(path, kept)
        return removed

    def deposit(self, payload: TurnPayload) -> PayloadClaim:
        """The Claims port: a segment of one turn, named after it. Raises `Unavailable` where the store does not take it."""
        name = CLAIM + hashlib.blake2b(payload.inference_id.encode(), digest_size=16).hexdigest()
        path = self._path(name)
        try:
            self._filesystem.create_dir(path.rpartition("/")[0], recursive=True)
            self._replace(path, _table([payload]))
            content = self._bytes(path)
        except OSError as error:
            raise Unavailable(f"the trajectory store does not take a payload ({error}): check its space and its address") from error
        return PayloadClaim(segment=name, digest=_digest(content), bytes=len(content), has_logprobs=payload.logprobs is not None)

    def holds(self, claim: PayloadClaim) -> bool:
        """Whether the claimed segment is there as it was written. Raises `Unavailable` where the store does not answer."""
        if not claim.segment.startswith(CLAIM):
            return False
        try:
            return _digest(self._bytes(self._path(claim.segment))) == claim.digest
        except (FileNotFoundError, BadInput):
            return False
        except OSError as error:
            raise Unavailable(f"the trajectory store does not answer ({error}): check its address and its credentials") from error

    def drop(self, name: str) -> None:
        """Delete a segment; one that is gone already is fine."""
        try:
            self._filesystem.delete_file(self._path(name))
        except FileNotFoundError:
            return

    def claims(self, before: datetime) -> list[str]:
        """Names of claimed segments that were written before a moment."""
        found = self._filesystem.get_file_info(pafs.FileSelector(f"{self._root}/claims", allow_not_found=True))
        return [info.base_name.removesuffix(".parquet") for info in found if info.base_name.startswith(CLAIM) and info.mtime < before]

    def names(self) -> list[str]:
        """Every segment there is."""
        found = self._filesystem.get_file_info(pafs.FileSelector(self._root, allow_not_found=True))
        return sorted(info.base_name.removesuffix(".parquet") for info in found if info.base_name.endswith(".parquet"))

    def unchanged_since(self, name: str) -> datetime | None:
        """When the file was last written; None where there is none."""
        return self._filesystem.get_file_info(self._path(name)).mtime

    def turns(self, name: str) -> list[str]:
        """Ids of the turns whose words a segment holds, without reading the words."""
        try:
            with self._filesystem.open_input_file(self._path(name)) as file:
                return pq.read_table(file, columns=["inference_id"])["inference_id"].to_pylist()
        except FileNotFoundError:
            return []

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        if not name or "/" in name or name.startswith("."):
            raise BadInput(f"{name!r} is no name of a segment: use topic-partition-offset")
        return f"{self._root}/{'claims/' if name.startswith(CLAIM) else ''}{name}.parquet"

    def _bytes(self, path: str) -> bytes:
        with self._filesystem.open_input_stream(path) as stream:
            return bytes(stream.read())

    def _remove(self, path: str) -> int:
        try:
            with self._filesystem.open_input_file(path) as file:
                rows = pq.ParquetFile(file).metadata.num_rows
        except (FileNotFoundError, pa.ArrowInvalid):  # never written, or by a process that was killed in the middle
            rows = 0
        if self._filesystem.get_file_info(path).type != pafs.FileType.NotFound:
            self._filesystem.delete_file(path)
        return rows

    def _read(self, name: str, ids: Sequence[str]) -> list[TurnPayload]:
        table = self._load(self._path(name))
        return [] if table is None else [_payload(row) for row in table.filter(_is_in(table, ids)).to_pylist()]

    def _load(self, path: str) -> pa.Table | None:
        try:
            with self._filesystem.open_input_file(path) as file:
                return pq.read_table(file)
        except FileNotFoundError:
            return None

    def _replace(self, path: str, table: pa.Table) -> None:
        if not isinstance(self._filesystem, pafs.LocalFileSystem):
            with self._filesystem.open_output_stream(path) as stream:
                pq.write_table(table, stream, compression="zstd")
            return
        partial = f"{path}.{os.getpid()}.partial"
        pq.write_table(table, partial, compression="zstd")
        sync(Path(partial))
        os.replace(partial, path)
        sync(Path(path).parent)


def _open(location: str) -> tuple[Any, str]:
    if location.startswith("s3://"):
        try:
            filesystem, root = pafs.FileSystem.from_uri(location)
        except (pa.ArrowInvalid, OSError) as error:
            raise BadConfig(f"RATCHET_SEGMENTS is {location!r}, which cannot be opened ({error}): use s3://bucket/prefix") from error
        return filesystem, root.rstrip("/")
    root = Path(location).resolve()
    root.mkdir(parents=True, exist_ok=True)
    return pafs.LocalFileSystem(), str(root)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _is_in(table: pa.Table, ids: Iterable[str]) -> Any:  # noqa: ANN401 - pyarrow ships no types
    return is_in(table["inference_id"], value_set=pa.array(sorted(ids), pa.string()))


def _table(payloads: Sequence[TurnPayload]) -> pa.Table:
    rows = [_row(payload) for payload in sorted(payloads, key=lambda payload: payload.inference_id)]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _row(payload: TurnPayload) -> dict[str, Any]:
    return {
        "inference_id": payload.inference_id, "episode_id": payload.episode_id, "policy": payload.policy, "version": payload.version,
        "prompt_tokens": payload.prompt_tokens, "completion_tokens": payload.completion_tokens, "logprobs": payload.logprobs,
        "routed_experts": payload.routed_experts, "kept_log_mass": payload.kept_log_mass, "temperature": payload.temperature,
        "top_p": payload.top_p,
        "finished_at": payload.finished_at, "messages": msgspec.json.encode(payload.messages).decode(), "completion": payload.completion,
    }  # fmt: skip


def _payload(row: dict[str, Any]) -> TurnPayload:
    experts = row["routed_experts"]
    return TurnPayload(
        inference_id=row["inference_id"], episode_id=row["episode_id"], policy=row["policy"], version=row["version"],
        prompt_tokens=tuple(row["prompt_tokens"]), completion_tokens=tuple(row["completion_tokens"]),
        logprobs=None if row["logprobs"] is None else tuple(row["logprobs"]),
        routed_experts=None if experts is None else tuple(tuple(tuple(layer) for layer in token) for token in experts),
        kept_log_mass=None if row["kept_log_mass"] is None else tuple(row["kept_log_mass"]),
        temperature=row["temperature"], top_p=row["top_p"], finished_at=row["finished_at"],
        messages=tuple(msgspec.json.decode(row["messages"])), completion=row["completion"],
    )  # fmt: skip
