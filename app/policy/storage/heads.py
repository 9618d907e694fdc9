"""Draft heads beside the versions they were trained for: two small files, added to a version that is there, removed with it.

    <digest>/draft_head.json            the record: of which version, kept or not and why, its figures, the tensors' digest
    <digest>/draft_head.safetensors     the head, where it was kept

The record is written last and says which tensors are its own: a reader in between finds a fault, and asks again. A version without a record
may use its nearest ancestor's head, which can only be slower; one whose own was refused uses none.
"""

import hashlib
from datetime import datetime
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load, save

from app.domain.errors import BadInput
from app.domain.ports import Beside
from app.policy.decoding.draft_head import CURE, DraftHead, head_of
from app.policy.storage.snapshot import HEAD, HEAD_RECORD, PARENT
from app.policy.storage.store import FARTHEST


class HeadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a training."""

    trained_for: str
    """Digest of the version."""
    kept: bool
    reason: str
    """The gate's sentence."""
    made_at: datetime
    figures: dict[str, Any]
    sha256: str | None = None
    """Of the tensors' file; None where no head was kept."""


def write_head(weights: Beside, record: HeadRecord, head: DraftHead | None) -> HeadRecord:
    """Put a head and its record beside its version, in the place of what was there; without a head the record alone, and no head stays.
    Returns the record as it was written. Raises `NotFound` where the version is gone."""
    tensors = None if head is None else save(head.tensors())
    record = msgspec.structs.replace(record, sha256=None if tensors is None else hashlib.sha256(tensors).hexdigest())
    if tensors is not None:
        weights.put_beside(record.trained_for, HEAD, tensors)
    weights.put_beside(record.trained_for, HEAD_RECORD, msgspec.json.format(msgspec.json.encode(record)))
    if tensors is None:
        weights.take_beside(record.trained_for, HEAD)
    return record


def read_record(weights: Beside, digest: str) -> HeadRecord | None:
    """A version's own record; None where it has none. Raises `BadInput`."""
    content = weights.read_beside(digest, HEAD_RECORD)
    try:
        return None if content is None else msgspec.json.decode(content, type=HeadRecord)
    except msgspec.DecodeError as error:
        raise BadInput(f"{HEAD_RECORD} of the weights {digest[:12]} is no record of a draft head ({error}): {CURE}") from error


def nearest_record(weights: Beside, digest: str) -> HeadRecord | None:
    """The version's own record, or that of the nearest ancestor that has one. Raises `BadInput`."""
    for _ in range(FARTHEST + 1):
        if (found := read_record(weights, digest)) is not None:
            return found
        parent = weights.read_beside(digest, PARENT)
        if parent is None:
            return None
        digest = parent.decode("ascii", "replace").strip()
    return None


def read_head(weights: Beside, record: HeadRecord) -> DraftHead:
    """The head of a record that kept one. Raises `BadInput` where it is not the one recorded."""
    content = weights.read_beside(record.trained_for, HEAD)
    if content is None or hashlib.sha256(content).hexdigest() != record.sha256:
        raise BadInput(f"{HEAD} of the weights {record.trained_for[:12]} is missing or is not what its record says: {CURE}")
    try:
        return head_of(load(content))
    except SafetensorError as error:
        raise BadInput(f"{HEAD} of the weights {record.trained_for[:12]} cannot be read ({error}): {CURE}") from error
