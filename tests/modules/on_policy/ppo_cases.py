"""PPO written by hand: plain Transformers, one sequence at a time, in float64."""

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from plain_sgd import PlainSGD, sgd_by_hand
from tiny_models import completion_logprobs
from torch import Tensor

from rlhfkit import Part, PPOModule, RolloutCallback, Sample
from rlhfkit.distributed import full_parameters
from rlhfkit.losses import length_adaptive_lambda
from rlhfkit.modules.parts import GAE, Critic, Returns, ValueLoss

CLIP, KL, GAMMA, LAM, VALUE_CLIP, ALPHA = 0.2, 0.05, 0.95, 0.9, 0.05, 0.4
CLIPPED = ValueLoss(clip=VALUE_CLIP).plain()
BOOTSTRAPPED: dict[str, Any] = {"lr": 0.05, "kl_coef": KL, "clip_high": CLIP, "parts": [CLIPPED]}
"""Arguments of a module that trains alike, without what :func:`bootstrapped` says."""
ARGUMENTS = BOOTSTRAPPED | {"critic_lr": 0.05, "gamma": GAMMA, "lam": LAM}
"""All of them."""


def bootstrapped(**critic: Any) -> list[Part]:
    """A critic of these arguments, and lambda by length for advantages."""
    by_length = GAE(GAMMA, partial(length_adaptive_lambda, alpha=ALPHA))
    return [Critic(lr=0.05, bootstrap_truncated=True, **critic), by_length, Returns(GAMMA, LAM)]


class PlainPPO(PlainSGD, PPOModule):
    """PPO with SGD for policy and critic."""


class Keep(L.Callback):
    """The samples of every iteration, and the update that each is for."""

    def __init__(self) -> None:
        self.iterations: list[tuple[list[Sample], Tensor]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        rollouts = RolloutCallback.of(trainer)
        self.iterations.append((copy.deepcopy(rollouts.samples), rollouts.experience.update.clone()))


def values_of(backbone: Any, head: Any, sample: Sample) -> Tensor:
    """(n + 1,) values of the states in which the sample's tokens were chosen, and of that after the last one."""
    ids = torch.tensor([sample.all_token_ids.tolist()])
    hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state[0]
    return (hidden.double() @ head.weight[0].double())[-len(sample.token_ids) - 1 :]


def reward_at_the_end(samples: Sequence[Sample]) -> list[Tensor]:
    """(n,) rewards of each sample's tokens: all on the last one."""
    rewards = [torch.zeros(len(sample.token_ids), dtype=torch.float64) for sample in samples]
    for row, sample in zip(rewards, samples, strict=True):
        row[-1] = sample.reward or 0.0
    return rewards


def gae_by_hand(rewards: Tensor, values: Tensor, after: Tensor, lam: float) -> Tensor:
    """(n,) advantages; ``after``: the value of what comes behind the last token."""
    advantages, following = torch.zeros_like(values), torch.zeros(())
    for step in reversed(range(len(values))):
        delta = rewards[step] + GAMMA * after - values[step]
        following = delta + GAMMA * lam * following
        advantages[step], after = following, values[step]
    return advantages


@dataclass
class ByHand:
    """A policy and the head and backbone of its critic."""

    policy: Any
    reference: Any
    backbone: Any
    head: Any
    rewards: Callable[[Sequence[Sample]], list[Tensor]] = reward_at_the_end
    text: Callable[[int], Tensor] | None = None
    """Function of an update's number; its result is added to the loss."""
    temperature: float = 1.0
    normalize_values: bool = False
    bootstrapped: bool = False
    """Count the value of the state behind answers that were cut off, and take lambda by length for advantages."""
    cut_off: int = 0
    """Answers that were."""
    returns: list[float] = field(default_factory=list)
    """All returns so far."""
    updates: int = 0

    def scale(self) -> tuple[float, float]:
        """Mean and deviation of the returns so far."""
        if not self.normalize_values or len(self.returns) < 2:
            return 0.0, 1.0
        return statistics.fmean(self.returns), statistics.stdev(self.returns)

    def iteration(self, samples: list[Sample], update: Tensor) -> None:
        """One iteration by SGD."""
        mean, std = self.scale()
        with torch.no_grad():
            old = [completion_logprobs(self.policy, sample, self.temperature) for sample in samples]
            before = [values_of(self.backbone, self.head, sample) for sample in samples]
            made = []
            for sample, mine, value, reward in zip(samples, old, before, self.rewards(samples), strict=True):
                penalised = reward - KL * (mine - completion_logprobs(self.reference, sample, self.temperature))
                *_, final = states = value * std + mean
                counts = self.bootstrapped and sample.finish_reason == "length"
                self.cut_off += counts
                rest = penalised, states[:-1], final * counts
                lam = max(0.0, 1 - 1 / (ALPHA * len(reward))) if self.bootstrapped else LAM
                made.append((gae_by_hand(*rest, lam), gae_by_hand(*rest, LAM) + states[:-1]))
            before = [value[:-1] for value in before]
        everything = torch.cat([advantages for advantages, _ in made])
        self.returns += torch.cat([returns for _, returns in made]).tolist()
        mean, std = self.scale()
        for number in range(int(update.max()) + 1):
            rows = (update == number).nonzero()[:, 0].tolist()
            tokens = sum(len(samples[row].token_ids) for row in rows)
            total = torch.zeros((), dtype=torch.float64)
            for row in rows:
                advantages = (made[row][0] - everything.mean()) / everything.std(unbiased=False)
                ratio = (completion_logprobs(self.policy, samples[row], self.temperature) - old[row]).exp()
                surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
                values, target = values_of(self.backbone, self.head, samples[row])[:-1], (made[row][1] - mean) / std
                clipped = before[row] + (values - before[row]).clamp(-VALUE_CLIP, VALUE_CLIP)
                error = torch.maximum((values - target) ** 2, (clipped - target) ** 2)
                total = total - surrogate.sum() + 0.5 * error.sum()
            loss = total / tokens
            if self.text is not None:
                loss = loss + self.text(self.updates)
            loss.backward()
            self.updates += 1
            sgd_by_hand(self.policy, self.backbone, self.head, lr=ARGUMENTS["lr"])


def check_moved_alike(mine: Any, by_hand: Any, started: Any) -> None:
    """Check that training moved the weights as the loop by hand did, to float32's precision."""
    expected, beginning = dict(by_hand.named_parameters()), dict(started.named_parameters())
    moved = sum(float((expected[name] - beginning[name]).detach().abs().sum()) for name in expected)
    theirs = {name: p for name, p in mine.named_parameters() if name in expected}
    assert theirs.keys() == expected.keys()
    error = sum(float((p.double() - expected[name]).detach().abs().sum()) for name, p in theirs.items())
    assert moved > 0
    assert error < 1e-3 * moved


def weight_sum(model: Any) -> float:
    """Sum of the sizes of all weights, of which ranks may have shares. A collective."""
    parameters = list(model.parameters())
    with full_parameters(parameters):
        return sum(float(parameter.detach().double().abs().sum()) for parameter in parameters)
