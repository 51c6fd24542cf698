"""PPOModule against a loop written by hand in plain Transformers, and learning."""

import copy
import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import digits, setup_run
from strategies import ranks
from tiny_models import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhfkit import PPOModule, RolloutCallback, Sample, SamplingSpec
from rlhfkit.models.heads import load_scalar_model

CLIP, KL, LAM, VALUE_CLIP = 0.2, 0.05, 0.9, 0.05


class PlainSGD(PPOModule):
    """SGD moves in proportion to the gradient, which shows a wrong factor that Adam would hide."""

    def configure_optimizers(self) -> Any:
        groups = self.parameter_groups()
        return torch.optim.SGD([{"lr": self.hparams["lr"]} | group for group in groups])


class Keep(L.Callback):
    """The samples of every iteration."""

    def __init__(self) -> None:
        self.iterations: list[list[Sample]] = []
        self.updates: list[Tensor] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        rollouts = next(callback for callback in trainer.callbacks if isinstance(callback, RolloutCallback))
        assert rollouts.experience is not None
        self.iterations.append(copy.deepcopy(rollouts.samples))
        self.updates.append(rollouts.experience.update.clone())


def logprobs_of(model: Any, sample: Sample) -> Tensor:
    """(n,) of the sample's tokens, by the definition."""
    ids = torch.tensor([sample.prompt.token_ids + sample.token_ids])
    logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[-len(sample.token_ids) :, 0]


def values_of(critic: Any, sample: Sample) -> Tensor:
    """(n,) of the states in which the sample's tokens were chosen, from the backbone and the head's weight."""
    ids = torch.tensor([sample.prompt.token_ids + sample.token_ids])
    hidden = critic.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    return (hidden.double() @ critic.model.score.weight[0].double())[-len(sample.token_ids) - 1 : -1]


def gae_by_hand(rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    advantages, following, after = torch.zeros_like(values), torch.zeros(()), torch.zeros(())
    for step in reversed(range(len(values))):
        delta = rewards[step] + after - values[step]
        following = delta + LAM * following
        advantages[step], after = following, values[step]
    return advantages, advantages + values


def iteration_by_hand(
    policy: Any, critic: Any, reference: Any, samples: list[Sample], update: Tensor, lr: float
) -> None:
    """One iteration of PPO by SGD, one sequence at a time, in float64."""
    with torch.no_grad():
        old = [logprobs_of(policy, sample) for sample in samples]
        before = [values_of(critic, sample) for sample in samples]
        made = []
        for sample, mine, value in zip(samples, old, before, strict=True):
            rewards = -KL * (mine - logprobs_of(reference, sample))
            rewards[-1] += sample.reward or 0.0
            made.append(gae_by_hand(rewards, value))
        everything = torch.cat([advantages for advantages, _ in made])
        mean, std = everything.mean(), everything.std(unbiased=False)
    for number in range(int(update.max()) + 1):
        rows = (update == number).nonzero()[:, 0].tolist()
        tokens = sum(len(samples[row].token_ids) for row in rows)
        total = torch.zeros((), dtype=torch.float64)
        for row in rows:
            advantages = (made[row][0] - mean) / std
            ratio = (logprobs_of(policy, samples[row]) - old[row]).exp()
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            values = values_of(critic, samples[row])
            clipped = before[row] + (values - before[row]).clamp(-VALUE_CLIP, VALUE_CLIP)
            error = torch.maximum((values - made[row][1]) ** 2, (clipped - made[row][1]) ** 2)
            total = total - surrogate.sum() + 0.5 * error.sum()
        (total / tokens).backward()
        with torch.no_grad():
            for parameter in [*policy.parameters(), *critic.parameters()]:
                if parameter.grad is not None:
                    parameter -= lr * parameter.grad
                    parameter.grad = None


def test_three_iterations_are_the_loop_by_hand(tmp_path: Path) -> None:
    keep = Keep()
    arguments = {"lr": 0.05, "critic_lr": 0.05, "kl_coef": KL, "lam": LAM, "value_clip": VALUE_CLIP, "clip_high": CLIP}
    trainer, module, data, _ = setup_run(
        tmp_path,
        module=PlainSGD,
        module_arguments=arguments,
        data_arguments={"rollout_batch_size": 4, "micro_batch_size": 4},
        rollouts=RolloutCallback(digits, sampling=SamplingSpec(group_size=4, max_new_tokens=8)),
        callbacks=[keep],
        max_epochs=3,
    )
    trainer.fit(module, data)
    assert trainer.global_step == 6
    folder = str(tmp_path / "model")
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    reference, critic = copy.deepcopy(policy), load_scalar_model(folder, dtype=torch.float64, attention="eager")
    started = copy.deepcopy(critic)
    for samples, update in zip(keep.iterations, keep.updates, strict=True):
        iteration_by_hand(policy, critic, reference, samples, update, lr=0.05)
    for mine, theirs, first in ((module.policy, policy, reference), (module.critic, critic, started)):
        expected, beginning = dict(theirs.named_parameters()), dict(first.named_parameters())
        moved = sum(float((expected[name] - beginning[name]).detach().abs().sum()) for name in expected)
        error = sum(float((p.double() - expected[name]).detach().abs().sum()) for name, p in mine.named_parameters())
        assert error < 1e-3 * moved  # float32 against float64


def test_reward_rises_and_the_critic_explains_it(tmp_path: Path) -> None:
    seen: list[float] = []

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(float(trainer.callback_metrics["rollout/reward"]))

    trainer, module, data, _ = setup_run(
        tmp_path,
        module=PPOModule,
        module_arguments={"lr": 4e-3, "critic_lr": 1e-2},
        data_arguments={"rollout_batch_size": 32, "micro_batch_size": 16},
        rollouts=RolloutCallback(digits, sampling=SamplingSpec(group_size=1, max_new_tokens=8)),
        callbacks=[Watch()],
        max_epochs=25,
    )
    trainer.fit(module, data)
    assert sum(seen[-3:]) / 3 > sum(seen[:3]) / 3 + 0.3
    assert trainer.callback_metrics["value/explained_variance"] > 0.3


def test_warm_up_trains_the_critic_alone(tmp_path: Path) -> None:
    arguments = {"critic_warmup_steps": 2, "critic_lr": 1e-3, "weight_decay": 0.1}
    trainer, module, data, _ = setup_run(tmp_path, module=PPOModule, module_arguments=arguments, max_epochs=1)
    trainer.fit(module, data)
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(tensor, start[name]) for name, tensor in module.policy.state_dict().items())
    first = load_scalar_model(str(tmp_path / "model")).state_dict()
    assert not all(torch.equal(tensor, first[name]) for name, tensor in module.critic.state_dict().items())
    known = trainer.optimizers[0].state
    assert not any(parameter in known for parameter in module.policy.parameters())  # Adam has not begun there


