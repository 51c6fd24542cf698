"""ReMax: samples are compared with the greedy answer of the policy that sampled them."""

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from rl_runs import digits, fit_run, setup_run

from rlhfkit import (
    Environment,
    Episodes,
    LocalEngine,
    Prompt,
    ReplayEngine,
    RolloutCallback,
    Sample,
    SamplingSpec,
    Step,
)
from rlhfkit.data import Experience
from rlhfkit.episodes import Action
from rlhfkit.modules.on_policy.functions import PolicyLoss, check_advantages
from rlhfkit.modules.parts import Correction
from rlhfkit.rewards import EnvironmentReward, WeightedSum

from .test_base import experience

ONE = SamplingSpec(group_size=1, max_new_tokens=8)


def lengthy(samples: Sequence[Sample]) -> list[float]:
    """Digits and tokens, so that rewards differ."""
    return [
        value + sum(sample.token_ids.tolist()) / 1000 for sample, value in zip(samples, digits(samples), strict=True)
    ]


class Greedy(L.Callback):
    """Compares each iteration's greedy rewards and advantages with the policy's own argmax, token by token."""

    def __init__(self) -> None:
        self.checked = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        rollouts = RolloutCallback.of(trainer)
        if batch_idx:
            return
        policy = copy.deepcopy(pl_module.policy).eval()
        expected = {}
        for sample in rollouts.samples:
            tokens = sample.prompt.token_ids.tolist()
            while len(tokens) < sample.prompt.num_tokens + 8:
                with torch.no_grad():
                    tokens.append(int(policy(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
                if tokens[-1] == pl_module.tokenizer.eos_token_id:
                    break
            answer = tokens[sample.prompt.num_tokens :]
            text = pl_module.tokenizer.decode(answer, skip_special_tokens=True)
            made = Sample(sample.prompt, 0, answer, [0.0] * len(answer), [0] * len(answer), "stop", text=text)
            expected[sample.prompt.index] = lengthy([made])[0]
            assert sample.reward_parts["greedy"] == pytest.approx(expected[sample.prompt.index], abs=1e-6)
        experience = rollouts.experience
        for row, group in enumerate(experience.group.tolist()):
            known = experience.action_mask[row]
            difference = float(experience.rewards[row]) - expected[group]
            assert experience.advantages[row, known].tolist() == pytest.approx(
                [difference] * int(known.sum()), abs=1e-5
            )
            self.checked += 1


def test_the_baseline_is_the_reward_of_the_greedy_answer(tmp_path: Path) -> None:
    greedy = Greedy()
    trainer, _, _ = fit_run(
        tmp_path,
        module_arguments={"preset": "remax"},
        rollouts=RolloutCallback(lengthy, sampling=ONE),
        data_arguments={"micro_batch_size": 4},
        callbacks=[greedy],
    )
    assert trainer.global_step == 2
    assert greedy.checked == 16


class Asking(Environment):
    """Begins a conversation, and pays what ``lengthy`` pays; remembers what it was asked."""

    asked: ClassVar[list[tuple[int, list[int]]]] = []

    def reset(self, prompt: Prompt) -> list[dict[str, str]]:
        self.asked.append((prompt.index, prompt.token_ids.tolist()))
        return [{"role": "user", "content": f"Now {prompt.text}"}]

    def step(self, action: Action) -> Step:
        made = Sample(Prompt(0, [1]), 0, action.token_ids, [0.0] * len(action.token_ids), [0] * len(action.token_ids),
                      "stop", text=action.text)  # fmt: skip
        return Step(reward=lengthy([made])[0], done=True)


class ChatEpisodes(Episodes):
    """Episodes of a tokenizer that has got a chat template."""

    def configure_tokenizer(self, tokenizer: Any, chat_template_kwargs: Any = None) -> None:
        tokenizer.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
        super().configure_tokenizer(tokenizer, chat_template_kwargs)


def check_episodes(folder: Path, engine: Any) -> None:
    """One iteration of ReMax on conversations that an environment has begun."""
    greedy = Greedy()
    Asking.asked.clear()
    _, _, rollouts = fit_run(
        folder,
        module_arguments={"preset": "remax"},
        rollouts=RolloutCallback(
            EnvironmentReward(),
            engine=engine,
            group=ChatEpisodes(Asking, max_turns=1),
            sampling=SamplingSpec(group_size=2, max_new_tokens=8),
        ),
        data_arguments={"micro_batch_size": 8},
        callbacks=[greedy],
        max_epochs=1,
    )
    assert greedy.checked == 16
    drawn = dict(Asking.asked)
    assert len(Asking.asked) == 8 * 3  # two samples and the greedy answer
    assert all(tokens == drawn[index] for index, tokens in Asking.asked)
    assert all(sample.prompt.num_tokens == len(drawn[sample.prompt.index]) + 4 for sample in rollouts.samples)


def test_greedy_episodes_begin_as_the_sampled_ones(tmp_path: Path) -> None:
    check_episodes(tmp_path, LocalEngine())


@pytest.mark.vllm
@pytest.mark.ray
def test_greedy_answers_and_episodes_of_vllm_are_the_policys(vllm_pool: Any, vllm_model: Path, tmp_path: Path) -> None:
    tmp_path.joinpath("model").symlink_to(vllm_model)
    greedy = Greedy()
    fit_run(
        tmp_path,
        module_arguments={"preset": "remax"},
        rollouts=RolloutCallback(lengthy, engine=vllm_pool, sampling=ONE),
        data_arguments={"micro_batch_size": 4},
        callbacks=[greedy],
    )
    assert greedy.checked == 16
    check_episodes(tmp_path, vllm_pool)


@pytest.mark.parametrize(
    ("reward", "recorded", "message"),
    [
        (WeightedSum(greedy=digits), False, "a part of .* is called 'greedy'"),
        (None, False, "give RolloutCallback"),
        (digits, True, "ReplayEngine has no greedy answers"),
    ],
)
def test_greedy_answers_that_cannot_be_made_or_scored_are_refused(
    tmp_path: Path, reward: Any, recorded: bool, message: str
) -> None:
    tmp_path.joinpath("dump").mkdir()
    rollouts = RolloutCallback(reward, engine=ReplayEngine(tmp_path / "dump") if recorded else None, sampling=ONE)
    trainer, module, data, _ = setup_run(
        tmp_path, module_arguments={"preset": "remax"}, rollouts=rollouts, data_arguments={"micro_batch_size": 4}
    )
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, data)


class Forgetful(LocalEngine):
    """Does not know the log-prob of the first token of a prompt's second sample, later."""

    value = math.nan

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        samples = super().generate(prompts, sampling, iteration=iteration)
        for sample in samples:
            if iteration == 1 and sample.sample_index == 1:
                sample.logprobs = [self.value, *sample.logprobs.tolist()[1:]]
        return samples


class Infinite(Forgetful):
    """Gives a log-prob of -inf there."""

    value = -math.inf


def by_surprise(experience: Experience) -> torch.Tensor:
    return -experience.rewards[:, None] * experience.rollout_logprobs


def half(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    return torch.where(group == group.min(), torch.inf, rewards)


@pytest.mark.parametrize(
    ("engine", "advantages", "message"),
    [
        (
            Forgetful,
            by_surprise,
            r"by_surprise\): advantages of 8 of \d+ trained tokens \(first: sample 1 of prompt \d+\) are not finite. "
            r"Neither are there: rollout_logprobs \(the engine, or a wrapper",
        ),
        (Infinite, None, r"rollout_logprobs: log-probs of 8 of \d+ trained tokens \(first: sample 1 .* are infinite"),
        (LocalEngine, half, r"half\): advantages of .* What they are computed from is finite there"),
    ],
)
def test_an_advantage_or_log_prob_that_is_not_finite_is_named_before_an_update(
    tmp_path: Path, engine: Any, advantages: Any, message: str
) -> None:
    trainer, module, data, _ = setup_run(
        tmp_path,
        module_arguments={"advantages": advantages, "parts": [Correction("tis").plain()]},
        rollouts=RolloutCallback(digits, engine=engine(), sampling=SamplingSpec(group_size=4, max_new_tokens=8)),
    )
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, data)
    assert trainer.global_step == (0 if advantages is half else 2)  # the first iteration was right
    assert all(weight.isfinite().all() for weight in module.parameters())


@pytest.mark.parametrize("loss", ["gspo_loss", "luspo_loss", "rloo_loss"])
def test_advantages_of_tokens_are_refused_by_losses_with_one_ratio_for_a_sequence(loss: str) -> None:
    """They would be averaged; equal ones are those of the sequence, and masked ones are nobody's."""
    batch = experience()
    batch.advantages = torch.arange(6.0)[:, None].repeat(1, 6).masked_fill(~batch.action_mask, 9.0)
    check_advantages(batch, PolicyLoss(loss), [])
    batch.advantages[2, 3] += 0.5
    with pytest.raises(ValueError, match=rf"{loss} has one ratio for a sequence .* use gspo_token_loss"):
        check_advantages(batch, PolicyLoss(loss), [])
    check_advantages(batch, PolicyLoss("gspo_token_loss"), [])
