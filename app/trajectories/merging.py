"""Turns of many segments on their way into few: sorted by policy, written a row group at a time, closed at a size."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

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
        ("top_k", pa.int32()),  # segments that are older have no such column: 0, which is all
        ("precision", pa.string()),
        ("shape", pa.string()),  # JSON; segments that are older have no such column, and turns without one
        ("finished_at", pa.timestamp("us", tz="UTC")),
        ("messages", pa.string()),  # JSON: a chat has no fixed columns
        ("completion", pa.string()),
    ]
)
"""A segment's columns."""
GROUP_BYTES = 32 * 1024 * 1024
"""Of a merged segment's row groups, uncompressed: what a reader or an erasure holds in memory at a time."""


def as_now(table: pa.Table) -> pa.Table:
    """Rows of a segment that may be older than some columns, with those empty."""
    return pa.concat_tables([SCHEMA.empty_table(), table], promote_options="default")


class Writer:
    """A segment that is being written."""

    def __init__(self, writer: pq.ParquetWriter, sink: pa.NativeFile) -> None:
        self._writer, self._sink = writer, sink

    def write_table(self, table: pa.Table) -> None:
        """One more row group."""
        table = as_now(table)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))

    @property
    def bytes(self) -> int:
        """On the disk so far."""
        return int(self._sink.tell())


@contextmanager
def writing_to(path: str) -> Iterator[Writer]:
    """A segment at this path, whole at the end of the block."""
    with pa.OSFile(path, "wb") as sink, pq.ParquetWriter(sink, SCHEMA, compression="zstd") as writer:
        yield Writer(writer, sink)


class Merging:
    """The new segments of one merge. Leaving by an exception writes none of them."""

    def __init__(
        self, open_: Callable[[str], AbstractContextManager[Writer]], target: Callable[[str], str], at_most_bytes: int
    ) -> None:  # fmt: skip
        self._open, self._target, self._at_most = open_, target, at_most_bytes
        self._waiting: dict[str, list[pa.Table]] = defaultdict(list)
        self._current: dict[str, tuple[str, Writer]] = {}
        self._held: dict[str, set[str]] = {}
        self._read: dict[str, int] = defaultdict(int)
        self._files = ExitStack()

    @property
    def held(self) -> dict[str, frozenset[str]]:
        """Whose turns each new segment holds."""
        return {name: frozenset(ids) for name, ids in self._held.items()}

    def __enter__(self) -> "Merging":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._files.__exit__(kind, error, trace)
            return
        with self._files:
            for policy in sorted(self._waiting):
                self._flush(policy)

    def take(self, policy: str, table: pa.Table, *, left: int) -> None:
        """Turns of one policy; `left`: bytes of segments that were not begun yet."""
        self._waiting[policy].append(as_now(table))
        self._read[policy] += table.nbytes
        if sum(one.nbytes for one in self._waiting[policy]) >= GROUP_BYTES:
            self._flush(policy)
            self._close_where_large(policy, left * self._read[policy] / sum(self._read.values()))

    def _flush(self, policy: str) -> None:
        if policy not in self._current:
            name = self._target(policy)
            self._current[policy] = name, self._files.enter_context(self._open(name))
            self._held[name] = set()
        table = pa.concat_tables(self._waiting.pop(policy)).sort_by("inference_id")
        name, writer = self._current[policy]
        writer.write_table(table)
        self._held[name].update(table["inference_id"].to_pylist())

    def _close_where_large(self, policy: str, left: float) -> None:
        """The next turns go into another one; but what would make only a small one goes into this."""
        if self._current[policy][1].bytes >= self._at_most and left >= self._at_most / 2:
            del self._current[policy]
