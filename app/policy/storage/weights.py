"""What a set of weights is: named tensors and their digest.

The digest is SHA-256 over the tensors sorted by name; of each its name, dtype and shape as one line of text, then its bytes
(little-endian, row-major). It covers the weights only, so a snapshot keeps its digest whatever file layout carries it. A tensor
that is tied to another one (the output head to the embedding) is stored and hashed once, under the first of both names.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from app.domain.errors import BadInput

SAFETENSORS_DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64", torch.int32: "I32", torch.int8: "I8",
    torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
"""The names the safetensors format gives to dtypes. Block-scaled weights are two tensors: MXFP8 its F8_E4M3 elements and F8_E8M0 exponents,
NVFP4 its U8 pairs of four-bit elements and F8_E4M3 scales."""

HASH_CHUNK_BYTES = 16 << 20
HEADER_BYTES = 100 << 20
"""Of a safetensors file, at most: what the format's own reader takes."""
Size = Annotated[int, msgspec.Meta(ge=0)]


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """The digest of tensors in memory, on any device. Give it what a snapshot would hold: bfloat16, tied tensors once."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        digest.update(_heading(name, SAFETENSORS_DTYPES[tensor.dtype], tuple(tensor.shape)))
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digest_of_file(path: Path) -> str:
    """The same digest, from a safetensors file read front to back per tensor; nothing is held whole.

    Raises `BadInput` when the file is cut off or is not safetensors.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for name, dtype, shape, start, end in _entries(path):
            digest.update(_heading(name, dtype, shape))
            file.seek(start)
            left = end - start
            while left > 0:
                chunk = file.read(min(left, HASH_CHUNK_BYTES))
                if not chunk:
                    raise BadInput(f"{path} is cut off: fetch or publish the snapshot again")
                digest.update(chunk)
                left -= len(chunk)
    return digest.hexdigest()


def _heading(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    return f"{name} {dtype} {','.join(map(str, shape))}\n".encode()


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in a safetensors header."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


def _entries(path: Path) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """Name, dtype, shape, first and one-past-last byte of every tensor in the file, sorted by name."""
    with path.open("rb") as file:
        try:
            length = min(int.from_bytes(file.read(8), "little"), HEADER_BYTES)
            header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in header.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadInput(f"{path} is not a safetensors file: fetch or publish the snapshot again") from error
    for name, entry in sorted(entries.items()):
        start, end = entry.data_offsets
        yield name, entry.dtype, entry.shape, 8 + length + start, 8 + length + end
