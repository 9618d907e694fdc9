"""Text from Parquet files, for continued pretraining."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

from app.domain.errors import BadInput


def read_texts(file: Path, *, rows: int = 256) -> Iterator[tuple[str, str, str]]:
    """(name, domain, text) of every row: column `text`, and `domain` and `name` where there are such. Raises `BadInput`."""
    parquet = pq.ParquetFile(file)
    columns = set(parquet.schema_arrow.names)
    if "text" not in columns:
        raise BadInput(f"{file} has no column `text` (it has {', '.join(sorted(columns))}): rename the one that holds the text")
    wanted = [name for name in ("text", "domain", "name") if name in columns]
    place = 0
    for batch in parquet.iter_batches(batch_size=rows, columns=wanted):
        for row in batch.to_pylist():
            if row["text"]:
                yield str(row.get("name") or f"{file.name}:{place}"), str(row.get("domain") or "all"), str(row["text"])
            place += 1
