"""What a deployment declares about each policy (a named model line); the rest of the configuration is each stage's own.

Read from `[policies.NAME]` of the TOML file named by RATCHET_CONFIG. Unknown keys are refused by name.
"""

from enum import StrEnum

import msgspec


class SignalType(StrEnum):
    """Type of a declared observation's value."""

    BOOLEAN = "boolean"
    FLOAT = "float"
    TEXT = "text"


class Level(StrEnum):
    """What an observation is about."""

    TURN = "inference"
    EPISODE = "episode"


class Direction(StrEnum):
    """Which way is good."""

    UP = "max"
    DOWN = "min"


class SignalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An observation name declared beyond the built-in ones."""

    type: SignalType
    level: Level = Level.TURN
    optimize: Direction = Direction.UP


class SummaryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Self-summarisation by the gateway."""

    trigger_tokens: int = 0
    """Prompt length from which the gateway asks the model to summarise its own context; 0 switches it off."""
    max_tokens: int = 256
    instruction: str = (
        "Summarise the conversation so far so that you can continue from the summary alone. Keep names, decisions, code and open tasks."
    )


class DeploymentFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What licences ask about the product; None is "not declared", which blocks where a licence depends on it."""

    monthly_users: int | None = None
    monthly_revenue_usd: float | None = None
    fulfils: tuple[str, ...] = ()
    """Ids of the obligations that the product meets, such as `attribution`."""


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model line."""

    model: str
    """Folder of the base model's snapshot (see `ratchet model fetch`), absolute or relative to the configuration file."""
    base_name: str
    """Short name used in version names, such as `smollm2-135m`."""
    base_model: str
    """Where the base comes from, such as `HuggingFaceTB/SmolLM2-135M-Instruct`."""
    licence: str = "Apache-2.0"
    label_wait_s: float = 1800.0
    """Every turn is labelled this long after it finished, whether or not anything came."""
    lateness_s: float = 14_400.0
    """Observations later than the deadline plus this are ledgered as `late` and never re-label."""
    max_context_tokens: int = 2048
    max_tokens: int = 512
    """Upper bound and default of `max_tokens` of a request."""
    engine_timeout_s: float = 120.0
    train_by_default: bool = True
    record_experts: bool = True
    """Log which experts of a mixture-of-experts model ran for each token, so that training can replay them; a dense model has none."""
    redact: bool = False
    """Redact personal data from prompts and completions before anything is stored."""
    segment_tags: tuple[str, ...] = ("task", "language", "tier")
    """Request metadata keys that become the turn's segment."""
    held_out_share: float = 0.1
    """Share of actors whose labels are kept for evaluation and never trained on."""
    signals: dict[str, SignalConfig] = {}
    summary: SummaryConfig = SummaryConfig()
    deployment: DeploymentFacts = DeploymentFacts()
