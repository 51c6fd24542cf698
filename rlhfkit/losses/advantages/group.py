"""Advantages of whole sequences from the rewards of the other samples of the same prompt, without a critic.

Rewards (B,) in, detached advantages (B,) out. Rows of a group need not be adjacent, but must all be in the batch. A NaN
reward is missing: it enters no statistic, and its advantage is 0. A group of equal rewards has advantage exactly 0.
No host sync, no dynamic shapes; sums in float64 where the device has it, so that the order of rows does not matter.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import check_same_shape

AdvantageScale = Literal["group", "batch", "none"]
"""Divisor of centred rewards in :func:`group_advantages`."""


def group_advantages(rewards: Tensor, group: Tensor, *, scale: AdvantageScale = "group", eps: float = 1e-4) -> Tensor:
    """Advantage of a sample over the other samples of its prompt, as in GRPO.

    ``A_i = (r_i - mean(r_group)) / (s + ε)`` with ``s`` the standard deviation (unbiased, n-1) of the group's or of all
    rewards; ``scale="none"``: ``A_i = r_i - mean(r_group)``.

    Shao et al. (2024, arXiv:2402.03300, section 4.1.2); without the division Dr.GRPO (Liu et al., 2025,
    arXiv:2503.20783); by the batch's deviation Liu et al. ("Tricks or Traps", 2025, arXiv:2508.08221). Equal rewards
    give exactly 0, where others divide the rounding error of the mean by ``ε`` (OpenRLHF: -7.45 for eight rewards of
    0.1).

    Args:
        rewards: (B,), NaN where missing. The whole batch: every row of a group must be in it.
        group: (B,) integer ids, equal for samples of one prompt.
        scale: ``group``, ``batch`` or ``none``.
        eps: ``ε``; 1e-4 in TRL, 1e-6 in verl, 1e-9 in OpenRLHF.

    Returns:
        (B,) in at least float32; 0 for missing rewards and for groups with fewer than two.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    if scale not in get_args(AdvantageScale):
        raise ValueError(f"scale must be one of {', '.join(get_args(AdvantageScale))}, got {scale!r}")
    _check_eps(eps)
    groups = by_group(rewards, group)
    advantages = groups.centred
    if scale == "group":
        advantages = advantages / (groups.std + eps)
    elif scale == "batch":
        advantages = advantages / (_spread(groups.rewards, groups.present)[1] + eps)
    return as_advantages(advantages, groups.varied, rewards)


def rloo_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """Reward minus the mean reward of the *other* samples of the prompt: an unbiased baseline.

    ``A_i = r_i - Σ_{j ≠ i} r_j / (n - 1)``

    REINFORCE leave-one-out, Kool et al. (2019), Ahmadian et al. (2024, arXiv:2402.14740). Subtract a KL penalty in the
    reward first: ``rewards - β (kl * mask).sum(-1)``.

    Args:
        rewards: (B,), NaN where missing, which the others' mean leaves out.
        group: (B,) integer ids, equal for samples of one prompt.

    Returns:
        (B,) in at least float32; 0 for missing rewards and for groups with fewer than two.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    groups = by_group(rewards, group)
    others = groups.sum(groups.rewards) - groups.rewards
    return as_advantages(groups.rewards - others / (groups.members - 1).clamp(min=1), groups.varied, rewards)


def gpg_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """Reward minus the mean of its group, scaled up for the samples that have no gradient.

    ``A_i = B / (B - M) (r_i - mean(r_group))`` with M of the B samples in groups whose rewards are all equal.

    Chu et al. (GPG, 2025, arXiv:2504.02546). The factor corrects for groups without gradient in the mean over the
    batch. The paper's batch is that of an optimizer step, this one that given, an iteration in
    :class:`rlhfkit.GRPOModule`. verl's ``gpg`` has the same formula with M the number of rewards of 0.

    Args:
        rewards: (B,), NaN where missing; such samples are counted neither in B nor in M.
        group: (B,) integer ids, equal for samples of one prompt.

    Returns:
        (B,) in at least float32; 0 for missing rewards and for groups of equal ones.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    groups = by_group(rewards, group)
    scale = groups.present.sum().to(groups.rewards.dtype) / groups.varied.sum().clamp(min=1)
    return as_advantages(scale * groups.centred, groups.varied, rewards)


