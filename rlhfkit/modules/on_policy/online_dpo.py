"""``OnlineDPOModule``: direct preference optimization of pairs that are sampled and judged during training."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from rlhfkit.data.types import Experience
from rlhfkit.losses import LossOutput, dpo_loss, sequence_logprobs, weighted_metric
from rlhfkit.losses.preference.dpo import pair_partners, rejected_values
from rlhfkit.models import LoRA, ModelLoading, PolicyOutput
from rlhfkit.modules.on_policy.base import OnPolicyModule
from rlhfkit.modules.optim import Optimization
from rlhfkit.modules.preference.dpo import GivenLosses, imported_divergence, imported_losses, named_losses
from rlhfkit.parts import GivenPart, plain_value
from rlhfkit.validation import check_number


class OnlineDPOModule(OnPolicyModule):
    """Direct preference optimization on pairs of the policy's own answers, judged while it learns.

    ``L = mean over prompts of -log σ(β (log π(y_c|x)/π_ref(y_c|x) - log π(y_r|x)/π_ref(y_r|x)))``, where ``y_c`` and
    ``y_r`` are the samples of a prompt with the largest and the smallest reward.

    OAIF, "Direct Language Model Alignment from Online AI Feedback", Guo et al. (2024, arXiv:2402.04792, algorithm 1),
    with two samples per prompt; the best and the worst of more are those of OpenRLHF's iterative DPO. Rewards come from
    any reward of ``RolloutCallback``, from a
    :class:`~rlhfkit.modules.parts.reward_model.RewardModel`, or from judges that compare answers
    (:class:`~rlhfkit.rewards.PairwiseReward`). A prompt whose rewards are all equal, or of whose samples fewer than two
    could be scored, teaches nothing and does not count in the mean; ``rollout/...`` metrics say how many there are.

    Log-probs are at the temperature of sampling. The mean is over the pairs of the whole optimizer step, so that it
    does not depend on micro-batches and ranks; a pair is always in one micro-batch. Metrics are those of
    :func:`~rlhfkit.losses.dpo_loss`. See :class:`~rlhfkit.modules.parts.pairs.Pairs` for what is compared.

    Example::

        RolloutCallback(reward=PairwiseReward(ChatJudge("http://judge:8000/v1", model="judge")),
                        sampling=SamplingSpec(group_size=2))
        OnlineDPOModule("Qwen/Qwen3-0.6B", beta=0.1)

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (5e-7: TRL's default for online DPO and that of OAIF).
        beta: β, strength of the regularization towards the reference; 0.1 as in the paper and TRL.
        loss_type: As in :class:`DPOModule`; not ``sft`` (see ``nll_coef``), ``aot`` and ``aot_unpaired``.
        loss_arguments: More arguments of :func:`~rlhfkit.losses.dpo_loss`: ``label_smoothing``, ``divergence``, ...
        nll_coef: Weight of the negative log-likelihood per token of each chosen answer.
        optimization: Optimizer and schedule of the learning rate, see :class:`~rlhfkit.Optimization`.
        lora: Train adapters, not the model's own weights, see :class:`~rlhfkit.LoRA`.
        loading: Technical options of the model, see :class:`~rlhfkit.ModelLoading`.
        parts: More features, see :class:`OnPolicyModule`. A :class:`~rlhfkit.modules.parts.pairs.Pairs` among them
            takes the place of the module's: ``Pairs(truncated=False)`` compares no answer that was cut off.

    Raises:
        ValueError: If an argument is out of range or without effect.
    """

    keeps_groups_together = True

    def __init__(
        self,
        model: str,
        *,
        lr: float = 5e-7,
        beta: float = 0.1,
        loss_type: GivenLosses = "sigmoid",
        loss_arguments: Mapping[str, Any] | None = None,
        nll_coef: float = 0.0,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        from rlhfkit.modules.parts.kl_penalty import Reference
        from rlhfkit.modules.parts.pairs import Pairs

        check_number("beta", beta, above=0)
        check_number("nll_coef", nll_coef, minimum=0)
        self.credit = vars(self).get("credit", [Pairs()])
        self.own_parts = [Reference()]
        super().__init__(model, lr=lr, optimization=optimization, lora=lora, loading=loading, parts=parts)
        self.loss_type, self.loss_arguments = imported_losses(loss_type), {**(loss_arguments or {})}
        if "divergence" in self.loss_arguments:
            self.loss_arguments["divergence"] = imported_divergence(self.loss_arguments["divergence"])
        self.beta, self.nll_coef = beta, nll_coef
        self.keep_plain(
            loss_type=named_losses(self.loss_type), loss_arguments=plain_value(self.loss_arguments, "loss_arguments")
        )
        chosen = {"beta": beta, "loss_type": self.loss_type, "nll_coef": nll_coef}
        zero, one = torch.zeros(1), torch.ones(1)
        try:
            self.pair_loss: Callable[..., LossOutput] = partial(cast(Any, dpo_loss), **chosen, **self.loss_arguments)
            """The loss of pairs with the arguments that were chosen."""
            self.pair_loss(zero, zero, zero, zero, chosen_lengths=one, rejected_lengths=one, mask=one, denominator=1)
        except TypeError as error:
            raise ValueError(f"loss_arguments are more arguments of dpo_loss: {error}") from error

    def correct_off_policy(self) -> bool:
        """Return False: the loss has no weights of tokens, so that replayed samples are refused."""
        return False

    def loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """The loss of the pairs of a micro-batch; override it for another objective."""
        assert batch.advantages is not None
        mask = batch.action_mask
        logps = sequence_logprobs(out.logprobs, mask)
        reference = sequence_logprobs(batch.columns["ref_logprobs"], mask)
        # At the rows of the chosen answers; others are masked. Ranks without rows have a batch without pairs.
        partners, pairs = pair_partners(batch.advantages.sum(-1).sign() * mask.any(-1), batch.group)
        lengths, counted = mask.sum(-1), batch.sequence_denominator
        result = self.pair_loss(
            logps,
            rejected_values(partners, logps),
            reference,
            rejected_values(partners, reference),
            chosen_lengths=lengths,
            rejected_lengths=rejected_values(partners, lengths),
            mask=pairs,
            denominator=None if counted is None else counted / 2,  # two sequences a pair
        )
        number = pairs.sum()
        metrics = {name: weighted_metric(mean, number) for name, mean in result.metrics.items()}
        return self.with_terms(LossOutput(result.loss, metrics), batch, out, self.old_logprobs(batch, out))
