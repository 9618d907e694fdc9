"""Segments: immutable Parquet files (zstd) of token payloads, in a local folder or under s3://bucket/prefix.

A segment is whole or absent: it is written beside its place, synchronised, and renamed (S3: an object appears when its upload ends).
What is in one never changes: when a person is erased, it is copied without them under a new name. One holds what one transaction of
ingestion brought; those of a day that is over are merged into large ones, a policy each (`merge`), which are read and copied a row group
at a time. A turn too large for an event has a segment of its own (`claims/`), written by the gateway; the turn's row points at it like at
any other, and it is not merged.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pyarrow.compute import equal, field, invert, is_in  # type: ignore[attr-defined] - made at import
from pyarrow.dataset import dataset

from app.domain.errors import BadConfig, BadInput, BadRequest, Unavailable
from app.domain.learning.batches import TurnPayload
from app.domain.telemetry.turns import PayloadClaim, Shape
from app.durable import sync
from app.trajectories.merging import GROUP_BYTES, SCHEMA, Merging, Writer, writing_to


class _Noted(msgspec.Struct, frozen=True):
    actor: str
    erased_at: datetime


CLAIM = "claim-"
"""Segments that begin so hold one turn each and were written before its event."""


class ParquetSegments:
    """The TrajectoryStore and Claims ports. `moved` tells where turns lie now whose segment was merged since somebody looked."""

    def __init__(self, location: str, *, moved: Callable[[Collection[str]], Mapping[str, str]] = lambda ids: {}) -> None:
        self._filesystem, self._root = _open(location)
        self._moved = moved

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
        asked = list(locations)
        found = self._read_all(asked)
        missing = {inference_id: name for name, inference_id in asked if inference_id not in found}
        if missing:
            now = self._moved(missing.keys())
            found |= self._read_all([(now[id_], id_) for id_, name in missing.items() if now.get(id_, name) != name])
        return found

    def _read_all(self, locations: Iterable[tuple[str, str]]) -> dict[str, TurnPayload]:
        wanted: dict[str, list[str]] = {}
        for name, inference_id in locations:
            wanted.setdefault(name, []).append(inference_id)
        return {payload.inference_id: payload for name, ids in wanted.items() for payload in self._read(name, ids)}

    def copy(self, name: str, to: str, *, without: Collection[str]) -> int:
        """Write a segment's turns, without these, into another, a row group at a time; returns its bytes. 0 where there is no such file."""
        try:
            with self._filesystem.open_input_file(self._path(name)) as source, self._replacing(self._path(to)) as writer:
                file = pq.ParquetFile(source)
                for number in range(file.num_row_groups):
                    group = file.read_row_group(number)
                    kept = group.filter(invert(_is_in(group, without)))
                    if kept.num_rows:
                        writer.write_table(kept)
        except FileNotFoundError:
            return 0
        return self.size(to)

    def merge(self, sources: Mapping[str, int], *, target: Callable[[str], str], at_most_bytes: int) -> dict[str, frozenset[str]]:
        """Write the turns of these segments (name and bytes) into one for each policy, or several of about that size, each named by
        `target(policy)`; returns whose turns each new one holds.

        The sources stay. A source that is absent has nothing to give. One pass, some row groups in memory.
        """
        left = sum(sources.values())
        with Merging(lambda name: self._replacing(self._path(name)), target, at_most_bytes) as merging:
            for source, size in sources.items():
                left -= size
                for group in self._groups(source):
                    for policy in sorted(group["policy"].unique().to_pylist()):
                        merging.take(policy, group.filter(equal(group["policy"], policy)), left=left)
        return merging.held

    def _groups(self, name: str) -> Iterator[pa.Table]:
        try:
            with self._filesystem.open_input_file(self._path(name)) as source:
                file = pq.ParquetFile(source)
                for number in range(file.num_row_groups):
                    yield file.read_row_group(number)
        except FileNotFoundError:
            return

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

    def note_erasure(self, actor: str, moment: datetime) -> None:
        """Leave word that somebody was forgotten: a database restored to before that does not know it. A pseudonym, nothing else."""
        path = f"{self._root}/erasures/{actor}.json"
        self._filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        self._put(path, msgspec.json.encode({"actor": actor, "erased_at": moment}))

    def noted_erasures(self) -> dict[str, datetime]:
        """When each of the people of whom word was left was forgotten last."""
        found = self._filesystem.get_file_info(pafs.FileSelector(f"{self._root}/erasures", allow_not_found=True))
        noted = (msgspec.json.decode(self._bytes(info.path), type=_Noted) for info in found if info.base_name.endswith(".json"))
        return {note.actor: note.erased_at for note in noted}

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

    def _put(self, path: str, content: bytes) -> None:
        """A small file, whole and on the disk when this returns."""
        is_local = isinstance(self._filesystem, pafs.LocalFileSystem)
        partial = f"{path}.{os.getpid()}.partial" if is_local else path
        with self._filesystem.open_output_stream(partial) as stream:
            stream.write(content)
        if is_local:
            sync(Path(partial))
            os.replace(partial, path)
            sync(Path(path).parent)

    def _read(self, name: str, ids: Sequence[str]) -> list[TurnPayload]:
        """Row groups whose statistics say that none of the turns is in them are not read."""
        try:
            table = dataset(self._path(name), filesystem=self._filesystem, format="parquet", schema=SCHEMA).to_table(
                filter=field("inference_id").isin(sorted(ids))
            )
        except FileNotFoundError:
            return []
        return [_payload(row) for row in table.to_pylist()]

    def _replace(self, path: str, table: pa.Table) -> None:
        with self._replacing(path) as writer:
            writer.write_table(table)

    @contextmanager
    def _replacing(self, path: str) -> Iterator["Writer"]:
        """A writer whose file takes the place of `path` when everything is in it, and only then."""
        if not isinstance(self._filesystem, pafs.LocalFileSystem):
            with tempfile.NamedTemporaryFile() as whole:  # an upload that breaks off half-way would leave half an object
                with writing_to(whole.name) as writer:
                    yield writer
                with self._filesystem.open_output_stream(path) as stream:
                    shutil.copyfileobj(whole, stream, GROUP_BYTES)
            return
        partial = f"{path}.{os.getpid()}.partial"
        try:
            with writing_to(partial) as writer:
                yield writer
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
        sync(Path(partial))
        os.replace(partial, path)
        sync(Path(path).parent)


