"""Every estimator prepares two iterations of 24 sequences: whole in one process, or scattered over ranks."""

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from tiny_models import tiny_model, tiny_tokenizer
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
from rlhfkit.data import Experience
from rlhfkit.losses import gdpo_advantages, opo_advantages, pass_at_k_advantages
from rlhfkit.models.heads import load_scalar_model
from rlhfkit.modules.on_policy.base import OnPolicyModule
from rlhfkit.modules.parts import Critic, MaskTruncated, RewardModel
from rlhfkit.modules.parts.advantages import TokenCredit, WhitenAdvantages
from rlhfkit.modules.parts.kl_control import KLTarget
from rlhfkit.modules.parts.kl_penalty import KLInReward, KLPart
from rlhfkit.modules.parts.rewards import ClipRewards, MissingEndPenalty, NormalizeRewards, StopProperly
from rlhfkit.modules.parts.teacher import TeacherAdvantages

SEQUENCES, GROUP = 24, 4
SHARES = (13, 8, 3)
FIELDS = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "values", "advantages", "returns", "rewards")

# ---------------------------------------------------------------------- functions and overrides of a user


def several_rewards(experience: Experience) -> Tensor:
    """Written for the whole iteration."""
    return gdpo_advantages(torch.stack([*experience.reward_parts.values()], -1), experience.group)


@local_rows
def several_rewards_of_all(experience: Experience) -> Tensor:
    """The same from the summary."""
    everyone = experience.summary
    parts = torch.stack([*everyone.reward_parts.values()], -1)
    return gdpo_advantages(parts, everyone.group)[experience.own_rows]


def by_token(experience: Experience, *, scale: float = 1.0) -> Tensor:
    """Written for the whole iteration; depends on log-probs of other sequences, and differs between tokens."""
    mean = experience.columns["ref_logprobs"][experience.action_mask].mean()
    return scale * (experience.rewards.nan_to_num()[:, None] - mean + experience.columns["ref_logprobs"])


@local_rows
def above_average(experience: Experience) -> Tensor:
    """The processed rewards of all ranks are in the summary."""
    return (experience.rewards - experience.summary.rewards.nanmean()).nan_to_num()


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
    "function of the iteration": (GRPOModule, {"advantages": several_rewards}),
    "function of own rows": (GRPOModule, {"advantages": several_rewards_of_all}),
    "partial function of tokens": (
        GRPOModule,
        {"advantages": functools.partial(by_token, scale=2.0), "parts": [KLInReward(0.1).plain()]},
    ),
    "processed rewards in the summary": (
        GRPOModule,
        {"advantages": above_average, "parts": [KLInReward(0.1).plain(), *SHAPING]},
    ),
    "overridden": (Shifted, {"parts": [*SHAPING, above_worst]}),
    "overridden for own rows": (ShiftedLocally, {"parts": [*SHAPING, AboveWorst().plain()]}),
}

# ---------------------------------------------------------------------- the iterations


def write(folder: Path) -> None:
    """A policy, another model as its teacher, and a reward model."""
    tiny_model(folder / "policy")
    tiny_model(folder / "teacher", seed=1)
    model = load_scalar_model(str(tiny_model(folder / "base", seed=3)), head_std=0.5)
    model.save_pretrained(folder / "reward")
    tiny_tokenizer().save_pretrained(folder / "reward")