def opo_advantages(rewards: Tensor, group: Tensor, lengths: Tensor) -> Tensor:
    """Reward minus the baseline of least gradient variance: the mean reward weighted with the lengths.

    ``A_i = r_i - Σ_j l_j r_j / Σ_j l_j``

    On-policy optimal baseline, Hao et al. (2025, arXiv:2505.23585), for squared gradients that grow with the length.

    Args:
        rewards: (B,), NaN where missing.
        group: (B,) integer ids, equal for samples of one prompt.
        lengths: (B,) tokens of each answer.

    Returns:
        (B,) in at least float32; 0 for missing rewards.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    check_same_shape(rewards=rewards, lengths=lengths)
    groups = by_group(rewards, group)
    weights = precise(lengths)
    total = groups.sum(weights)
    baseline = groups.sum(weights * groups.rewards) / torch.where(total > 0, total, torch.ones_like(total))
    return as_advantages(groups.rewards - baseline, groups.varied, rewards)


def remax_advantages(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """ReMax: reward minus that of the greedy answer to the same prompt, which costs one more answer per prompt.

    ``A_i = r_i - r(greedy answer)``

    Li et al. (2023, arXiv:2310.10505, equation 5): the baseline does not depend on the sampled answer, so the gradient
    is unbiased, with a single sample per prompt too. verl's ``remax``.

    Args:
        rewards: (B,), NaN where missing.
        greedy_rewards: (B,) reward of the greedy answer to each sample's prompt, NaN where missing.

    Returns:
        (B,) in at least float32; 0 where either reward is missing.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    check_same_shape(rewards=rewards, greedy_rewards=greedy_rewards)
    missing = rewards.isnan() | greedy_rewards.isnan()
    return as_advantages(precise(rewards) - precise(greedy_rewards), ~missing, rewards)


def gdpo_advantages(
    rewards: Tensor, group: Tensor, *, weights: Sequence[float] | Tensor | None = None, eps: float = 1e-4
) -> Tensor:
    """Several rewards, each normalised in its group before they are added.

    ``z_ik = (r_ik - mean(r_group,k)) / (std(r_group,k) + ε)``, ``a_i = Σ_k w_k z_ik``,
    ``A_i = (a_i - mean(a)) / (std(a) + ε)`` over the batch.

    GDPO, Liu et al. (2026, arXiv:2601.05242); TRL's ``normalize_then_sum``. No reward dominates by its scale.

    Args:
        rewards: (B, K), NaN where missing, which is skipped in the sum.
        group: (B,) integer ids, equal for samples of one prompt.
        weights: K numbers; all 1 when ``None``.
        eps: ``ε`` ≥ 0; TRL's 1e-4.

    Returns:
        (B,) in at least float32; 0 for rows without any reward and for groups in which no reward varies.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    if rewards.dim() != 2:
        raise ValueError(f"rewards must be (B, K), one column per reward, got {tuple(rewards.shape)}")
    if weights is not None and len(weights) != rewards.shape[1]:
        raise ValueError(f"weights must be {rewards.shape[1]} numbers, one per column of rewards, got {len(weights)}")
    _check_eps(eps)
    total = precise(torch.zeros_like(rewards[:, 0]))
    varied = torch.zeros_like(rewards[:, 0], dtype=torch.bool)
    for column in range(rewards.shape[1]):
        weight = 1.0 if weights is None else weights[column]
        total = total + weight * precise(group_advantages(precise(rewards[:, column]), group, eps=eps))
        varied = varied | by_group(rewards[:, column], group).varied
    mean, std = _spread(total, ~rewards.isnan().all(-1))
    return as_advantages((total - mean) / (std + eps), varied, rewards)


def best_of_group_advantages(rewards: Tensor, group: Tensor, *, normalize: bool = True, eps: float = 1e-6) -> Tensor:
    """Advantage for the best sample of each group only, by its distance to the second best.

    ``A_best = (r_(1) - r_(2)) / (std(r_group) + ε)``, all others 0; all 0 when two share the best reward.

    The gradient of the expected maximum, pass@n, Tang et al. (2025, arXiv:2503.19595); verl's ``grpo_passk``.

    Args:
        rewards: (B,), NaN where missing.
        group: (B,) integer ids, equal for samples of one prompt.
        normalize: Divide by the standard deviation, as verl's default.
        eps: ``ε``; verl's 1e-6.

    Returns:
        (B,) in at least float32.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    _check_eps(eps)
    groups = by_group(rewards, group)
    best = groups.extreme(groups.rewards, "amax")
    first = groups.present & (groups.rewards == best)
    second = groups.extreme(torch.where(first, torch.full_like(best, -torch.inf), groups.rewards), "amax")
    alone = groups.sum(first.to(best.dtype)) == 1
    advantages = (best - second) / (groups.std + eps if normalize else 1.0)
    return as_advantages(advantages, first & alone & groups.varied, rewards)


