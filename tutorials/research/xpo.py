"""Exploratory preference optimization (XPO): online DPO against the reference, with a bonus for exploration.

Xie et al. (2024, arXiv:2405.21046). ``L = mean over pairs of DPO's loss + α log π(ỹ|x)``, where ỹ is the reference's
answer, be it the better or the worse one. A prompt whose answers are equally good teaches nothing, the bonus included.
The paper's sum is over all iterations so far, that of TRL and here over the pairs of the step. Example::

    RolloutCallback(
        PairwiseReward(judge),
        engine=VLLMPool(),
        group=ReferenceSamples(VLLMPool()),  # an answer of each
        sampling=SamplingSpec(group_size=2),
    )
    XPOModule("Qwen/Qwen3-0.6B", alpha=1e-5)
"""

from typing import Any

from reference_samples import ReferenceSamples

from rlhfkit import Experience, OnlineDPOModule, PolicyOutput
from rlhfkit.losses import LossOutput, aggregate, masked_mean, sequence_logprobs, weighted_metric
from rlhfkit.losses.aggregation import select
from rlhfkit.modules.parts import Pairs


class XPOModule(OnlineDPOModule):
    """Online DPO on pairs of an answer of the policy and one of the reference.

    Args:
        model: Folder or hub name of the policy.
        alpha: α, weight of the bonus; 1e-5 as in TRL.
        **kwargs: As in :class:`rlhfkit.OnlineDPOModule`.

    Raises:
        ValueError: If ``alpha`` is negative.
    """

    def __init__(self, model: str, *, alpha: float = 1e-5, **kwargs: Any) -> None:
        self.credit = [Pairs(group_size=2)]  # one answer of each model
        super().__init__(model, **kwargs)
        if not alpha >= 0:
            raise ValueError(f"alpha must not be negative, got {alpha}")
        self.alpha = alpha

    def check_engine(self, engine: Any) -> None:
        """Raise ValueError unless the engine also samples from the reference."""
        if not isinstance(getattr(engine, "function", None), ReferenceSamples):
            raise ValueError("XPO needs answers of the reference: group=ReferenceSamples(reference_engine)")

    def loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """The loss of the pairs of a micro-batch, with the bonus."""
        pairs, mask, counted = super().loss(batch, out), batch.action_mask, batch.sequence_denominator
        explored = mask.any(-1) & ~batch.by_policy  # one in each pair: all others are masked
        logps = select(sequence_logprobs(out.logprobs, mask), explored)
        denominator = None if counted is None else counted / 2  # two sequences a pair
        bonus = aggregate(self.alpha * logps, explored, denominator=denominator)
        mean = weighted_metric(masked_mean(logps.detach(), explored), explored.sum())
        return LossOutput(pairs.loss + bonus, {**pairs.metrics, "exploration/logps": mean})