def iteration(number: int) -> Experience:
    """24 sequences of 6 prompts, of 3 to 12 tokens; one could not be scored, a third is cut off."""
    generator = torch.Generator().manual_seed(number)
    prompts = torch.randint(2, 4, (SEQUENCES // GROUP,), generator=generator).repeat_interleave(GROUP)
    lengths = prompts + torch.randint(1, 9, (SEQUENCES,), generator=generator)
    steps = int(lengths.max()) - 1
    attention_mask = torch.arange(steps + 1) < lengths[:, None]
    action_mask = attention_mask[:, 1:] & (torch.arange(steps) >= prompts[:, None] - 1)
    rewards = torch.randn(SEQUENCES, generator=generator)
    rewards[5] = math.nan
    action_mask[5] = False
    first = torch.randint(3, 98, (SEQUENCES // GROUP, steps + 1), generator=generator).repeat_interleave(GROUP, 0)
    tokens = torch.randint(3, 98, (SEQUENCES, steps + 1), generator=generator)
    tokens = torch.where(torch.arange(steps + 1) < prompts[:, None], first, tokens)
    noise = torch.randn(SEQUENCES, steps, generator=generator)
    return Experience(
        input_ids=tokens.where(attention_mask, 0),
        attention_mask=attention_mask,
        action_mask=action_mask,
        rollout_logprobs=noise.where(action_mask, 0.0),
        versions=torch.where(action_mask, number, -1),
        rewards=rewards,
        group=torch.arange(SEQUENCES // GROUP).repeat_interleave(GROUP) * 7,
        sample_index=torch.arange(SEQUENCES) % GROUP,
        truncated=torch.arange(SEQUENCES) % 3 == 0,
        update=torch.arange(SEQUENCES) // 12,
        token_rewards=(0.1 * noise).where(action_mask, 0.0),
        reward_parts={"a": rewards.square(), "b": torch.randn(SEQUENCES, generator=generator)},
        temperature=0.8,
    )


def share(whole: Experience, number: int, rank: int) -> Experience:
    """The rows of one of three ranks, in an order of their own; the third has rows of the first update only."""
    order = torch.randperm(SEQUENCES, generator=torch.Generator().manual_seed(10 + number))
    last = order[order < 12][: SHARES[2]]
    order = torch.cat([order[~torch.isin(order, last)], last])
    rows = order.split(list(SHARES))[rank]
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


def prepare(name: str, folder: Path, trainer: L.Trainer, take: Callable[[Experience, int], Experience]) -> Any:
    """What a module computes of this rank's rows in two iterations, its moments, and its forward passes."""
    module = built(name, folder, trainer)
    passes: dict[str, int] = {}
    for child_name, child in module.named_children():
        passes[child_name] = 0

        def count(*_: Any, child_name: str = child_name) -> None:
            passes[child_name] += 1

        child.register_forward_hook(count)
    iterations = []
    for number in range(2):
        done = module.prepare(take(iteration(number), number))
        masks = {"action_mask": done.action_mask, "rows": done.own_rows}
        values = {field: done.columns.get(field, getattr(done, field, None)) for field in FIELDS} | masks
        iterations.append({key: None if value is None else value.tolist() for key, value in values.items()})
    return {
        "iterations": iterations,
        "states": [part.state_dict() for part in module.parts],
        "return moments": module.critic_part.moments.plain() if isinstance(module, PPOModule) else [],
        "kl_coef": next((part.coef for part in module.parts if isinstance(part, KLPart)), 0.0),
        "passes": passes,
    }


def one_process() -> L.Trainer:
    """A Trainer that gives modules their precision; it starts no ranks."""
    return L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)


def in_one_process(folder: Path) -> dict[str, Any]:
    """All cases with whole iterations."""
    trainer = one_process()
    return {name: prepare(name, folder, trainer, lambda whole, number: whole) for name in CASES}


# ---------------------------------------------------------------------- what a rank runs


class Log(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def on_ranks(place: str, **_: Any) -> dict[str, Any]:
    """All cases with this rank's rows."""
    rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    trainer = one_process()
    handler = Log()
    logging.getLogger("rlhfkit.modules.on_policy.ranks").addHandler(handler)
    results: dict[str, Any] = {"cases": {}, "warnings": {}}
    for name in CASES:
        handler.messages = []
        results["cases"][name] = prepare(name, Path(place), trainer, lambda whole, number: share(whole, number, rank))
        results["warnings"][name] = handler.messages
    results["gathers"] = gathers(built("grpo", Path(place), trainer), rank)
    results["scores"] = scores(built("reward model", Path(place), trainer), rank)
    return results


def gathers(module: GRPOModule, rank: int) -> dict[str, Any]:
    """Gathered rows of every kind, and of a field and a part of the reward that only some ranks have."""
    whole = iteration(0)
    own = share(whole, 0, rank)
    everyone = module.ranks.gather_experience(own)
    fields = [field.name for field in dataclasses.fields(whole) if isinstance(getattr(whole, field.name), Tensor)]
    partly = dataclasses.replace(
        own,
        token_rewards=None if rank == 1 else own.token_rewards,
        reward_parts=own.reward_parts if rank == 2 else {"a": own.reward_parts["a"]},
    )
    missing = module.ranks.gather_experience(partly)
    absent = [share(whole, 0, other).own_rows for other in (0, 1)]
    return {
        "equal": {
            name: torch.equal(getattr(everyone, name).nan_to_num(nan=7.0), getattr(whole, name).nan_to_num(nan=7.0))
            for name in fields
        },
        "parts": {
            name: torch.equal(part.nan_to_num(nan=7.0), whole.reward_parts[name].nan_to_num(nan=7.0))
            for name, part in everyone.reward_parts.items()
        },
        "whole": everyone.iteration is None and everyone.rows is None,
        "token rewards of rank 1": float(missing.token_rewards[absent[1]].abs().sum()),
        "missing parts": bool(missing.reward_parts["b"][torch.cat(absent)].isnan().all()),
        "bool": module.ranks.gather_rows(own, own.truncated).tolist() == whole.truncated.tolist(),
        "matrix": torch.equal(module.ranks.gather_rows(own, own.input_ids[:, :3]), whole.input_ids[:, :3]),
    }


def scores(module: GRPOModule, rank: int) -> list[float]:
    """Scores of the reward model; the second rank has no rows."""
    return module.scorer.parts_of(None if rank == 1 else share(iteration(0), 0, rank))["model"].tolist()
