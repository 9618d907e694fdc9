"""Rule sets: which terms pay what. TOML, identified by the digest of its content, immutable once active."""

import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from app.domain.errors import BadConfig
from app.domain.learning.rewards import Aggregation, Term
from app.domain.release.gates import content_hash
from pipelines.labelling.follow_up.term import FollowUp, Reader
from pipelines.labelling.terms import BUILT_IN, MOST, SIGNAL, DeclaredSignal, Rating, Signals

OURS = ("read", "signals", "of")
"""What terms are given beside the params of the rule set."""


class TermConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One term of a rule set."""

    name: str
    """A built-in name, `signal:NAME` for a signal that the policy declares, or `package.module:attribute` of a user-written term factory
    called with the params, which the deployment allows."""
    weight: float
    aggregation: Aggregation | None = None
    """How several observations of one turn become one value; None is the term's own default."""
    params: dict[str, Any] = {}

    def __post_init__(self) -> None:
        _require_number("weight", self.weight)


class RuleSetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule set as written."""

    name: str
    default_reward: float = 0.0
    """Reward of a turn about which no term had anything to say."""
    train_without_signal: bool = False
    """Whether such a turn may be trained on."""
    terms: tuple[TermConfig, ...]

    def __post_init__(self) -> None:
        _require_number("default_reward", self.default_reward)


def _require_number(name: str, value: float) -> None:
    if not abs(value) <= MOST:  # NaN compares with nothing
        raise ValueError(f"{name} is {value}: give a number from {-MOST:g} to {MOST:g}")


@dataclass(frozen=True, kw_only=True)
class RuleSet:
    """A rule set ready to score."""

    config: RuleSetConfig
    digest: str
    terms: tuple[tuple[Term, float], ...]
    """Terms with their weights."""


def default_toml() -> str:
    """The rule set shipped with the package."""
    return resources.files("pipelines.labelling").joinpath("default_rules.toml").read_text()


def starting_toml(file: str | None, *, config: Path | None) -> str:
    """The rule set that policies start with: the configured file, else the default one. Raises `BadConfig` where it cannot be read.

    A relative path is looked for beside the configuration file that names it.
    """
    if file is None:
        return default_toml()
    folder = config.parent if config is not None else Path.cwd()
    try:
        return (folder / file).read_text()
    except OSError as error:
        raise BadConfig(f"[labelling] rule_set: {error}; correct the path, or leave it out for the default rule set") from error


def parse_rule_set(text: str, *, read: Reader | None = None, signals: Signals | None = None, allowed: Collection[str] = ()) -> RuleSet:
    """Read a rule set from TOML; `read` takes the follow-up classifier's place. Raises `BadConfig` naming the term and the field.

    `signals` is what the policy declares. Without it the rule set can be read, but `signal:NAME` terms abstain as `undeclared`.
    Of import paths only those in `allowed` ([labelling] allowed_terms) are imported: reading a file must not run what it names.
    """
    try:
        config = msgspec.toml.decode(text, type=RuleSetConfig)
    except msgspec.MsgspecError as error:
        raise BadConfig(f"the rule set: {error}") from error
    names = [term.name for term in config.terms]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if not names or doubled:
        raise BadConfig(f"rule set {config.name}: {'terms twice: ' + ', '.join(doubled) if doubled else 'it has no terms'}")
    terms = tuple((_build(term, read, signals, allowed), term.weight) for term in config.terms)
    return RuleSet(config=config, digest=content_hash(config)[:32], terms=terms)


def _build(config: TermConfig, read: Reader | None, signals: Signals | None, allowed: Collection[str]) -> Term:
    params: Mapping[str, Any] = config.params if config.aggregation is None else {**config.params, "aggregation": config.aggregation}
    if config.name == FollowUp.name and read is not None:
        params = {**params, "read": read}
    if config.name == Rating.name:
        params = {**params, "signals": signals}
    if config.name.startswith(SIGNAL):
        params = {**params, "signals": signals, "of": config.name.removeprefix(SIGNAL)}
    factory = _factory(config.name, allowed)
    if ":" not in config.name or config.name.startswith(SIGNAL):
        _check_params(config, factory)
    try:
        return factory(**params)
    except (TypeError, ValueError) as error:
        raise BadConfig(f"term {config.name}: {error}") from error


def _check_params(config: TermConfig, factory: Any) -> None:  # noqa: ANN401 - the class of a built-in term
    """Each param is of its type, and numbers are some by which every turn can be scored. Raises `BadConfig`."""
    types = get_type_hints(factory.__init__, include_extras=True)
    for name, value in config.params.items():
        if name in OURS:
            raise BadConfig(f"term {config.name}: {name} is no param of a rule set: leave it out")
        try:
            msgspec.convert(value, types.get(name, Any))
        except msgspec.ValidationError as error:
            raise BadConfig(f"term {config.name}: {name} = {value!r}: {error}") from error


def refusal(error: Exception) -> str:
    """Why a rule set cannot be read, for whoever asked for it."""
    return str(error) if isinstance(error, BadConfig) else f"it cannot be read ({type(error).__name__}: {error})"


def _factory(name: str, allowed: Collection[str]) -> Any:  # noqa: ANN401 - a user-written factory has whatever parameters it has
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.startswith(SIGNAL):
        return DeclaredSignal
    module, separator, attribute = name.partition(":")
    if not separator:
        raise BadConfig(f"no term is named {name!r}: use one of {', '.join(sorted(BUILT_IN))}, signal:NAME, or package.module:attribute")
    if name not in allowed:
        raise BadConfig(f"term {name}: code that a rule set may run is named in the configuration; add it to [labelling] allowed_terms")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BadConfig(f"term {name}: cannot be imported ({error}); check the path and that it is installed") from error