def _open(location: str) -> tuple[Any, str]:
    if location.startswith("s3://"):
        try:
            filesystem, root = pafs.FileSystem.from_uri(location)
            if not root:
                raise pa.ArrowInvalid("it names no bucket")
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
    """Raises `BadRequest` where a number has no room in its column."""
    try:
        rows = [row_of(payload) for payload in sorted(payloads, key=lambda payload: payload.inference_id)]
        return pa.Table.from_pylist(rows, schema=SCHEMA)
    except (pa.ArrowInvalid, OverflowError) as error:
        raise BadRequest(f"a segment has no room for what a turn says: {error}") from error


def row_of(payload: TurnPayload) -> dict[str, Any]:
    """A payload as a row of `SCHEMA`."""
    return {
        "inference_id": payload.inference_id, "episode_id": payload.episode_id, "policy": payload.policy, "version": payload.version,
        "prompt_tokens": np.asarray(payload.prompt_tokens, dtype=np.int32), "completion_tokens": payload.completion_tokens,
        "logprobs": payload.logprobs, "routed_experts": payload.routed_experts, "kept_log_mass": payload.kept_log_mass,
        "temperature": payload.temperature, "top_p": payload.top_p, "top_k": payload.top_k, "precision": payload.precision,
        "shape": None if payload.shape is None else msgspec.json.encode(payload.shape).decode(),
        "finished_at": payload.finished_at, "messages": msgspec.json.encode(payload.messages).decode(), "completion": payload.completion,
    }  # fmt: skip


def _payload(row: dict[str, Any]) -> TurnPayload:
    experts, shape = row["routed_experts"], row.get("shape")
    return TurnPayload(
        inference_id=row["inference_id"], episode_id=row["episode_id"], policy=row["policy"], version=row["version"],
        prompt_tokens=tuple(row["prompt_tokens"]), completion_tokens=tuple(row["completion_tokens"]),
        logprobs=None if row["logprobs"] is None else tuple(row["logprobs"]),
        routed_experts=None if experts is None else tuple(tuple(tuple(layer) for layer in token) for token in experts),
        kept_log_mass=None if row["kept_log_mass"] is None else tuple(row["kept_log_mass"]),
        temperature=row["temperature"], top_p=row["top_p"], top_k=row.get("top_k") or 0, precision=row.get("precision") or "",
        shape=None if shape is None else msgspec.json.decode(shape, type=Shape), finished_at=row["finished_at"],
        messages=tuple(msgspec.json.decode(row["messages"])), completion=row["completion"],
    )  # fmt: skip
