"""Load a snapshot into a model that samples and scores: `Policy` is the model, its chat format and the digest it was verified to have."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from app.domain.errors import BadInput
from app.policy.chat import Chat
from app.policy.decoding.attention import IMPLEMENTATION, register_attention
from app.policy.decoding.grammars import Grammars
from app.policy.packing.linear import pack
from app.policy.packing.products import can_pack, compute_dtype
from app.policy.precision import Precision, round_model
from app.policy.storage.snapshot import WEIGHTS, require_snapshot, verify_snapshot


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model in memory, ready to sample and to score. Never changed after loading: another version is another `Policy`."""

    digest: str
    model: PreTrainedModel
    """A transformers causal language model: `base_model` gives hidden states, `get_output_embeddings()` is the head."""
    chat: Chat
    context: int
    """Longest sequence (prompt and completion together), in tokens."""
    end_tokens: frozenset[int]
    """Sampling any of these ends the completion."""
    precision: Precision = Precision.BF16
    published: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """The rounded layers' weights as they were published, mapped from the file or made by a patch: what `digest` is of, what the next
    version is made from, and what mismatch is measured against. Empty where nothing is rounded."""

    @cached_property
    def grammars(self) -> Grammars:
        """What forms allow its tokens to be."""
        return Grammars(lambda: (self.chat, self.end_tokens), vocabulary=self.vocabulary)

    @property
    def vocabulary(self) -> int:
        """How many tokens the output head knows."""
        return int(self.model.config.get_text_config().vocab_size)


def load_policy(
    folder: Path, *, dtype: torch.dtype | None = None, digest: str | None = None, precision: Precision = Precision.BF16
) -> Policy:
    """Load a snapshot, verified against its own `READY` and, where given, against `digest`.

    Linear layers are packed for the processor where that is possible (`app.policy.packing.linear`): such a
    model samples and scores, it cannot be trained or saved (use `load_model`). The digest is checked before weights are rounded to
    `precision`. Raises `NotFound` (no snapshot), `BadInput` (damaged, or other weights) and `Refused` (a model that cannot be rounded).
    """
    found = verify_snapshot(require_snapshot(folder))
    if digest is not None and digest != found:
        raise BadInput(f"{folder} holds the weights {found[:12]}, not {digest[:12]}: publish the version again")
    model = load_model(folder, dtype=dtype)
    model.eval().requires_grad_(False)
    names = round_model(model, precision)
    published = {name: tensor for name, tensor in _tensors_of(folder).items() if name in names} if names else {}
    if can_pack(model.dtype):
        pack(model)
        _let_go(model, folder)
    chat = Chat.load(folder)
    return Policy(
        digest=found,
        model=model,
        chat=chat,
        context=int(getattr(model.config, "max_position_embeddings", 2048)),
        end_tokens=_end_tokens(folder, model.config, chat),
        precision=precision,
        published=published,
    )


def load_grammars(folder: Path) -> Grammars:
    """The forms of a snapshot's model, without its weights; the tokenizer is read when one is asked for."""
    config = config_of(folder)

    def source() -> tuple[Chat, frozenset[int]]:
        chat = Chat.load(folder)
        return chat, _end_tokens(folder, config, chat)

    return Grammars(source, vocabulary=int(config.get_text_config().vocab_size))


def _let_go(model: PreTrainedModel, folder: Path) -> None:
    """Free the weights file that packing has read through: small tensors are copied, the embedding is mapped afresh, so that only
    rows that are looked up become resident (SmolLM2: a few MB of 57, besides the packed head that is tied to it). Of a model in float32,
    whose tensors were cast, nothing is mapped."""
    if model.dtype != torch.bfloat16:
        return
    embedding = model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        if parameter is embedding:
            with safe_open(folder / WEIGHTS, framework="pt") as file:
                parameter.data = file.get_tensor(name)
        else:
            parameter.data = parameter.data.clone()


def load_model(folder: Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The transformers model of a snapshot, in `dtype` (default: `compute_dtype()`), on the CPU, gradients on (for the trainer).

    Tensors that need no cast stay mapped from the file, read-only by contract: train a float32 copy, not these.
    """
    return model_of(config_of(require_snapshot(folder)), _tensors_of(folder), dtype=dtype or compute_dtype(), source=folder / WEIGHTS)


def model_of(config: PreTrainedConfig, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype, source: Path | str) -> PreTrainedModel:
    """The transformers model of these tensors. Raises `BadInput`, which names the `source`, where they do not fit the config."""
    model = empty_model(config, dtype=dtype)
    tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    odd = [name for name, held in model.state_dict().items() if name in tensors and tensors[name].shape != held.shape]
    if odd:
        raise BadInput(f"{source} does not fit its config.json (other shapes of {odd[:3]}): make the snapshot again")
    _, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    left = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor.is_meta]
    if left or unexpected:
        raise BadInput(f"{source} does not fit its config.json (missing {left[:3]}, unknown {unexpected[:3]}): make the snapshot again")
    return model


def config_of(folder: Path) -> PreTrainedConfig:
    """What a snapshot's config.json says. Raises `BadInput` for an architecture that nobody here knows."""
    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError) as error:
        said = str(error).partition(". ")[0]
        raise BadInput(
            f"{folder / 'config.json'} is of no model that this installation knows ({said}): upgrade it, or serve it on vLLM or SGLang"
        ) from error


def _tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Mapped from the file. Raises `BadInput`."""
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        said = str(error)[:120]
        raise BadInput(f"{folder / WEIGHTS} holds what this version cannot read ({said}): make the snapshot again") from error


class Unloaded:
    """A model whose weights are read part by part, so that whoever splits it over processes never holds it whole."""

    def __init__(self, folder: Path, *, dtype: torch.dtype) -> None:
        self.model = empty_model(config_of(require_snapshot(folder)), dtype=dtype)
        self._file = folder / WEIGHTS
        self._names = {parameter: name for name, parameter in self.model.named_parameters()}

    def fill(self, module: torch.nn.Module) -> None:
        """Read the weights of this part of the model that are not there yet; what is tied stays tied within the part."""
        places = [(part, name, p) for part in module.modules() for name, p in part.named_parameters(recurse=False) if p.is_meta]
        with safe_open(self._file, framework="pt") as file:
            found = {p: file.get_tensor(self._names[p]).to(p.dtype, copy=True) for p in dict.fromkeys(p for *_, p in places)}
        made = {p: torch.nn.Parameter(tensor, requires_grad=p.requires_grad) for p, tensor in found.items()}
        for part, name, empty in places:
            part.register_parameter(name, made[empty])


def empty_model(config: PreTrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """The model without memory for its weights (device meta); buffers that no snapshot holds (rotary frequencies) are real."""
    register_attention()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    persistent = set(model.state_dict())
    for name, module in list(model.named_modules()):
        buffers = [f"{name}.{buffer}".lstrip(".") for buffer, _ in module.named_buffers(recurse=False)]
        if any(buffer not in persistent for buffer in buffers):
            model.set_submodule(name, type(module)(config=config))
    return model


def _end_tokens(folder: Path, config: PreTrainedConfig, chat: Chat) -> frozenset[int]:
    """From generation_config.json where there is one (several models end turns with more than one token), config and tokenizer."""
    ends: set[int] = {chat.end_token} if chat.end_token is not None else set()
    generation = folder / "generation_config.json"
    stated = [
        json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None,
        getattr(config, "eos_token_id", None),
    ]
    for value in stated:
        ends.update(value if isinstance(value, list) else [value] if value is not None else [])
    return frozenset(ends)
