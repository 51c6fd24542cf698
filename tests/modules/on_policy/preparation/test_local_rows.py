"""Rows of an iteration scattered over three ranks are prepared as they are in one process.

Covers ranks.py.
"""

import collections
import dataclasses
import functools
import logging
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from strategies import ranks
from tiny_models import tiny_model
from torch import Tensor, nn

from rlhfkit import (
    GRPOModule,
    ModelLoading,
    OnPolicyDistillationModule,
    Part,
    PPOModule,
    Stage,
    local_rows,
)
from rlhfkit.data import Experience, Prompt, Sample
from rlhfkit.distributed import gather_objects
from rlhfkit.losses import gdpo_advantages, opo_advantages, pass_at_k_advantages
from rlhfkit.models.heads import load_scalar_model, reward_output
from rlhfkit.modules.on_policy.base import OnPolicyModule
from rlhfkit.modules.parts import Critic, MaskTruncated, RewardModel
from rlhfkit.modules.parts.advantages import TokenCredit, WhitenAdvantages
from rlhfkit.modules.parts.kl_control import KLTarget
from rlhfkit.modules.parts.kl_penalty import KLInReward, KLPart
from rlhfkit.modules.parts.rewards import ClipRewards, MissingEndPenalty, NormalizeRewards, StopProperly
from rlhfkit.modules.parts.teacher import TeacherAdvantages

from .test_rewards import reward_model

SEQUENCES, GROUP = 24, 4
SHARES = [13, 8, 3]

# ---------------------------------------------------------------------- functions and overrides of a user


def by_token(experience: Experience, *, scale: float = 1.0) -> Tensor:
    """Written for the whole iteration; depends on log-probs of other sequences, and differs between tokens."""
    several = gdpo_advantages(torch.stack([*experience.reward_parts.values()], -1), experience.group)
    mean = experience.columns["ref_logprobs"][experience.action_mask].mean()
    return several[:, None] + scale * (experience.columns["ref_logprobs"] - mean)


@local_rows
def of_rewards_of_all(experience: Experience) -> Tensor:
    """All parts of the reward, and the processed rewards, of all ranks are in the summary."""
    everyone = experience.summary
    several = gdpo_advantages(torch.stack([*everyone.reward_parts.values()], -1), everyone.group)
    return several[experience.own_rows] + (experience.rewards - everyone.rewards.nanmean()).nan_to_num()


def above_worst(experience: Experience) -> Experience:
    """Shifts rewards by the worst of the whole iteration."""
    worst = experience.rewards.nan_to_num(nan=math.inf).min()
    return dataclasses.replace(experience, rewards=experience.rewards - worst)


class AboveWorst(Part):
    """The same for own rows."""

    stage, reads, writes = Stage.SHAPE, ("rewards",), ("rewards",)

    def prepare(self, rows: Experience) -> Experience:
        worst = self.module.ranks.gather_rows(rows, rows.rewards).nan_to_num(nan=math.inf).min()
        return dataclasses.replace(rows, rewards=rows.rewards - worst)


class Shifted(GRPOModule):
    """Overrides advantages for the whole iteration."""

    def advantages(self, experience: Experience) -> Tensor:
        scores = super().advantages(experience)
        longest = experience.action_mask.sum(-1).max()
        return scores * experience.action_mask.sum(-1) / longest


class ShiftedLocally(GRPOModule):
    """Overrides advantages for own rows."""

    @local_rows
    def advantages(self, experience: Experience) -> Tensor:
        scores = super().advantages(experience)
        return scores * experience.action_mask.sum(-1) / experience.summary.trained_tokens.max()


class Whitened(PPOModule):
    """Doubles what PPO computes, from the whole iteration."""

    def advantages(self, experience: Experience) -> Tensor:
        return 2.0 * super().advantages(experience)