def test_a_critic_starts_as_the_reward_model_it_is_given(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    reward_model = load_scalar_model(str(model), head_std=0.5)
    reward_model.save_pretrained(tmp_path / "reward")
    module = PPOModule(str(model), critic=str(tmp_path / "reward"))
    module.configure_model()
    for name, tensor in reward_model.state_dict().items():
        assert torch.equal(module.critic.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"critic_lr": 0.0}, "critic_lr must be positive"),
        ({"lam": 1.1}, "lam"),
        ({"gamma": -0.1}, "gamma"),
        ({"value_clip": 0.0}, "clip"),
        ({"shared_backbone": True, "critic": "elsewhere"}, "leave critic and critic_warmup_steps out"),
        ({"shared_backbone": True, "critic_warmup_steps": 1}, "leave critic and critic_warmup_steps out"),
        ({"reward_clip": 0.0}, "reward_clip must be positive"),
        ({"missing_eos_penalty": -1.0}, "missing_eos_penalty"),
        ({"stop_properly_coef": 1.5}, "stop_properly_coef"),
        ({"kl_stop": 0.0}, "kl_stop"),
        ({"ptx_coef": -0.1}, "ptx_coef"),
    ],
)
def test_a_bad_knob_is_an_error_when_the_module_is_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOModule("anywhere", **arguments)


def train_on_ranks(folder: Path, strategies: list[str], world: int) -> dict[str, Any]:
    """Entry point of a rank: the same run under each strategy; sums of weights and the tokens sampled last."""
    from rlhfkit.strategies.sharding import full_parameters

    results: dict[str, Any] = {}
    for strategy in strategies:
        keep = Keep()
        trainer, module, data, _ = setup_run(
            folder / strategy,
            module=PlainSGD,
            module_arguments={"lr": 0.05, "critic_lr": 0.02, "kl_coef": KL},
            data_arguments={"micro_batch_size": 8 // world},
            callbacks=[keep],
            strategy=strategy,
            devices=world,
            use_distributed_sampler=False,
        )
        sums: dict[str, float] = {}

        class Measure(L.Callback):
            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                for child in ("policy", "critic"):
                    parameters = list(getattr(pl_module, child).parameters())
                    with full_parameters(parameters):
                        sums[child] = sum(float(each.detach().double().abs().sum()) for each in parameters)  # noqa: B023

        trainer.callbacks.append(Measure())
        trainer.fit(module, data)
        results[strategy] = {
            "sums": sums,
            "tokens": [sample.token_ids for sample in keep.iterations[-1]],
            "norms": sorted(getattr(trainer.strategy, "gradient_norms", {})),
        }
    return results


@pytest.mark.distributed
def test_two_ranks_and_two_engines_train_as_one_rank(tmp_path: Path) -> None:
    for name in ("alone/auto", "rlhf_zero2", "rlhf_zero3"):
        tiny_model(tmp_path / name / "model")
    alone = train_on_ranks(tmp_path / "alone", ["auto"], 1)["auto"]
    strategies = ["rlhf_zero2", "rlhf_zero3"]
    results = ranks.run("modules.test_ppo:train_on_ranks", 2, tmp_path, strategies=strategies, world=2)
    for result in results:
        for strategy in strategies:
            assert result[strategy]["tokens"] == alone["tokens"]
            assert result[strategy]["sums"] == pytest.approx(alone["sums"], rel=1e-6)
            assert result[strategy]["norms"] == ["critic", "policy"]
    assert json.dumps(results[0]) == json.dumps(results[1])