def pass_at_k_advantages(rewards: Tensor, group: Tensor, *, k: int) -> Tensor:
    """Advantage when at least one of k answers has to be right, from n ≥ k samples with right or wrong.

    With n samples of which ``w`` wrong, ``F = C(w, k) / C(n, k)`` (all of k fail) and ``σ = sqrt(F (1 - F))``:
    right ``A = F / σ``, wrong ``A = (F - C(w-1, k-1) / C(n-1, k-1)) / σ``.

    Pass@k training, Chen et al. (2025, arXiv:2508.10751): the mean advantage over all groups of k that contain the
    sample. With ``k=1`` it is GRPO's with the biased deviation and ``ε = 0``.

    Args:
        rewards: (B,), NaN where missing; right is more than 0.
        group: (B,) integer ids, equal for samples of one prompt.
        k: Answers allowed, at least 1.

    Returns:
        (B,) in at least float32; 0 where all groups of k succeed or all fail, and for groups of fewer than k.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    groups = by_group(rewards, group)
    right = groups.rewards > 0.0
    size, wrong = groups.members, groups.sum((~right).to(groups.rewards.dtype))
    fail = torch.exp(_log_choose(wrong, k) - _log_choose(size, k))
    fail_with = torch.exp(_log_choose(wrong - 1, k - 1) - _log_choose(size - 1, k - 1))
    variance = fail * (1.0 - fail)
    # The exponential of a logarithm of 1 may miss it by a rounding error, which a division must not blow up.
    keep = groups.present & (size >= k) & (wrong >= k) & (wrong < size)
    advantages = torch.where(right, fail, fail - fail_with) / torch.where(keep, variance, torch.ones_like(fail)).sqrt()
    return as_advantages(advantages, keep, rewards)


def _check_eps(eps: float) -> None:
    if not eps >= 0.0:
        raise ValueError(f"eps must not be negative, got {eps}")


def _spread(values: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation of the kept entries."""
    count = keep.sum()
    mean = torch.where(keep, values, torch.zeros_like(values)).sum() / count.clamp(min=1)
    squares = torch.where(keep, values - mean, torch.zeros_like(values)).square().sum()
    return mean, (squares / (count - 1).clamp(min=1)).sqrt()


def _log_choose(total: Tensor, chosen: int) -> Tensor:
    """Logarithm of the binomial coefficient; -inf where ``chosen`` exceeds ``total``."""
    value = torch.lgamma(total + 1) - torch.lgamma(total - chosen + 1)
    value = value - torch.lgamma(torch.full_like(total, chosen + 1.0))
    return torch.where(total >= chosen, value, torch.full_like(total, -torch.inf))


class Groups(NamedTuple):
    """Rows by group without dynamic shapes: group sums are scattered into B slots, some of which stay empty.

    Attributes:
        slot: (B,) int64, equal within a group.
        present: (B,) bool: the reward is not NaN.
        rewards: (B,) float64 where the device has it, so that the order of rows has no effect; 0 where missing.
    """

    slot: Tensor
    present: Tensor
    rewards: Tensor

    def sum(self, values: Tensor) -> Tensor:
        """(B,) for every row, the sum of (B,) ``values`` over the present rows of its group."""
        kept = torch.where(self.present, values, torch.zeros_like(values))
        return torch.zeros_like(kept).scatter_add(0, self.slot, kept)[self.slot]

    def extreme(self, values: Tensor, reduce: Literal["amin", "amax"]) -> Tensor:
        """(B,) for every row, the smallest or largest of (B,) ``values`` in its group."""
        fill = torch.inf if reduce == "amin" else -torch.inf
        kept = torch.where(self.present, values, torch.full_like(values, fill))
        return torch.full_like(kept, fill).scatter_reduce(0, self.slot, kept, reduce)[self.slot]

    @property
    def members(self) -> Tensor:
        """(B,) for every row, the number of present rows of its group."""
        return self.sum(self.present.to(self.rewards.dtype))

    @property
    def centred(self) -> Tensor:
        """(B,) rewards minus the mean of their group."""
        return self.rewards - self.sum(self.rewards) / self.members.clamp(min=1)

    @property
    def std(self) -> Tensor:
        """(B,) for every row, the unbiased standard deviation of its group; 0 for one member."""
        return (self.sum(self.centred.square()) / (self.members - 1).clamp(min=1)).sqrt()

    @property
    def varied(self) -> Tensor:
        """(B,) bool: the reward is present and two rewards of its group differ, which a rounded mean cannot tell."""
        return self.present & (self.extreme(self.rewards, "amax") > self.extreme(self.rewards, "amin"))


def by_group(rewards: Tensor, group: Tensor) -> Groups:
    """Sort rows into groups.

    Raises:
        ValueError: If the shapes are not (B,) or the ids not integers.
    """
    check_same_shape(rewards=rewards, group=group)
    if rewards.dim() != 1 or group.is_floating_point():
        raise ValueError(
            f"rewards must be (B,) and group (B,) integer ids, got {tuple(rewards.shape)} and {tuple(group.shape)} "
            f"of {group.dtype}"
        )
    rewards = rewards.detach()
    present = ~rewards.isnan()
    ordered, order = group.sort(stable=True)
    starts = torch.cat([torch.zeros_like(order[:1]), (ordered[1:] != ordered[:-1]).long()])
    slot = torch.zeros_like(order).scatter(0, order, starts.cumsum(0))
    rewards = precise(rewards)
    return Groups(slot, present, torch.where(present, rewards, torch.zeros_like(rewards)))


def precise(values: Tensor) -> Tensor:
    """Cast to float64, or to float32 on Apple's devices, which have no float64."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)


def as_advantages(values: Tensor, keep: Tensor, rewards: Tensor) -> Tensor:
    """``values`` where ``keep`` is true and 0 elsewhere, (B,) in the dtype of ``rewards`` but at least float32."""
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    return torch.where(keep, values, torch.zeros_like(values)).to(dtype)
