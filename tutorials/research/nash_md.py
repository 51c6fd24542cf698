"""Nash-MD: a policy that learns to be preferred to a mixture of itself and its reference (a Nash equilibrium).

Munos et al. (2023, arXiv:2312.00886, section 7): with y of the policy and y' of the mixture,
``L = mean over prompts of -log π(y|x) sg(P(y ≻ y'|x) - 1/2 - β log(π(y|x) / π_ref(y|x)))``. The log-ratio is that of
the whole answer, as in the paper. (TRL weights each token's log-prob with the log-ratio of that token alone, which
leaves out what a token does to the divergence of later ones.) Equally good answers count, since the tie to the
reference is in the same term.

Example::

    RolloutCallback(
        PairwiseReward(judge),
        group=ReferenceMixture(mixture_coef=0.5),  # with a LocalEngine: two models are mixed at every token
        sampling=SamplingSpec(group_size=2),
    )
    NashMDModule("Qwen/Qwen3-0.6B", beta=0.1)
"""

from typing import Any, Literal

import torch
from reference_samples import ReferenceMixture, ReferenceSamples
from torch import Tensor

from rlhfkit import Experience, OnlineDPOModule, PolicyOutput
from rlhfkit.losses import LossOutput, aggregate, masked_mean, sequence_logprobs, weighted_metric
from rlhfkit.losses.aggregation import select
from rlhfkit.modules.parts import Pairs

Link = Literal["win-rate", "bradley-terry"]


def preference_advantages(rewards: Tensor, group: Tensor, by_policy: Tensor, *, link: Link = "win-rate") -> Tensor:
    """How much likelier than not an answer of the policy is preferred to those of another sampler.

    ``A_i = mean_j P(i ≻ j) - 1/2`` over the other sampler's answers j to the same prompt. ``win-rate``:
    ``P = (1 + r_i - r_j) / 2``, which for the two win rates of a pair is the judgement itself; ``bradley-terry``:
    ``P = σ(r_i - r_j)``.

    Args:
        rewards: (N,), NaN where missing.
        group: (N,) integers, equal for the samples of one prompt.
        by_policy: (N,) bool, true for the policy's samples.
        link: How rewards are compared; for ``win-rate`` they are in [0, 1].

    Returns:
        (N,), NaN for the other sampler's answers, and where nothing could be compared.

    Raises:
        ValueError: If a reward cannot be a win rate.
    """
    known, ours = ~rewards.isnan(), by_policy.bool()
    outside = (rewards < 0) | (rewards > 1)
    if link == "win-rate" and bool(outside.any()):
        raise ValueError(f"win rates are in [0, 1], got {float(rewards[outside][0]):g}: use link='bradley-terry'")
    difference = rewards[:, None] - rewards
    preferred = (1 + difference) / 2 if link == "win-rate" else difference.sigmoid()
    compared = (group[:, None] == group) & (ours & known)[:, None] & (~ours & known)
    sums, counts = torch.where(compared, preferred, 0.0).sum(-1), compared.sum(-1)
    return torch.where(counts > 0, sums / counts.clamp(min=1) - 0.5, torch.nan)


class Preferences(Pairs):
    """Gives answers of the policy ``P - 1/2``; those of the other sampler are compared with and not learned from.

    Args:
        link: How two rewards become a preference, see :class:`NashMDModule`.
        truncated: Whether answers that the length limit cut off are compared.

    Raises:
        ValueError: If ``link`` is unknown.
    """

    def __init__(self, link: Link = "win-rate", *, truncated: bool = True) -> None:
        super().__init__(truncated=truncated, group_size=2)
        if link not in ("win-rate", "bradley-terry"):
            raise ValueError(f"link must be one of win-rate, bradley-terry, got {link!r}")
        self.link: Link = link

    def compare(self, rows: Experience, rewards: Tensor) -> Tensor:
        """(B,) ``P - 1/2``; NaN for the other sampler's answers, and where nothing could be compared."""
        ranks = self.module.ranks
        by_policy = ranks.gather_rows(rows, rows.by_policy)
        found: Tensor = ranks.over_iteration(
            lambda all_, group, _: preference_advantages(all_, group, by_policy, link=self.link), rows, rewards
        )
        return found


class NashMDModule(OnlineDPOModule):
    """A policy gradient on the probability of being preferred.

    Args:
        model: Folder or hub name of the policy.
        beta: β, strength of the tie to the reference (the paper's τ); 0.1 as in TRL.
        link: How two rewards become a preference: ``win-rate``: they are win rates in [0, 1], as of ``PairwiseReward``;
            ``bradley-terry``: scores of any size, as of a reward model.
        **kwargs: As in :class:`rlhfkit.OnlineDPOModule`, but for those of pair losses.

    Raises:
        ValueError: If ``link`` is unknown.
    """

    def __init__(self, model: str, *, beta: float = 0.1, link: Link = "win-rate", **kwargs: Any) -> None:
        self.link: Link = link
        self.credit = [Preferences(link)]  # one answer of each sampler
        super().__init__(model, beta=beta, **kwargs)

    def check_engine(self, engine: Any) -> None:
        """Raise ValueError unless the engine also samples from the mixture, or the reference."""
        if not isinstance(getattr(engine, "function", None), ReferenceMixture | ReferenceSamples):
            raise ValueError("Nash-MD needs answers of another sampler: group=ReferenceMixture() or ReferenceSamples")

    def loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """The loss of the policy's answers of a micro-batch."""
        assert batch.advantages is not None
        mask = batch.action_mask
        counts = mask.any(-1)
        logps = select(sequence_logprobs(out.logprobs, mask), counts)
        log_ratio = logps.detach() - select(sequence_logprobs(batch.columns["ref_logprobs"], mask), counts)
        better = select(batch.advantages[:, 0], counts)
        losses = -logps * (better - self.beta * log_ratio)
        means = {"nash/preference": better + 0.5, "nash/log_ratio": log_ratio, "nash/logps": logps.detach()}
        metrics = {name: weighted_metric(masked_mean(one, counts), counts.sum()) for name, one in means.items()}
        return LossOutput(aggregate(losses, counts, denominator=batch.sequence_denominator), metrics)
