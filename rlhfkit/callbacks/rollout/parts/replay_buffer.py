"""``ReplayBuffer``: groups with a learning signal are kept, and trained on again in place of groups without one.

Not to be confused with :class:`~rlhfkit.rollout.replay.ReplayEngine`, which repeats a recorded run.
"""

import copy
import dataclasses
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from rlhfkit.callbacks.rollout.part import RolloutPart
from rlhfkit.callbacks.rollout.parts.dynamic_sampling import Criterion, check_part, compared_values, criterion
from rlhfkit.callbacks.rollout.sharing import SharedIteration
from rlhfkit.callbacks.rollout.source import Ask, Source
from rlhfkit.data.types import Sample
from rlhfkit.distributed import gather_objects, get_rank
from rlhfkit.protocols import CorrectsOffPolicy
from rlhfkit.rollout.collector import CollectedGroups, Group
from rlhfkit.rollout.engine import sample_seed
from rlhfkit.rollout.replay import sample_from_state, sample_state
from rlhfkit.trainer_parts import learner_of
from rlhfkit.validation import check_integer, check_number


class GroupNumbers(NamedTuple):
    """What all ranks learn of a group that one of them has."""

    prompt: int
    """Index of its prompt."""
    iteration: int
    """In which it was sampled."""
    deviation: float
    """Standard deviation of what is compared of its samples; 0: no signal."""
    good: bool
    """Whether it may be kept."""
    rewards: list[float]
    """Of its samples that have one."""
    versions: list[tuple[int, int]]
    """Policy version and number of tokens, of all runs of tokens that the policy chose."""

    @property
    def oldest(self) -> int:
        return min((version for version, _ in self.versions), default=0)


