"""What a forward pass keeps, in which dtype it computes, and how a process comes to a Ray that nobody else reaches."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from pipelines.training.config import Activations
from pipelines.training.numerics.activations import EXPENSIVE, Keeping
from pipelines.training.numerics.precision import resolve_dtype, resolve_name
from pipelines.training.ray_cluster import _stay_at_home  # pyright: ignore[reportPrivateUsage] - what happens before Ray is imported


class Model:
    """Writes down what it is told to keep."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def activation_checkpointing_disable(self) -> None:
        self.told.append("none")

    def activation_checkpointing_enable(self, options: dict[str, Any]) -> None:
        assert options["use_reentrant"] is False, "the other kind loses gradients of what is not passed through a layer's inputs"
        self.told.append("selective" if "context_fn" in options else "full")


@pytest.mark.parametrize(
    ("kind", "most", "rows", "told"),
    [
        ("none", 10, [5, 10, 11, 12, 10], ["full", "none"]), ("selective", 10, [10, 10, 11, 5], ["selective", "full", "selective"]),
        ("full", 10, [5, 11, 5], ["full"]), ("none", 0, [5, 10_000], []), ("selective", 0, [5, 10_000], ["selective"]),
        ("none", 1, [1, 2], ["full"]),
    ],
)  # fmt: skip
def test_a_row_that_is_too_long_keeps_the_inputs_of_the_layers_alone_and_the_next_one_what_is_configured(
    kind: Activations, most: int, rows: list[int], told: list[str]
) -> None:
    model = Model()
    keeping = Keeping(model, kind, most_tokens=most)
    for tokens in rows:
        keeping.start(tokens)
    assert model.told == told


def test_who_says_nothing_of_long_rows_has_none() -> None:
    model = Model()
    Keeping(model, "none").start(1_000_000)
    assert model.told == []


def test_what_is_dear_is_saved_and_what_is_cheap_is_computed_again() -> None:
    asked: list[dict[str, Any]] = []

    class Asked(Model):
        def activation_checkpointing_enable(self, options: dict[str, Any]) -> None:
            asked.append(options)

    Keeping(Asked(), "selective").start(1)
    policy: Any = asked[0]["context_fn"].args[0]
    aten: Any = torch.ops.aten
    assert {aten.mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default} <= EXPENSIVE
    assert all(policy(None, operation) is CheckpointPolicy.MUST_SAVE for operation in EXPENSIVE)
    assert policy(None, aten.mul.Tensor) is CheckpointPolicy.PREFER_RECOMPUTE


def test_a_named_dtype_is_itself_and_auto_is_one_of_them_and_the_same_each_time() -> None:
    assert (resolve_dtype("float32"), resolve_dtype("bfloat16")) == (torch.float32, torch.bfloat16)
    found = resolve_name("auto")
    assert found in ("float32", "bfloat16")
    assert {resolve_name("auto") for _ in range(3)} == {found}, "measured once: a run does not change its mind"
    assert resolve_dtype("auto") is {"float32": torch.float32, "bfloat16": torch.bfloat16}[found]


WANTED = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "secret"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*WANTED, "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("environment")
def test_ray_is_told_to_stay_at_home_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    os.environ["RAY_AUTH_TOKEN"] = "another deployment's"
    _stay_at_home(Path("secret"))
    assert {name: os.environ.get(name) for name in (*WANTED, "RAY_AUTH_TOKEN")} == {**WANTED, "RAY_AUTH_TOKEN": None}


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("wrong", [{}, {"RAY_AUTH_TOKEN": "x"}, {"RAY_AUTH_MODE": "none"}, {"RAY_AUTH_TOKEN_PATH": "other"}], ids=str)
def test_a_ray_that_was_imported_listens_as_it_was_told_and_cannot_be_told_again(
    wrong: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", sys)
    os.environ.update(WANTED | wrong)
    if not wrong:
        _stay_at_home(Path("secret"))
        return
    with pytest.raises(AssertionError, match="join_cluster comes first"):
        _stay_at_home(Path("secret"))
