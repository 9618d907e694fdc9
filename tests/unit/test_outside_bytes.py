"""Every parser of bytes from outside, given what strangers send (`tests/data/outside`), whole and damaged: a sentence, never a crash."""

import re
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load
from starlette.testclient import TestClient

from app.domain.errors import BadInput, RatchetError
from app.main import create_app
from app.policy.storage.delta import apply_delta, read_head
from app.policy.storage.weights import digest_of_file
from app.trajectories.segments import ParquetSegments
from pipelines.labelling.rule_set import parse_rule_set
from tests.fakes.gateway import collaborators
from tests.fakes.inbox import MemoryInbox

OUTSIDE = Path(__file__).parents[1] / "data" / "outside"
BODIES = sorted(OUTSIDE.glob("*.http"))
PIECES = (
    b"null", b"-1", b"1e999", b"NaN", b'"\\ud800"', b'"\\u0000"', b"\x00", b"\xff\xfe", b"{", b"}", b"[", b'"', b"[" * 3000, b"9" * 400,
    b"true", b'{"$ref":"#"}', b'"1970-01-01"', b"-0", b"''",
)  # fmt: skip
KINDS = ("cut", "twice", "flip", "piece", "end")
EXAMPLES = settings(
    max_examples=15, deadline=None, phases=[Phase.generate], derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType] - the enumeration iterates over its members
)  # fmt: skip

Damage = Callable[[bytes], bytes]


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    """One to four pieces cut out, said twice, flipped or replaced."""
    changes = draw(
        st.lists(
            st.tuples(st.floats(0, 1), st.integers(0, 40), st.sampled_from(KINDS), st.sampled_from(PIECES)),
            min_size=1, max_size=4,
        )
    )  # fmt: skip

    def damage(whole: bytes) -> bytes:
        for where, length, kind, piece in changes:
            at = int(where * len(whole))
            before, part, after = whole[:at], whole[at : at + length], whole[at + length :]
            by_kind = {
                "cut": before + after, "twice": before + part + part + after, "flip": before + bytes(255 - byte for byte in part) + after,
                "piece": before + piece + after, "end": before,
            }  # fmt: skip
            whole = by_kind[kind]
        return whole

    return damage


def asked_in(file: Path) -> tuple[str, str, dict[str, str], bytes]:
    """Method, path, headers and body: a line `METHOD PATH TYPE`, a line for each header more, an empty one, the body."""
    head, _, body = file.read_bytes().partition(b"\n\n")
    first, *more = head.decode().split("\n")
    method, path, kind = first.split(" ")
    return method, path, {"content-type": kind} | dict(line.split(": ", 1) for line in more), body


def test_every_body_that_products_and_other_systems_send_is_in_the_corpus_in_every_form() -> None:
    sent = [(method, path.partition("?")[0], headers["content-type"]) for method, path, headers, _ in map(asked_in, BODIES)]
    asked = {
        (method.upper(), path, kind) for path, operations in create_app(collaborators()).openapi()["paths"].items()
        for method, operation in operations.items() for kind in operation.get("requestBody", {}).get("content", {})
    }  # fmt: skip
    assert len(asked) > 20
    also_sent = {("POST", "/api/public/otel/v1/traces", "application/json")}  # read by what reads /v1/traces
    lacking = [
        (method, path, kind) for method, path, kind in sorted(asked - also_sent)
        if not any(method == by and kind == form and re.fullmatch(re.sub(r"{\w+}", "[^/]+", path), to) for by, to, form in sent)
    ]  # fmt: skip
    assert lacking == []


