"""``RewardedModule``: from the reward of a sample to the one that is learned from: reward model, penalties, scale."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rlhfkit.data.packing import split_groups_by_tokens
from rlhfkit.data.types import Experience
from rlhfkit.distributed import all_reduce
from rlhfkit.losses import RewardMoments, clip_rewards, missing_eos_penalty, normalize_rewards, stop_properly_penalty
from rlhfkit.models import load_scalar_model, load_tokenizer, policy_output, reward_output
from rlhfkit.modules.base import PolicyModule
from rlhfkit.validation import check_integer, check_number


class RewardedModule(PolicyModule):
    """A policy whose samples are rewarded.

    Each iteration's rewards are the callback's plus the reward model's, minus a penalty where an answer was cut off,
    normalised, and clipped: OpenRLHF's order, in which the baseline comes after. Logs show them before all but the
    first of these.

    Args:
        model: Folder or hub name of the policy.
        reward_model: Folder or hub name of a reward model, whose normalised score is added to the callback's reward. It
            is a frozen child: the strategy shards or offloads it like the reference, and every rank scores its share.
            It must have the policy's tokens. ``RolloutCallback`` asks for the scores of all samples, those of
            validation too. :class:`~rlhfkit.rewards.ModelReward` in the callback does the same unsharded.
        stop_properly_coef: At most 1. In [0, 1]: positive rewards of answers that the length limit cut off are
            multiplied by it, so that with 0 only what ends is rewarded; below 0: it is their reward (ProRL v2). 1: off.
        mask_truncated: Learn nothing from answers that the length limit cut off (overlong filtering, DAPO: Yu et al.,
            2025, arXiv:2503.14476, section 3.4). Their rewards are part of baselines all the same, and the
            means of losses are over the tokens that are left.
        missing_eos_penalty: Subtracted from the reward of answers that the length limit cut off (TRL's PPO). 0: off.
        normalize_rewards: Shift and scale by the mean and deviation of all rewards so far, this iteration's among them;
            saved in checkpoints. Off in OpenRLHF and TRL.
        reward_clip: Rewards are clipped to ± this (10 in OpenRLHF; off in TRL); ``None``: not.
        max_tokens_per_forward: Tokens per forward pass of policy, critic, reference, teacher or reward model over a
            whole iteration, without gradient (OpenRLHF's default is 16192).
        **kwargs: See :class:`PolicyModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    reward_model: nn.Module
    frozen_children = (*PolicyModule.frozen_children, "reward_model")
    batch_types = (Experience,)

    def __init__(
        self,
        model: str,
        *,
        reward_model: str | None = None,
        mask_truncated: bool = False,
        stop_properly_coef: float = 1.0,
        missing_eos_penalty: float = 0.0,
        normalize_rewards: bool = False,
        reward_clip: float | None = None,
        max_tokens_per_forward: int = 16384,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        check_number("reward_clip", reward_clip, above=0, optional=True)
        check_number("missing_eos_penalty", missing_eos_penalty, minimum=0, why="it is subtracted")
        check_number("stop_properly_coef", stop_properly_coef, maximum=1, why="1 is no penalty")
        check_integer("max_tokens_per_forward", max_tokens_per_forward, minimum=1)
        self.reward_moments = RewardMoments.zero()
        """Count, mean and squared deviations of the rewards so far; moves with ``normalize_rewards`` only."""

    # ------------------------------------------------------------------ the reward model

    @property
    def needs_reward(self) -> bool:
        """Whether ``RolloutCallback`` has to give a reward."""
        return self.hparams["reward_model"] is None

    def configure_model(self) -> None:
        """Build the reward model too, where there is one."""
        super().configure_model()
        if self.hparams["reward_model"] is not None and not hasattr(self, "reward_model"):
            self.reward_model = self.build_reward_model()
            # Lightning 2.6 warns of every module in eval mode when fitting starts; this one is meant to be.
            warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")

    def build_reward_model(self) -> nn.Module:
        """Load the reward model, frozen; override to wrap or change it.

        Raises:
            ValueError: If its tokens are not the policy's, or it is no reward model.
        """
        name, trust = self.hparams["reward_model"], self.hparams["trust_remote_code"]
        if load_tokenizer(name, trust_remote_code=trust).get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(
                f"the reward model {name} has another tokenizer than the policy {self.hparams['model']}: give the "
                "callback a ModelReward(..., text=lambda sample: ...) in place of reward_model"
            )
        model = load_scalar_model(
            name,
            new_head=False,
            dtype=self.model_dtype,
            attention=self.hparams["attention"],
            trust_remote_code=trust,
        )
        return model.requires_grad_(False).eval()

    @property
    def scores_samples(self) -> bool:
        """Whether there is a reward model, whose scores ``RolloutCallback`` adds to the rewards of samples."""
        return self.hparams["reward_model"] is not None

    def reward_model_scores(self, experience: Experience) -> Tensor:
        """Normalised scores of the reward model. A collective, for the thread that trains.

        Args:
            experience: B sequences, the same on every rank.

        Returns:
            (B,) float32 on the CPU, the same on every rank.
        """

        def scores(batch: Experience) -> Tensor:
            return reward_output(self.reward_model, batch, normalized=True)[:, None]

        return self.sharded(self.reward_model, scores, experience)[:, 0]

    def add_reward_model_scores(self, experience: Experience) -> Experience:
        """With the reward model's score in the rewards, and among their parts as ``model``. A collective.

        Args:
            experience: B sequences, the same on every rank; unchanged if the score is a part of the rewards already,
                as ``RolloutCallback`` gives it.
        """
        if not self.scores_samples or "model" in experience.reward_parts:
            return experience
        score = self.reward_model_scores(experience)
        parts = {**experience.reward_parts, "model": score}
        return dataclasses.replace(experience, rewards=experience.rewards + score, reward_parts=parts)

    # ------------------------------------------------------------------ forward passes over an iteration

    def sharded_logprobs(self, model: nn.Module, experience: Experience, rows: Tensor | None = None) -> Tensor:
        """Log-probs of a whole iteration, each rank computing its share. A collective: all ranks call it alike.

        Args:
            model: The policy or a reference.
            experience: B sequences, the same on every rank.
            rows: (B,) bool, which sequences are wanted; all when ``None``.

        Returns:
            (B, T-1) float32 on the CPU, the same on every rank; 0 outside the mask and in rows not asked for.
        """

        def logprobs(batch: Experience) -> Tensor:
            return policy_output(model, batch, batch.action_mask, temperature=batch.temperature).logprobs

        return self.sharded(model, logprobs, experience, rows)

    @torch.no_grad()
    def sharded(
        self,
        model: nn.Module,
        compute: Callable[[Experience], Tensor],
        experience: Experience,
        rows: Tensor | None = None,
        columns: int | None = None,
    ) -> Tensor:
        """A forward pass over a whole iteration, each rank computing its share. A collective: all ranks call it alike.

        Args:
            model: What ``compute`` calls; in eval mode meanwhile.
            compute: From a batch of b sequences of t tokens to (b, t-1), or (b, t-1, C).
            experience: B sequences, the same on every rank.
            rows: (B,) bool, which sequences are wanted; all when ``None``.
            columns: C, where ``compute`` gives several numbers for each token.

        Returns:
            (B, T-1) or (B, T-1, C) float32 on the CPU, the same on every rank; 0 in rows not asked for.
        """
        last = () if columns is None else (columns,)
        total = torch.zeros((*experience.action_mask.shape, *last), device=self.device)
        wanted = torch.arange(len(experience)) if rows is None else rows.nonzero()[:, 0]
        world, rank = self.trainer.world_size, self.global_rank
        if len(wanted):
            lengths = experience.lengths[wanted].tolist()
            bins = world * math.ceil(sum(lengths) / (world * self.hparams["max_tokens_per_forward"]))
            # Every rank runs equally many forward passes: a sharded model gathers its weights in each.
            bins = max(min(bins, len(wanted) // world * world), 1)
            shares = split_groups_by_tokens(
                range(len(wanted)),
                bins,
                lengths=lengths,
                prompts=experience.prompt_lengths[wanted].tolist(),
                groups=experience.group[wanted].tolist(),
                ranks=world,
            )
            training = model.training
            model.eval()
            for share in shares[rank::world]:
                batch = experience.select(wanted[share]).to(self.device)
                with self.trainer.precision_plugin.forward_context():
                    values = compute(batch)
                total[wanted[share].to(self.device), : values.shape[1]] = values.float()
            model.train(training)
        return all_reduce(total).cpu()

    # ------------------------------------------------------------------ penalties and scale

    def process_rewards(self, experience: Experience) -> Experience:
        """With the rewards that are learned from; override for another order or another penalty.

        Args:
            experience: The whole iteration, the same on every rank. Called once for each: running moments move here.
        """
        hparams, rewards, earned = self.hparams, experience.rewards, experience.token_rewards
        rewards = stop_properly_penalty(rewards, experience.truncated, coef=hparams["stop_properly_coef"])
        rewards = missing_eos_penalty(rewards, experience.truncated, penalty=hparams["missing_eos_penalty"])
        if hparams["normalize_rewards"]:
            self.reward_moments = self.reward_moments.update(rewards)
            mean, std = self.reward_moments.mean, self.reward_moments.std
            rewards = normalize_rewards(rewards, mean, std)
            # What a token earned is a difference of rewards: it has a scale, and no mean.
            earned = None if earned is None else normalize_rewards(earned, mean, std, shift_mean=False)
        if hparams["reward_clip"] is not None:
            rewards = clip_rewards(rewards, low=-hparams["reward_clip"], high=hparams["reward_clip"])
        return dataclasses.replace(experience, rewards=rewards, token_rewards=earned)

    def mask_truncated_samples(self, experience: Experience) -> Experience:
        """Without the tokens of answers that were cut off, if nothing is to be learned from them.

        Args:
            experience: The whole iteration, with advantages.
        """
        if not self.hparams["mask_truncated"]:
            return experience
        return dataclasses.replace(experience, action_mask=experience.action_mask & ~experience.truncated[:, None])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remember the running moments."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["reward_moments"] = self.reward_moments.plain()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with the running moments."""
        super().on_load_checkpoint(checkpoint)
        if "reward_moments" in checkpoint:
            self.reward_moments = RewardMoments.of(checkpoint["reward_moments"])
