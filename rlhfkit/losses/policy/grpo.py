"""GRPO and its variants DAPO, BNPO and Dr.GRPO: PPO's clip with other averages."""

from rlhfkit.losses.policy.base import preset_of
from rlhfkit.losses.policy.ppo import ppo_loss


@preset_of(ppo_loss, fixed={"ratio_level": "token"}, aggregation="sequence-mean-token-mean")
def grpo_loss() -> None:
    """Group relative policy optimisation: :func:`ppo_loss` in which each sequence is a mean over its own tokens.

    The advantages come from :func:`group_advantages`. The KL penalty of the paper is a loss of its own,
    :func:`kl_loss` with the weight 0.04, added by :func:`sum_losses`.

    Shao et al. (2024, arXiv:2402.03300, equation 3).

    Args:
        advantages: (B,) from :func:`group_advantages`, (B, 1) or (B, T); detached here.
        aggregation: How the token losses become one number; ``sequence-mean-token-mean`` in the paper; the
            default of TRL and verl is ``token-mean``.
        clip_low, clip_high, dual_clip, log_ratio_clamp, delta: See :func:`ppo_loss`.
        logprobs, old_logprobs, mask, weights, denominator, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`ppo_loss`.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """


@preset_of(grpo_loss, clip_high=0.28, aggregation="token-mean")
def dapo_loss() -> None:
    """DAPO: :func:`grpo_loss` with a wider upper clip and a mean over all tokens of the step.

    Yu et al. (2025, arXiv:2503.14476, equation 8). The other parts of DAPO are the overlong penalty
    (:class:`rlhfkit.rewards.LengthPenalty`), dynamic sampling (groups of equal rewards are rejected) and no KL penalty.

    Args:
        clip_low: ``ε_low``; the paper's 0.2.
        clip_high: ``ε_high``; the paper's 0.28, 0.2 in TRL.
        aggregation: How the token losses become one number; the paper's ``token-mean``.
        dual_clip, log_ratio_clamp, delta: See :func:`ppo_loss`.
        logprobs, old_logprobs, advantages, mask, weights, denominator, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`ppo_loss`.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """


@preset_of(dapo_loss, fixed={"denominator": None}, clip_high=0.2)
def bnpo_loss() -> None:
    """Batch-normalised token mean: :func:`grpo_loss` averaged over the tokens of this micro-batch alone.

    TRL's ``bnpo``, here for comparison: a token weighs more in a micro-batch with few tokens, unlike in
    :func:`dapo_loss` with a ``denominator``.

    Args:
        clip_low, clip_high, dual_clip, log_ratio_clamp, delta: See :func:`ppo_loss`.
        logprobs, old_logprobs, advantages, mask, weights, aggregation, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`ppo_loss`.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """


@preset_of(grpo_loss, aggregation="constant-length")
def dr_grpo_loss() -> None:
    """Dr.GRPO: :func:`grpo_loss` in which token losses are summed and divided by a constant length.

    Liu et al. (2025, arXiv:2503.20783, section 3.1), together with ``group_advantages(..., scale="none")``. The length
    of an answer then changes neither the sign nor the size of the gradients of its tokens.

    Args:
        aggregation: How the token losses become one number; the paper's ``constant-length``.
        denominator: Sequences of the whole optimizer step, divided by the number of micro-batches that are averaged; B
            when ``None``.
        max_length: Tokens; the generation limit, as in the paper and TRL. Required.
        clip_low, clip_high, dual_clip, log_ratio_clamp, delta: See :func:`ppo_loss`.
        logprobs, old_logprobs, advantages, mask, weights: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`ppo_loss`.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