@pytest.mark.parametrize("file", BODIES, ids=lambda file: file.stem)
def test_an_endpoint_takes_what_strangers_send_and_stores_nothing_of_what_it_refuses(file: Path) -> None:
    inbox = MemoryInbox()
    client = TestClient(create_app(collaborators(inbox=inbox)), raise_server_exceptions=False)
    method, path, headers, body = asked_in(file)

    def send(content: bytes) -> int:
        before = len(inbox.events)
        answer = client.request(method, path, content=content, headers=headers)
        assert answer.status_code < 500 or answer.json()["error"]["code"] == "engine_error", f"{answer.text} for {content!r}"
        if answer.status_code >= 400:
            assert len(inbox.events) == before, content
        return answer.status_code

    first = send(body)
    assert first < 300 or file.stem in ("areal", "langsmith_update"), "the body as it is means something"

    @EXAMPLES
    @given(damage=damages())
    def damaged(damage: Damage) -> None:
        send(damage(body))

    damaged()


@EXAMPLES
@given(damage=damages())
def test_a_damaged_rule_file_is_a_sentence(damage: Damage) -> None:
    text = (OUTSIDE / "rules.toml").read_bytes()
    assert parse_rule_set(text.decode()).config.name == "outside"
    try:
        parse_rule_set(damage(text).decode("utf-8", "replace"))
    except RatchetError as error:
        assert str(error)


BASE = load((OUTSIDE / "base.safetensors").read_bytes())
DELTAS = sorted(OUTSIDE.glob("*.delta"))


@pytest.mark.parametrize("file", DELTAS, ids=lambda file: file.stem)
def test_a_damaged_delta_is_a_sentence_or_the_same_weights(file: Path) -> None:
    """Of every format that engines read: the newest one relative and overwriting, and both before it."""
    whole = file.read_bytes()
    assert {delta.read_bytes()[:9] for delta in DELTAS} == {b"RATCHETD1", b"RATCHETD2", b"RATCHETD3"}
    base = {name: BASE[name] for name in ("a", "b", "old")} if file.stem == "first" else BASE
    newer = apply_delta(base, whole)

    @settings(EXAMPLES, max_examples=60)
    @given(damage=damages())
    def damaged(damage: Damage) -> None:
        try:
            read_head(damage(whole))
            made = apply_delta(base, damage(whole))
        except RatchetError as error:
            assert str(error)
        else:
            assert made.keys() == newer.keys()
            assert all(torch.equal(made[name], newer[name]) for name in newer)

    damaged()


@EXAMPLES
@given(damage=damages(), length=st.one_of(st.none(), st.integers(0, 2**64 - 1)))
def test_a_damaged_safetensors_file_is_a_sentence_or_another_digest(
    tmp_path_factory: pytest.TempPathFactory, damage: Damage, length: int | None
) -> None:
    whole = (OUTSIDE / "base.safetensors").read_bytes()
    file = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    file.write_bytes(whole)
    true = digest_of_file(file)
    broken = damage(whole) if length is None else struct.pack("<Q", length) + damage(whole)[8:]
    file.write_bytes(broken)
    try:
        found = digest_of_file(file)
    except BadInput as error:
        assert str(error)
    else:
        if found == true:
            with suppress(SafetensorError):
                assert all(torch.equal(tensor, BASE[name]) for name, tensor in load(broken).items())


@pytest.mark.parametrize(
    "header", [b"[]", b"{}", b'{"a": 1}', b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0]}}', b"[" * 100_000]
)
def test_a_header_of_another_form_is_a_sentence(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    if header == b"{}":
        assert digest_of_file(file)
        return
    with pytest.raises(BadInput, match="is not a safetensors file"):
        digest_of_file(file)


@EXAMPLES
@given(damage=damages())
def test_a_damaged_segment_is_an_error_or_read(tmp_path_factory: pytest.TempPathFactory, damage: Damage) -> None:
    folder = tmp_path_factory.getbasetemp() / "segments"
    store = ParquetSegments(str(folder))
    whole = (OUTSIDE / "segment.parquet").read_bytes()
    folder.mkdir(exist_ok=True)
    (folder / "one.parquet").write_bytes(whole)
    assert store.read([("one", "a")])["a"].completion_tokens == (3,)
    (folder / "one.parquet").write_bytes(damage(whole))
    with suppress(pa.ArrowException, OSError, ValueError, RatchetError):
        store.read([("one", "a")])
