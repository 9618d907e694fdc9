"""Which tokens a form allows next: llguidance over a model's own tokenizer. Its only owner.

A form (`app.domain.telemetry.turns.Form`) becomes a grammar over the bytes of an answer, in JSON without free
whitespace (`{"a": 1, "b": [2]}`: with it a small model writes blanks for ever), or in the marks of tool calls, which
are tokens of their own where the tokenizer has such. The same form, tokenizer and tokens give the same masks, so that
training works out what sampling allowed.

Shapes: T tokens, W words of 32 bits, one bit per token of the vocabulary.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import llguidance
import llguidance.hf
import llguidance.numpy
import msgspec
import numpy as np
import numpy.typing as npt

from app.domain.errors import BadRequest
from app.domain.telemetry.tools import CLOSE, OPEN
from app.domain.telemetry.turns import Form
from app.policy.chat import Chat

Words = npt.NDArray[np.int32]
KEPT = 64
"""Grammars kept ready; one of a large schema takes a few MB and up to a second to make."""
LIMITS = llguidance.LLParserLimits(initial_lexer_fuel=500_000, step_lexer_fuel=60_000, step_max_items=20_000, max_grammar_size=100_000)
"""Less than the defaults. They do not bound the time: with 49 thousand tokens the worst mask of 64 kB of schema took 29 ms, of 156 kB of
tools 104, and what recurs took 13 for every token; that is bounded by what one answer may take in all (`app.policy.decoding.shaping`)."""
MOST_STATES = 1000
"""Of all divisors of a schema, multiplied."""
_AS_TRAINED_ON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """The forms of one model; its tokenizer and the tokens that end an answer are asked for when a form first is."""

    def __init__(self, source: Callable[[], tuple[Chat, frozenset[int]]], *, vocabulary: int) -> None:
        self._source = source
        self._vocabulary = vocabulary
        self._ready: OrderedDict[bytes, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def tokenizer(self) -> llguidance.LLTokenizer:
        """llguidance's view of the tokenizer; two seconds for 50 thousand tokens, made once for all versions that share it."""
        chat, end_tokens = self._source()
        return _tokenizer(_Tokenizer(chat, self._vocabulary, end_tokens))

    def piece(self, token: int) -> bytes:
        """What a token writes."""
        return self.tokenizer.decode_bytes([token])

    def prepare(self, form: Form) -> None:
        """Make a form's grammar: long work, for another thread than the one that samples. Raises `BadRequest` for one that cannot be kept
        to."""
        self._compiled(form)

    def matcher(self, form: Form) -> llguidance.LLMatcher:
        """A reader at the beginning of an answer; quick after `prepare`."""
        return self._compiled(form).deep_copy()

    def masks(self, form: Form, tokens: Sequence[int]) -> Words | None:
        """What was allowed before each of these tokens, [T, W]; None where one of them was not."""
        matcher = self.matcher(form)
        words = llguidance.numpy.allocate_token_bitmask(len(tokens), self._vocabulary)
        for place, token in enumerate(tokens):
            if matcher.is_stopped():
                return None
            llguidance.numpy.fill_next_token_bitmask(matcher, words, place)
            if not (int(words[place, token // 32]) >> (token % 32)) & 1 or not matcher.consume_token(token):
                return None
        return words

    def allow(self, form: Form, tokens: Sequence[int]) -> bool:
        """Whether these tokens could have been drawn under that form."""
        try:
            return self.masks(form, tokens) is not None
        except BadRequest:
            return False

    def _compiled(self, form: Form) -> llguidance.LLMatcher:
        key = hashlib.sha256(msgspec.json.encode(form)).digest()
        with self._lock:
            if key in self._ready:
                self._ready.move_to_end(key)
                return self._ready[key]
        _refuse_states([schema for schema in (form.answer, form.call) if schema is not None])
        matcher = llguidance.LLMatcher(self.tokenizer, self._grammar(form), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise BadRequest(f"the answer cannot be kept to this form: {_reason(matcher.get_error())}", param="response_format")
        with self._lock:
            self._ready[key] = matcher
            while len(self._ready) > KEPT:
                self._ready.popitem(last=False)
        return matcher

    def _grammar(self, form: Form) -> str:
        rules: list[str] = []
        if form.answer is not None:
            rules.append(f"answer: %json {_schema(form.answer)}")
        if form.call is not None:
            rules += [f"calls: call{f' ({_quoted(chr(10))} call)*' if form.many else ''}", self._call()]
            rules.append(f"arguments: %json {_schema(form.call)}")
        start = " | ".join(name for name, wanted in (("answer", form.answer), ("calls", form.call)) if wanted is not None)
        return llguidance.LLMatcher.grammar_from_lark("\n".join([f"start: {start}", *rules]))

    def _call(self) -> str:
        opening, closing = self._mark(OPEN), self._mark(CLOSE)
        return f"call: {opening} {_quoted(chr(10))} arguments {_quoted(chr(10))} {closing}"

    def _mark(self, text: str) -> str:
        """A mark as a grammar says it: by name where it is a token that stands for no text."""
        tokens = self._source()[0].encode(text)
        return text if len(tokens) == 1 and self.tokenizer.is_special_token(tokens[0]) else _quoted(text)


def _refuse_states(schemas: Sequence[Any]) -> None:
    """Divisors are the one keyword whose grammar takes a state for each remainder, and of several each combination: 999,983 took a minute
    to make, and no limit of llguidance's holds it. Raises `BadRequest`."""
    states, waiting = 1.0, list(schemas)
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            divisor = found.get("multipleOf", 1)
            if isinstance(divisor, int | float):
                states *= max(divisor, 1.0) if float(divisor).is_integer() else MOST_STATES + 1
            waiting += list(found.values())
        elif isinstance(found, list):
            waiting += found
    if states > MOST_STATES:
        raise BadRequest(
            f"the schema's `multipleOf` come to more than {MOST_STATES} remainders, or are no integers: check the answer yourself",
            param="response_format",
        )


def _quoted(text: str) -> str:
    return json.dumps(text)


def _schema(schema: Mapping[str, Any]) -> str:
    """The schema as JSON, with how JSON is written; what a client says of that is not asked for."""
    parted = "allOf" in json.dumps(schema)  # objects whose properties are named in several places
    return json.dumps({**(schema if parted else _closed(schema)), "x-guidance": _AS_TRAINED_ON})


_BESIDE = frozenset({
    "$ref", "additionalProperties", "anyOf", "dependentSchemas", "if", "oneOf", "patternProperties", "unevaluatedProperties",
})  # fmt: skip
"""Where one of these stands beside `properties`, there may be other names."""


def _closed(schema: Any) -> Any:  # noqa: ANN401 - any JSON
    """The schema without properties that it does not name: it allows them where it says nothing, and a model that is not sure goes on
    inventing them."""
    if not isinstance(schema, dict):
        return schema
    branches = frozenset({"anyOf", "oneOf"}) if "properties" in schema else frozenset[str]()
    found = {key: value if key in branches else _closed_value(key, value) for key, value in schema.items()}
    return found if "properties" not in found or _BESIDE & found.keys() else {**found, "additionalProperties": False}


def _closed_value(keyword: str, value: Any) -> Any:  # noqa: ANN401 - any JSON
    if keyword in ("properties", "$defs", "definitions") and isinstance(value, dict):
        return {name: _closed(inner) for name, inner in value.items()}
    if keyword in ("items", "additionalProperties"):
        return _closed(value)
    if keyword in ("anyOf", "oneOf", "prefixItems") and isinstance(value, list):
        return [_closed(inner) for inner in value]
    return value


def _reason(message: str) -> str:
    """The first line of what llguidance says, without its own place in it."""
    return message.strip().splitlines()[0].removeprefix("failed to compile JSON schema: ")[:300] if message.strip() else "no reason given"


class _Tokenizer:
    """A tokenizer that is equal to another of the same content."""

    def __init__(self, chat: Chat, vocabulary: int, end_tokens: frozenset[int]) -> None:
        self.chat, self.vocabulary, self.end_tokens = chat, vocabulary, sorted(end_tokens)
        written = f"{chat.tokenizer.backend_tokenizer.to_str()}\x1f{vocabulary}\x1f{self.end_tokens}"
        self.digest = hashlib.sha256(written.encode()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tokenizer) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@lru_cache(maxsize=4)
def _tokenizer(of: _Tokenizer) -> llguidance.LLTokenizer:
    return llguidance.hf.from_tokenizer(of.chat.tokenizer, n_vocab=of.vocabulary, eos_token=of.end_tokens)
