"""What top-k and top-p kept of the distribution that a turn was drawn from, worked out where the engine does not say it (vLLM).

A logged log-probability is that of the sampled distribution, log π(token) − log(kept mass); the mass follows from the weights that drew
the turn, its temperature, its top-k and its top-p. So one forward pass under those very weights finds it, and nothing is guessed: the
mismatch at step zero still compares what was logged with what the weights say. Turns whose weights are gone stay out (`no_ratio`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from app.domain.learning.batches import TurnPayload
from app.domain.learning.training import Datum
from app.domain.ports import Trainer
from pipelines.training.plan import cut_micro_batches
from pipelines.training.samples import Sample

Masses = dict[str, list[float]]
"""[T] by inference id."""


def lacks_mass(payload: TurnPayload) -> bool:
    """Whether it was drawn with a top-k or top-p whose kept mass nobody recorded."""
    return payload.is_cut and payload.kept_log_mass is None


def work_out_masses(trainer: Trainer, samples: Sequence[Sample], *, path_of: Callable[[str], Path], micro_batch_tokens: int) -> Masses:
    """For every turn that lacks it, under the weights that drew it; the trainer is left with the last of these weights."""
    masses: Masses = {}
    lacking = [index for index, sample in enumerate(samples) if lacks_mass(sample.payload)]
    for version in sorted({samples[index].payload.version for index in lacking}):
        trainer.load_state(path_of(version))
        of_version = [index for index in lacking if samples[index].payload.version == version]
        for micro in cut_micro_batches(samples, of_version, micro_batch_tokens):
            found = trainer.forward([_datum(samples[index].payload) for index in micro])
            for index, mass in zip(micro, found.kept_log_mass, strict=True):
                masses[samples[index].payload.inference_id] = list(mass)
    return masses


def with_masses(samples: Sequence[Sample], masses: Masses) -> list[Sample]:
    """The samples, each with its mass where it was worked out."""
    return [
        replace(sample, payload=replace(sample.payload, kept_log_mass=tuple(masses[sample.payload.inference_id])))
        if sample.payload.inference_id in masses
        else sample
        for sample in samples
    ]


def _datum(payload: TurnPayload) -> Datum:
    return Datum(
        tokens=payload.tokens, first_scored=len(payload.prompt_tokens),
        temperature=payload.temperature, top_p=payload.top_p, top_k=payload.top_k, shape=payload.shape, routes=payload.routed_experts,
    )  # fmt: skip
