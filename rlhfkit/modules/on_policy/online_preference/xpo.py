"""``XPOModule``: exploratory preference optimization (Xie et al., 2024, arXiv:2405.21046)."""

from typing import Any

from rlhfkit.data.types import Experience
from rlhfkit.losses import LossOutput, exploration_loss, sequence_logprobs, weighted_metric
from rlhfkit.models import PolicyOutput
from rlhfkit.modules.on_policy.online_preference.base import check_sampler
from rlhfkit.modules.on_policy.online_preference.online_dpo import OnlineDPOModule
from rlhfkit.parts import part_name
from rlhfkit.rollout.engine import RolloutEngine
from rlhfkit.rollout.wrappers.reference_samples import ReferenceSamples
from rlhfkit.validation import check_number


class XPOModule(OnlineDPOModule):
    """Online DPO on pairs of an answer of the policy and one of the reference, with a bonus for exploration.

    ``L = mean over pairs of -log σ(β (log π(y_c|x)/π_ref(y_c|x) - log π(y_r|x)/π_ref(y_r|x))) + α log π(ỹ|x)``, where
    ỹ is the reference's answer, be it the better or the worse one; see :func:`~rlhfkit.losses.exploration_loss`. A
    prompt whose answers are equally good, or could not be compared, teaches nothing, the bonus included.

    The engine is a :class:`~rlhfkit.rollout.ReferenceSamples`, two engines of any one kind. Several answers of each to
    a prompt are more prompts: ``SamplingSpec(group_size=2)``, with a larger ``rollout_batch_size``.

    Example::

        RolloutCallback(PairwiseReward(judge), engine=ReferenceSamples(VLLMPool(), VLLMPool()),
                        sampling=SamplingSpec(group_size=2))
        XPOModule("Qwen/Qwen3-0.6B", alpha=1e-5)

    Args:
        model: Folder or hub name of the policy.
        alpha: α, weight of the bonus; 1e-5 as in TRL.
        **kwargs: As in :class:`OnlineDPOModule`; a ``MovingReference`` is refused, as the engine's reference does
            not move.

    Raises:
        ValueError: If an argument is out of range or without effect.
    """

    def __init__(self, model: str, *, alpha: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        check_number("alpha", alpha, minimum=0)
        self.alpha = alpha
        if any(part_name(part) == "MovingReference" for part in self.parts):
            raise ValueError("MovingReference moves the reference, and the engine's does not move: leave it out")

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError unless there are two samples per prompt, one of each model."""
        if group_size != 2:
            raise ValueError(
                f"XPOModule compares one answer of the policy with one of the reference, got group_size={group_size}: "
                "use SamplingSpec(group_size=2), and a larger PromptDataModule(rollout_batch_size=...) for more"
            )

    def check_engine(self, engine: RolloutEngine) -> None:
        """Raise ValueError unless the engine also samples from the reference."""
        check_sampler(type(self).__name__, engine, ReferenceSamples)

    def loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """The loss of the pairs of a micro-batch, with the bonus; override it for another objective."""
        pairs, mask, counted = super().loss(batch, out), batch.action_mask, batch.sequence_denominator
        explored = mask.any(-1) & ~batch.by_policy  # one in each pair: all others are masked
        bonus = exploration_loss(
            sequence_logprobs(out.logprobs, mask),
            alpha=self.alpha,
            mask=explored,
            denominator=None if counted is None else counted / 2,  # two sequences a pair
        )
        number = explored.sum()
        metrics = {name: weighted_metric(mean, number) for name, mean in bonus.metrics.items()}
        return LossOutput(pairs.loss + bonus.loss, {**pairs.metrics, **metrics})
