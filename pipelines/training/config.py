"""How an update is made. The defaults are the vetted setting; every run stores its resolved copy."""

from typing import Literal

import msgspec

from app.domain.errors import BadConfig
from pipelines.training.hindsight.config import HindsightConfig


class TrackerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The segment tracker's memory (SPO, arXiv 2509.13232, section 3; facts/rl.md 4.3)."""

    kl_half_life: float = 0.06
    """Mean |Δ log π| per token that halves the memory."""
    memory_low: float = 0.875
    memory_high: float = 0.96
    """Bounds of the forgetting factor 2^(−D / kl_half_life)."""
    prior_weight: float = 8.0
    """How many turns the global mean counts for in a segment's own mean; SPO's N_init = 1/(1 − 0.875)."""


Activations = Literal["none", "selective", "full"]
Communication = Literal["bfloat16", "float32"]
CorrectionName = Literal["tis", "icepop", "cispo", "seq_mis", "opsm", "none"]


class CorrectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the importance ratio may weigh."""

    name: CorrectionName = "tis"
    low: float = 0.5
    """Lower bound of `icepop` and `cispo`; the others have none."""
    high: float = 2.0
    """C of `tis`, `icepop`, `seq_mis` and `opsm`, 1 + ε of `cispo`."""
    delta: float = 0.1
    """δ of `opsm`, nats per token."""


class GuardLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the update refuses; each is a `HoldReason`."""

    min_turns: int = 8
    """Readable turns below which there is nothing to learn from."""
    min_effective_sample_share: float = 0.3
    """Effective sample size over tokens, as a share of them."""
    min_mean_ratio: float = 0.5
    max_mean_ratio: float = 2.0
    max_mismatch: float = 0.01
    """Mean KL(behaviour ‖ policy) per token at step zero, nats, over turns that the champion sampled: above, engine and trainer disagree
    about the same weights. A bf16 engine and an fp32 trainer differ by 0.001; raw log-probabilities at temperature 0.7 by 0.066, a
    forgotten top-p by 0.039 (SmolLM2)."""
    max_mismatch_p99: float = 0.5
    """99th percentile of |log π_behaviour − log π| there: a few tokens that are quite wrong hide in a mean."""
    min_entropy_share: float = 0.5
    """Entropy after the update as a share of the entropy before."""
    max_kl_champion: float = 0.2
    """Nats per token; the upper end of the estimate's interval counts. A step beyond it is taken back until the rest is inside."""
    max_kl_anchor: float = 1.0
    """Nats per token, likewise; a candidate that is nearer to the anchor than its parent is inside whatever the distance."""
    anchor_alarm: float = 0.8
    """Share of the anchor's budget from which on a person is asked to renew the anchor."""


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters instead of all parameters; what is served is base and adapter in one, rounded as it was trained."""

    rank: int = 16
    alpha: int = 32
    learning_rate: float = 1e-4
    """Of the adapters, in place of `training.learning_rate`: ten times that of all parameters reaches the same reward (Schulman et al.
    2025, "LoRA without regret")."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class RouterReplayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mixture-of-experts: run the experts that ran when the token was sampled."""

    enabled: bool = True
    plausibility: float = 0.1
    """A replayed expert whose gate score is below this share of the router's own lowest chosen score is replaced by the router's choice."""


class TrainingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One update: one pass over one batch in a few Adam steps."""

    estimator: Literal["segment_tracker", "group_mean", "batch_mean"] = "segment_tracker"
    tracker: TrackerConfig = TrackerConfig()
    correction: CorrectionConfig = CorrectionConfig()
    hindsight: HindsightConfig = HindsightConfig()
    """What is learned from corrections, beside the reward."""
    guards: GuardLimits = GuardLimits()
    kl_beta: float = 0.005
    """Reward units per nat of divergence from the anchor, near it; 0 switches the penalty off."""
    kl_beta_max: float = 0.1
    """What the penalty rises to at one and a half of `kl_target`, see `pipelines.training.numerics.advantage.penalty`."""
    kl_target: float = 0.45
    """Divergence from the anchor around which the line of versions settles, as a share of `guards.max_kl_anchor`."""
    kl_look_ahead: float = 8.0
    """By how many updates the penalty looks ahead: it is that of where the champion would be if it went on from the anchor, or back, as
    in its last update. 0: that of where it is."""
    turns_per_step: int = 32
    """Turns per Adam step; chains and turns with the same prompt stay together."""
    learning_rate: float = 1e-5
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    loss_tokens: float = 64.0
    """L_ref: the constant length that the loss is divided by, next to the number of turns in the step."""
    micro_batch_tokens: int = 512
    """Tokens per forward and backward pass and worker: bounds the activations. A longer turn goes alone; from four times as many tokens on
    it keeps the inputs of the layers alone and computes the rest again, whatever `activations` says."""
    max_tokens: int = 2048
    """Turns longer than this (prompt and completion), or than the model's context, are left out as too long."""
    final_pass_turns: int = 24
    """Turns on which the finished candidate is compared with champion and anchor; 0 means all."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the matrix products. `auto` asks this processor which is faster. Master weights and optimizer are always fp32."""
    activations: Activations = "none"
    """What the forward pass keeps for the backward pass; less memory costs more time, see `pipelines.training.numerics.activations`."""
    share_prefixes: bool = True
    """Compute what turns have in common once (exact; off for mixture-of-experts models with router replay)."""
    lora: LoraConfig | None = None
    router_replay: RouterReplayConfig = RouterReplayConfig()
    workers: int = 1
    """Ray actors; data parallel, parameters sharded from two on."""
    communication: Communication = "bfloat16"
    """What several workers send each other. Weights lose nothing as bfloat16; of a gradient each worker's part is rounded once, by at most
    2⁻⁸ of itself, and summed in fp32 (`pipelines.training.numerics.communication`)."""
    sum_gradients: Literal["each", "last"] = "each"
    """After each micro-batch, or once a step, with the last one. Once is a third of the traffic less per micro-batch saved, and each worker
    then holds the gradient of the whole model: four bytes a parameter, half of what one worker alone takes."""
    offload: bool = False
    """Keep masters and moments, 12 of the 20 bytes per parameter of a training step, in the host's page cache also beside a GPU."""
    threads: int = 0
    """Threads per worker; 0: the machine's cores divided by the workers."""
    checkpoint_every_s: float = 60.0
    """A killed run loses at most this much computing; 0 checkpoints after every optimizer step."""
    attempt_timeout_s: float = 3600.0
    """A micro-step that takes longer than this counts as a lost worker."""
    seed: int = 0

    def __post_init__(self) -> None:
        positive = {"turns_per_step": self.turns_per_step, "loss_tokens": self.loss_tokens, "workers": self.workers,
                    "micro_batch_tokens": self.micro_batch_tokens, "max_tokens": self.max_tokens}  # fmt: skip
        for name, value in positive.items():
            if value <= 0:
                raise BadConfig(f"training.{name} is {value}: give a number above 0")
        for name, value in {"turns_per_step": self.turns_per_step, "final_pass_turns": self.final_pass_turns}.items():
            if value == 1:
                raise BadConfig(f"training.{name} is 1: give at least 2, because one turn shows no spread and every update would be held")
