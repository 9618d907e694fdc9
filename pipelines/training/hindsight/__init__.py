"""Correction learning: the second objective of an update, from what people turned answers into or said of them.

Fed by corrections and the turns of a batch / feeds the loss of each token that has a teacher, and pairs of answers.

Hindsight self-distillation: the teacher is the parent's own weights, reading the prompt x with what the person then said or
did (f) behind it. Of the answer y that was served, each token is pulled towards what the teacher would have done there:

    A_t ← s·(r − b) − β·… + w · clip(log π_T(y_t | x, f, y_<t) − log π_θ(y_t | x, y_<t), ±c)

whose policy gradient is that of −w·Σ_t KL(π_θ(·|x, y_<t) ‖ π_T(·|x, f, y_<t)), the reverse KL per token, estimated on the sampled tokens
(on-policy distillation: Agarwal et al. 2024, arXiv 2306.13649, section 3; Lu and Thinking Machines Lab 2025). The same weights with more
to read as the teacher, and the sum with the scalar's advantage: SDPO (Hübotter et al. 2026, arXiv 2601.20802, section 3, "A = λ·A_GRPO +
(1 − λ)·A_SDPO"); a demonstration as what the teacher reads: OPSD (Zhao et al. 2026, arXiv 2601.18734). The teacher does not move within
an update, which is what SDPO's own trust region is for. Like every other weight on a token it is multiplied with the importance ratio.

Instead of it, on the pair (served y⁻, wanted y⁺), the simple baselines:

    sft   −w·Σ_t log π_θ(y⁺_t)
    dpo   −w·log σ(h),  h = β·[log π_θ(y⁺)/π_ref(y⁺) − log π_θ(y⁻)/π_ref(y⁻)]      (Rafailov et al. 2023, arXiv 2305.18290, eq. 7)
"""