class ReplayBuffer(RolloutPart):
    """Keep groups whose rewards differ, and train on them again in place of later groups whose rewards are all equal.

    As TRL's ``GRPOWithReplayBufferTrainer``, with importance weights. A kept sample has the log-probs ``μ`` of the
    policy that made it. The module needs a ``Correction`` (``"tis"`` unless another one is given) or a policy loss that
    is given the engine's log-probs; with PPO's clip the surrogate of a token is

    ``w_t min(ρ_t A, clip(ρ_t) A)`` with ``ρ_t = π(y_t) / π_old(y_t)`` and ``w_t = f(π_old(y_t) / μ(y_t))``

    where ``π_old`` is the policy before the iteration and ``f`` the bounds of the correction (decoupled PPO: Hilton et
    al., 2021, arXiv:2110.00641, equation 4). Old log-probs of replayed samples are thus those of fresh ones: the clip
    limits what an iteration changes, and not how far the policy has moved since the sample was made, which is what the
    weight is for. With weights of whole sequences and no bounds (``Correction({"level": "sequence", "mode": "none"})``)
    the expected gradient is the on-policy one; bounds, and weights of tokens, trade some bias for variance. Groups are
    kept and replayed whole, so that baselines compare samples of one policy. A group without a signal has no gradient
    where its samples are compared with one another (GRPO, RLOO; not with a critic or the mean of a batch), so leaving
    it out changes the scale of a prompt's expected gradient and not its direction. Keeping good samples only (RLEP:
    Zhang et al., 2025, arXiv:2507.07451; ExGRPO: Zhan et al., 2025, arXiv:2510.02245) would change it.

    Each rank keeps groups that it has sampled itself. Which are kept and replayed all ranks decide from the numbers of
    all groups, so that it does not depend on who has them.

    Example::

        GRPOModule("Qwen/Qwen3-0.6B", parts=[Correction("seq-tis")])
        RolloutCallback(math_match, parts=[ReplayBuffer(capacity=256, max_age=32)])

    Args:
        capacity: Groups that all ranks keep together (64 in TRL). Those whose values differ least leave first, of equal
            ones the oldest; of each prompt only the newest group is kept.
        fraction: Largest share of an iteration's groups that are replayed (ExGRPO's ρ; TRL: 1).
        max_age: A group leaves when one of its tokens is older than this, in optimizer updates (TRL: no limit).
        min_reward: Keep only groups with a sample of at least this reward; ``None``: all whose rewards differ.
        by: What has to differ within a group: a reward part by name, or a function of a sample; ``None``: the total
            reward. See :class:`~rlhfkit.DynamicSampling`.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        *,
        capacity: int = 64,
        fraction: float = 0.5,
        max_age: int = 32,
        min_reward: float | None = None,
        by: Criterion = None,
    ) -> None:
        check_integer("ReplayBuffer.capacity", capacity, minimum=1, why="it is in groups")
        check_number("ReplayBuffer.fraction", fraction, above=0, maximum=1, why="it is a share of an iteration")
        check_integer("ReplayBuffer.max_age", max_age, minimum=1, why="it is in optimizer updates")
        check_number("ReplayBuffer.min_reward", min_reward, optional=True)
        self.capacity = capacity
        self.fraction = fraction
        self.max_age = max_age
        self.min_reward = min_reward
        self.by = criterion(by)
        self.measured: dict[str, float] = {}
        """Metrics of the last iteration, under ``rollout/``."""
        self._kept: dict[int, tuple[int, Group]] = {}  # by prompt: the iteration of the group, and the group

    def check(self, trainer: L.Trainer) -> None:
        """Have the module correct for the policies that replayed samples are of.

        Raises:
            ValueError: If it cannot, or the groups are compared by a part that there is not, or have nothing to
                compare.
        """
        if self.rollouts.sampling.group_size == 1:
            raise ValueError(
                "ReplayBuffer keeps groups whose rewards differ, and with SamplingSpec(group_size=1) none does: raise "
                "group_size, or leave ReplayBuffer out"
            )
        parts = self.rollouts.collector.reward_parts()
        if parts is not None and isinstance(self.by, str):
            check_part("ReplayBuffer", self.by, parts)
        module = learner_of(trainer)
        if isinstance(module, CorrectsOffPolicy) and module.correct_off_policy():
            rank_zero_info("Samples are replayed, so the policy learns with truncated weights: Correction('tis').")
        if not module.uses_rollout_logprobs:
            raise ValueError(
                f"ReplayBuffer trains {type(module).__name__} on samples of earlier policies, for which it has no "
                "importance weights: give it Correction('tis') or 'seq-tis', or a policy_loss that is given the "
                "engine's log-probs ('decoupled_ppo_loss'), or leave ReplayBuffer out"
            )

    def wrap(self, source: Source) -> Source:
        self._source = source
        return self

    def collect(self, ask: Ask) -> CollectedGroups:
        version, seed = ask.trainer.global_step, ask.sampling.seed
        return self.replay(self._source.collect(ask), iteration=ask.iteration, version=version, seed=seed)

    def metrics(self, shared: SharedIteration, version: int) -> Mapping[str, float]:
        return self.measured

    def replay(self, collected: CollectedGroups, *, iteration: int, version: int, seed: int) -> CollectedGroups:
        """Replace groups without a signal by kept ones, and keep new groups. A collective.

        Args:
            collected: The scored groups of an iteration.
            iteration: Its number.
            version: Policy version (updates so far) that will train on them.
            seed: Seed of the choice among the kept groups.
        """
        own = {group[0].prompt.index: group for group in collected.groups}
        fresh, kept, mine = self._exchange(collected.groups, iteration)
        self._kept = {prompt: each for prompt, each in self._kept.items() if prompt in mine}
        kept = {prompt: one for prompt, one in kept.items() if version - one.oldest <= self.max_age}
        replayed = self._chosen(fresh, kept, iteration, seed)
        places = [prompt for prompt in collected.prompts if not fresh[prompt].deviation][: len(replayed)]
        instead = dict(zip(places, replayed, strict=True))
        prompts = [instead.get(prompt, prompt) for prompt in collected.prompts]
        old = {prompt: self._kept[prompt][1] for prompt in replayed if prompt in self._kept}
        groups = own | {prompt: [_again(sample) for sample in group] for prompt, group in old.items()}
        self.replaced = [sample for prompt in places for sample in own.get(prompt, ())]
        self._keep(own, fresh, kept, iteration)
        self._measure(fresh, [kept[prompt] for prompt in replayed], version)
        return dataclasses.replace(
            collected, prompts=prompts, groups=[groups[prompt] for prompt in prompts if prompt in groups]
        )

    def _exchange(
        self, groups: Sequence[Group], iteration: int
    ) -> tuple[dict[int, GroupNumbers], dict[int, GroupNumbers], set[int]]:
        """Numbers of all ranks' new and kept groups by prompt, and the prompts of which this rank's group counts.

        After a resume several ranks may have the same group, or groups of one prompt: the newest counts, of equal ones
        that of the lowest rank.
        """
        new = [self._numbers(group, iteration) for group in groups]
        held = [self._numbers(group, sampled) for sampled, group in self._kept.values()]
        ranks = gather_objects((new, held))
        fresh = {one.prompt: one for theirs, _ in ranks for one in theirs}
        kept: dict[int, tuple[GroupNumbers, int]] = {}
        for rank, (_, theirs) in enumerate(ranks):
            for one in theirs:
                if one.prompt not in kept or kept[one.prompt][0].iteration < one.iteration:
                    kept[one.prompt] = one, rank
        mine = {prompt for prompt, (_, rank) in kept.items() if rank == get_rank()}
        return fresh, {prompt: one for prompt, (one, _) in kept.items()}, mine

    def _numbers(self, group: Group, iteration: int) -> GroupNumbers:
        values = compared_values(group, self.by, owner="ReplayBuffer")
        differ = len(set(values)) > 1
        rewards = [sample.reward for sample in group if sample.reward is not None]
        least = self.min_reward
        return GroupNumbers(
            prompt=group[0].prompt.index,
            iteration=iteration,
            deviation=max(pstdev(values), 1e-12) if differ else 0.0,
            good=differ and (least is None or max(rewards) >= least),
            rewards=rewards,
            versions=[run for sample in group for run in sample.version_runs if run[0] >= 0],
        )

    def _chosen(
        self, fresh: Mapping[int, GroupNumbers], kept: Mapping[int, GroupNumbers], iteration: int, seed: int
    ) -> list[int]:
        """Prompts of the kept groups that take part: drawn without replacement, in proportion to their deviations.

        The largest ``log(u) / weight`` of uniform u are such a draw (Efraimidis and Spirakis, 2006). As groups of one
        prompt would be compared with one another, those of prompts that were just sampled stay where they are.
        """
        silent = sum(not one.deviation for one in fresh.values())
        most = min(silent, math.floor(self.fraction * len(fresh) + 1e-9))

        def key(one: GroupNumbers) -> float:
            draw = random.Random(sample_seed(seed, iteration, one.prompt, 0)).random()
            return math.log(max(draw, 1e-300)) / one.deviation

        candidates = sorted((one for one in kept.values() if one.prompt not in fresh), key=key, reverse=True)
        return [one.prompt for one in candidates[:most]]

    def _keep(
        self,
        own: Mapping[int, Group],
        fresh: Mapping[int, GroupNumbers],
        kept: Mapping[int, GroupNumbers],
        iteration: int,
    ) -> None:
        """Choose which groups stay, and keep those of them that this rank has."""
        all_groups = dict(kept) | {prompt: one for prompt, one in fresh.items() if one.good}
        order = sorted(all_groups.values(), key=lambda one: (-one.deviation, -one.iteration, one.prompt))
        staying = {one.prompt for one in order[: self.capacity]}
        new = {prompt: (iteration, own[prompt]) for prompt, one in fresh.items() if one.good and prompt in own}
        for prompt, one in fresh.items():
            if one.good and prompt not in own:
                self._kept.pop(prompt, None)  # another rank has a newer one
        self._kept = {prompt: each for prompt, each in (self._kept | new).items() if prompt in staying}
        self.measured["rollout/replay_buffer_groups"] = float(len(staying))

    def _measure(self, fresh: Mapping[int, GroupNumbers], replayed: Sequence[GroupNumbers], version: int) -> None:
        rewards = [reward for one in fresh.values() for reward in one.rewards]
        runs = [run for one in replayed for run in one.versions]
        tokens = sum(count for _, count in runs)
        ages = sum((version - made) * count for made, count in runs)
        self.measured |= {
            "rollout/replayed_fraction": len(replayed) / len(fresh),
            "rollout/replayed_age": ages / tokens if tokens else 0.0,
            "rollout/replayed_age_max": float(max((version - made for made, _ in runs), default=0)),
            "rollout/reward_before_replay": fmean(rewards) if rewards else math.nan,
        }

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self, next_iteration: int) -> list[dict[str, Any]]:
        """The groups of this rank, as tensors and plain values."""
        return [
            {"iteration": iteration, "samples": [sample_state(sample) for sample in group]}
            for iteration, group in self._kept.values()
        ]

    def load_state_dict(self, own: Iterable[Any], states: Iterable[Any], *, rank: int, world_size: int) -> None:
        """Keep saved groups, but those of another size than the run's, if all of a run have one size."""
        rollouts = self.rollouts
        self.take(states, group_size=None if rollouts.groups is not None else rollouts.sampling.group_size)

    def take(self, groups: Iterable[Mapping[str, Any]], *, group_size: int | None) -> None:
        """Keep these groups, of one rank or of several, but those that have not ``group_size`` (``None``: any)."""
        self.clear()
        for state in groups:
            if group_size is None or len(state["samples"]) == group_size:
                group = [sample_from_state(each) for each in state["samples"]]
                self._kept[group[0].prompt.index] = state["iteration"], group

    def clear(self) -> None:
        """Forget all groups: versions of another run say nothing here, nor do its prompts' numbers."""
        self._kept = {}


def _again(sample: Sample) -> Sample:
    """A copy that says that it was sampled earlier; it shares the sample's arrays."""
    again = copy.copy(sample)
    again.replayed = True
    return again