SHAPING = [one.plain() for one in (StopProperly(0.5), MissingEndPenalty(0.25), NormalizeRewards(), ClipRewards(1.5))]
CASES: dict[str, tuple[Callable[..., OnPolicyModule], dict[str, Any]]] = {
    "grpo": (GRPOModule, {"preset": "grpo"}),
    "grpo, scale of the batch": (GRPOModule, {"advantage_scale": "batch", "parts": [MaskTruncated().plain()]}),
    "dr_grpo": (GRPOModule, {"preset": "dr_grpo", "policy_loss_arguments": {"max_length": 9}}),
    "rloo": (GRPOModule, {"preset": "rloo"}),
    "reinforce++": (GRPOModule, {"preset": "reinforce++"}),
    "reinforce++-baseline": (GRPOModule, {"preset": "reinforce++-baseline"}),
    "gpg": (GRPOModule, {"preset": "gpg"}),
    "processed rewards": (GRPOModule, {"parts": [*SHAPING, TokenCredit(0.9).plain(), WhitenAdvantages().plain()]}),
    "earned by tokens": (
        GRPOModule,
        {"advantage_scale": "none", "parts": [NormalizeRewards().plain(), TokenCredit(earned=True).plain()]},
    ),
    "moving kl": (GRPOModule, {"kl_coef": 0.5, "parts": [KLTarget(0.21, horizon=100).plain()]}),
    "lengths": (GRPOModule, {"advantages": opo_advantages}),
    "pass at k": (GRPOModule, {"advantages": functools.partial(pass_at_k_advantages, k=2)}),
    "reward model": (GRPOModule, {"parts": [KLInReward(0.1).plain()]}),
    "ppo": (PPOModule, {"lam": 0.9, "kl_coef": 0.3, "parts": [KLTarget(0.01, horizon=100).plain()]}),
    "ppo, normalized values": (
        PPOModule,
        {"parts": [Critic(normalize=True).plain(), KLInReward(0.3).plain(), *SHAPING]},
    ),
    "ppo, shared backbone": (PPOModule, {"parts": [Critic(shared=True).plain()], "advantages": opo_advantages}),
    "ppo, overridden": (Whitened, {}),
    "distillation": (
        OnPolicyDistillationModule,
        {"teacher": "teacher", "reward_coef": 0.5, "parts": [TeacherAdvantages(gamma=0.9).plain()]},
    ),
    "divergence": (
        OnPolicyDistillationModule,
        {"teacher": "teacher", "divergence": "jsd", "reward_coef": 0.5, "parts": [WhitenAdvantages().plain()]},
    ),
    "function of the iteration": (
        GRPOModule,
        {"advantages": functools.partial(by_token, scale=2.0), "parts": [KLInReward(0.1).plain()]},
    ),
    "function of own rows": (
        GRPOModule,
        {"advantages": of_rewards_of_all, "parts": [KLInReward(0.1).plain(), *SHAPING]},
    ),
    "overridden": (Shifted, {"parts": [*SHAPING, above_worst]}),
    "overridden for own rows": (ShiftedLocally, {"parts": [*SHAPING, AboveWorst().plain()]}),
}

GATHERING = {"function of the iteration", "overridden", "ppo, overridden"}

# ---------------------------------------------------------------------- the iterations


