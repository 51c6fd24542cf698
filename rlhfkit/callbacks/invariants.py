"""``Invariants``: check in every iteration what must always hold."""

import random
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from rlhfkit.callbacks.rollout.callback import RolloutCallback
from rlhfkit.data.types import OTHER_MODEL, Experience
from rlhfkit.distributed import gather_objects
from rlhfkit.protocols import ChecksRows


class InvariantError(RuntimeError):
    """An invariant was violated; the message says which."""


class Invariants(Callback):
    """Stop a run of reinforcement learning whose experience violates an invariant.

    Checked once per iteration, at the cost of a few comparisons and two forward passes:

    - all log-probs and advantages are finite, and the engine's log-probs are at most 0;
    - padding is not trained on;
    - no group has a sample twice, and no iteration a prompt twice;
    - groups whose rewards are all equal have advantage 0 (``compares_groups``);
    - no token was sampled by a future policy, or by one older than ``Ahead(max_staleness=...)`` allows (older ones may
      be replayed samples, and what partial rollouts continue);
    - a random row of a random micro-batch has the same log-probs with and without the other rows (rlhfkit's modules
      always check this in the first batch of a fit).

    Args:
        compares_groups: Check that equal rewards give advantage 0. Set it to false with a critic, REINFORCE++, a KL
            penalty in the reward, or a teacher.

    Raises:
        InvariantError: If an invariant is violated.
    """

    def __init__(self, *, compares_groups: bool = True) -> None:
        self.compares_groups = compares_groups
        self.checked = 0
        """Iterations that were checked."""
        self._versions: list[int] = []  # of the policy at the start of the latest iterations

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Check the iteration at its first micro-batch, and rows of a random micro-batch, the same on every rank."""
        rollouts = RolloutCallback.of(trainer)
        chosen = random.Random(rollouts.iteration).randrange(int(trainer.num_training_batches))
        if batch_idx == chosen and isinstance(pl_module, ChecksRows) and (problems := pl_module.row_problems(batch)):
            raise InvariantError(f"iteration {rollouts.iteration}: {'; '.join(problems)}")
        if batch_idx:
            return
        experience = rollouts.experience
        if experience is None:  # resumed inside an iteration
            return
        staleness = rollouts.max_staleness
        self._versions = [*self._versions, trainer.global_step][-(staleness or 0) - 1 :]
        oldest = None if staleness is None else self._versions[0]
        of_versions = self._of_versions(experience, oldest, trainer.global_step)
        own = [*self._of_tokens(experience), *self._of_groups(experience), *of_versions]
        problems = list(dict.fromkeys(each for share in gather_objects(own) for each in share))
        if problems:
            raise InvariantError(f"iteration {rollouts.iteration}: {'; '.join(problems)}")
        self.checked += 1

    def _of_tokens(self, experience: Experience) -> list[str]:
        mask, problems = experience.action_mask, []
        if bool((mask & ~experience.attention_mask[:, 1:]).any()):
            problems.append("padding is marked as sampled by the policy")
        for name in (
            "old_logprobs",
            "ref_logprobs",
            "teacher_logprobs",
            "values",
            "advantages",
            "returns",
        ):
            values = experience.columns.get(name, getattr(experience, name, None))
            if values is not None and not bool(values[mask].isfinite().all()):
                problems.append(f"{name} are not all finite")
        of_engine = experience.rollout_logprobs[mask & (experience.versions != OTHER_MODEL)]
        # All NaN means that the engine returns no log-probs; some NaN is an error.
        if not bool(of_engine.isfinite().all() or of_engine.isnan().all()):
            problems.append("rollout_logprobs are not all finite")
        if bool((of_engine > 1e-4).any()):
            problems.append("some of the engine's log-probs are above 0")
        return problems

    def _of_groups(self, experience: Experience) -> list[str]:
        summary = experience.summary  # samples of a group may be on several ranks
        pairs = torch.stack([summary.group, summary.sample_index], -1)
        problems = []
        if len(torch.unique(pairs, dim=0)) < len(pairs):
            problems.append("a prompt is in the iteration twice, or a group has a sample twice")
        if not self.compares_groups or experience.advantages is None:
            return problems
        for group in torch.unique(experience.group):
            rows = experience.group == group
            rewards = summary.rewards[summary.group == group]
            equal = len(torch.unique(rewards[~rewards.isnan()])) < 2
            if equal and bool((experience.advantages[rows][experience.action_mask[rows]] != 0).any()):
                problems.append(f"the rewards of prompt {int(group)} are all equal, and its advantages are not 0")
        return problems

    def _of_versions(self, experience: Experience, oldest: int | None, newest: int) -> list[str]:
        """Tokens of the policy that are not of a version from ``oldest`` (``None``: any) to ``newest``.

        Replayed samples, which a :class:`~rlhfkit.ReplayBuffer` lets be older, only have to be of the past.
        """
        by_policy = experience.action_mask & (experience.versions != OTHER_MODEL)
        fresh = by_policy if experience.replayed is None else by_policy & ~experience.replayed[:, None]
        problems = []
        if by_policy.any() and (found := int(experience.versions[by_policy].max())) > newest:
            problems.append(f"tokens are from version {found}, and the policy is at {newest}")
        if oldest is not None and fresh.any() and (found := int(experience.versions[fresh].min())) < oldest:
            problems.append(f"tokens are from version {found}, older than max_staleness allows ({oldest})")
        return problems