def iteration(number: int) -> Experience:
    """24 sequences of 6 prompts, of 3 to 12 tokens; one could not be scored, a third is cut off."""
    chance, samples = random.Random(number), list[Sample]()
    for group in range(0, 7 * SEQUENCES // GROUP, 7):
        prompt = Prompt(group, chance.choices(range(3, 98), k=chance.randint(2, 3)))
        for index in range(GROUP):
            size, row = chance.randint(1, 9), len(samples)
            logprobs = [chance.gauss() for _ in range(size)]
            sample = Sample(prompt, index, chance.choices(range(3, 98), k=size), logprobs, [number] * size, "stop")
            sample.reward = None if row == 5 else chance.gauss()
            sample.reward_parts = {"a": chance.gauss(), "b": chance.gauss()}
            sample.token_rewards = [0.1 * one for one in logprobs]
            sample.finish_reason = "stop" if row % 3 else "length"
            samples.append(sample)
    whole = Experience.from_samples(samples, temperature=0.8)
    return dataclasses.replace(whole, update=torch.arange(SEQUENCES) // 12)


def share(whole: Experience, number: int, rank: int) -> Experience:
    """The rows of one of three ranks, in an order of their own; the third has rows of the first update only."""
    order = torch.randperm(SEQUENCES, generator=torch.Generator().manual_seed(10 + number))
    last = order[order < 12][: SHARES[2]]
    order = torch.cat([order[~torch.isin(order, last)], last])
    rows = order.split(SHARES)[rank]
    return dataclasses.replace(whole.select(rows), rows=rows, iteration=whole.summarize())


def built(name: str, folder: Path, trainer: L.Trainer) -> Any:
    """The module of a case in float64, so that sums in another order give the same numbers; its policy has moved."""
    kind, arguments = CASES[name]
    paths: dict[str, Any] = {key: str(folder / value) for key, value in arguments.items() if key == "teacher"}
    if name == "reward model":
        paths["parts"] = [RewardModel(str(folder / "reward")), *arguments["parts"]]
    module: Any = kind(
        str(folder / "policy"), **{**arguments, **paths}, loading=ModelLoading(max_tokens_per_forward=30)
    )
    module.trainer = trainer
    module.configure_model()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for child in ("policy", "critic"):
            for parameter in getattr(module, child, nn.Module()).parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return module.double()


def prepare(module: Any, take: Callable[[Experience, int], Experience]) -> tuple[list[Experience], dict[str, Any]]:
    """Two prepared iterations, and what the module and its parts know after them."""
    prepared = [module.prepare(take(iteration(number), number)) for number in range(2)]
    states = {index: part.state_dict() for index, part in enumerate(module.parts)}
    return prepared, states | {"coef": [part.coef for part in module.parts if isinstance(part, KLPart)]}


def one_process() -> L.Trainer:
    """A Trainer that gives modules their precision; it starts no ranks."""
    return L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)


# ---------------------------------------------------------------------- what a rank runs


def on_ranks(folder: Path, place: str) -> None:
    """All cases with this rank's rows, against whole iterations in one process."""
    rank, alone = int(os.environ["LOCAL_RANK"]), torch.load(Path(place) / "alone.pt", weights_only=False)
    dist.init_process_group("gloo", rank=rank, world_size=3)
    trainer, messages, passes = one_process(), list[str](), collections.Counter[str]()
    logging.getLogger("rlhfkit.modules.on_policy.ranks").addFilter(
        lambda one: messages.append(one.getMessage()) or True
    )
    for name in CASES:
        print(name)
        messages.clear()
        passes.clear()
        module = built(name, Path(place), trainer)
        for child_name, child in module.named_children():
            child.register_forward_hook(lambda *_, name=child_name: passes.update([name]))
        prepared, states = prepare(module, lambda whole, number: share(whole, number, rank))
        check_alike(module, prepared, states, *alone[name])
        known = gather_objects((passes, states))
        assert known[0] == known[1] == known[2], "or a sharded model waits for ever, and weights differ between ranks"
        assert passes["policy"] or name == "function of the iteration" or "policy" not in passes
        assert len(messages) == len({*messages}), "once, of two iterations"
        assert bool(messages) == (rank == 0 and name in GATHERING)
        if messages and name == "function of the iteration":
            assert messages[0].startswith("by_token is given the whole iteration, so that each of 3 ranks holds 24 seq")
    check_gathered_rows(built("grpo", Path(place), trainer), rank)
    check_scores(built("reward model", Path(place), trainer), Path(place), rank)


def check_alike(module: Any, prepared: list[Experience], states: Any, wholes: list[Experience], expected: Any) -> None:
    """This rank's rows and what its module knows, against those of one process."""
    for found, whole in zip(prepared, wholes, strict=True):
        wanted, own = whole.select(found.own_rows).tensors(), found.tensors()
        assert own.keys() - {"rows"} == wanted.keys() - {"rows"}
        for name, (value, _) in wanted.items():
            chosen = found.action_mask if value.shape == found.action_mask.shape else slice(None)
            torch.testing.assert_close(
                own[name][0][chosen], value[chosen], rtol=1e-6, atol=1e-6, equal_nan=True, msg=name
            )
    for index, part in enumerate(module.parts):
        if isinstance(part, KLTarget | Critic):  # sums over ranks; moments of rewards are the same bit for bit
            expected[index] = {key: pytest.approx(value, rel=1e-6) for key, value in expected[index].items()}
    assert states == expected | {"coef": pytest.approx(expected["coef"], rel=1e-6)}


def check_gathered_rows(module: GRPOModule, rank: int) -> None:
    """Rows of every kind, and of a field and a part of the reward that only some ranks have."""
    whole = iteration(0)
    own = share(whole, 0, rank)
    everyone = module.ranks.gather_experience(own)
    assert everyone.iteration is None
    assert everyone.rows is None
    assert everyone.tensors().keys() == whole.tensors().keys()
    for name, (value, _) in whole.tensors().items():
        torch.testing.assert_close(everyone.tensors()[name][0], value, rtol=0, atol=0, equal_nan=True, msg=name)
    partly = dataclasses.replace(
        own,
        token_rewards=None if rank == 1 else own.token_rewards,
        reward_parts=own.reward_parts if rank == 2 else {"a": own.reward_parts["a"]},
    )
    missing = module.ranks.gather_experience(partly)
    absent = [share(whole, 0, other).own_rows for other in (0, 1)]
    assert not missing.token_rewards[absent[1]].any()
    assert missing.reward_parts["b"][torch.cat(absent)].isnan().all()
    for values, all_values in ((own.truncated, whole.truncated), (own.input_ids[:, :3], whole.input_ids[:, :3])):
        assert torch.equal(module.ranks.gather_rows(own, values), all_values)


def check_scores(module: GRPOModule, place: Path, rank: int) -> None:
    """A reward model scores own rows, of which the second rank has none."""
    whole, model = iteration(0), load_scalar_model(str(place / "reward"), new_head=False).double()
    own = None if rank == 1 else share(whole, 0, rank)
    found = module.scorer.parts_of(own)["model"]
    expected = reward_output(model, whole, normalized=True)[[] if own is None else own.own_rows]
    torch.testing.assert_close(found, expected.to(found), rtol=0, atol=1e-5)


@pytest.mark.distributed
def test_every_estimator_gives_what_it_gives_in_one_process(tmp_path: Path) -> None:
    """With as many forward passes on all ranks, of which only functions without the mark have all rows."""
    for name, seed in (("policy", 0), ("teacher", 1)):
        tiny_model(tmp_path / name, seed=seed)
    reward_model(tmp_path)
    trainer = one_process()
    alone = {name: prepare(built(name, tmp_path, trainer), lambda whole, number: whole) for name in CASES}
    for prepared, _ in alone.values():
        assert any(whole.advantages.abs().sum() > 1 for whole in prepared)
    torch.save(alone, tmp_path / "alone.pt")
    ranks.run("modules.on_policy.preparation.test_local_rows:on_ranks", 3, tmp_path / "ranks", place=str(tmp_path))


def test_rows_in_another_order_are_gathered_to_the_order_of_the_iteration() -> None:
    whole = iteration(0)
    own = share(whole, 0, 0)
    rows = torch.randperm(SEQUENCES, generator=torch.Generator().manual_seed(1))
    own = dataclasses.replace(whole.select(rows), rows=rows, iteration=whole.summarize())
    module = GRPOModule("anywhere", advantage_scale="batch")
    assert torch.equal(module.ranks.gather_rows(own, own.sample_index), whole.sample_index)
    assert torch.equal(module.advantages(own), module.advantages(whole)[rows])
    with pytest.raises(ValueError, match="one value for each of 24 own rows, got 5"):
        module.ranks.gather_rows(own, own.group[:5])


def test_advantages_of_other_rows_are_refused() -> None:
    module = GRPOModule("anywhere", advantages=local_rows(lambda experience: torch.zeros(7)))
    with pytest.raises(ValueError, match=r"7 sequences and was given 24; .* indexed with experience.own_rows"):
        module.credit[0].prepare(iteration(0))
