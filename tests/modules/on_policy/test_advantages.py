"""ReMax: samples are compared with the greedy answer of the policy that sampled them."""

import contextlib
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
from rlhfkit.episodes import Action
from rlhfkit.modules.on_policy.functions import PolicyLoss, check_advantages
from rlhfkit.rewards import EnvironmentReward, WeightedSum

from .test_base import experience

ONE = SamplingSpec(group_size=1, max_new_tokens=8)


def lengthy(samples: Sequence[Sample]) -> list[float]:
    """Digits and tokens, so that rewards differ."""
    return [
        value + sum(sample.token_ids.tolist()) / 1000 for sample, value in zip(samples, digits(samples), strict=True)
    ]


def reward_of(token_ids: list[int], text: str) -> float:
    """The same of an answer."""
    known = [0.0] * len(token_ids)
    return lengthy([Sample(Prompt(0, [1]), 0, token_ids, known, [0] * len(token_ids), "stop", text=text)])[0]


class Greedy(L.Callback):
    """Compares each iteration's greedy rewards and advantages with the policy's own argmax, token by token."""

    def __init__(self) -> None:
        self.checked = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            return
        rollouts, policy, expected = RolloutCallback.of(trainer), copy.deepcopy(pl_module.policy).eval(), {}
        for sample in rollouts.samples:
            ids = torch.tensor([sample.prompt.token_ids.tolist()])
            whole = policy.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
            answer = whole[0, sample.prompt.num_tokens :].tolist()
            text = pl_module.tokenizer.decode(answer, skip_special_tokens=True)
            expected[sample.prompt.index] = reward_of(answer, text)
            assert sample.reward_parts["greedy"] == pytest.approx(expected[sample.prompt.index], abs=1e-6)
        rows = rollouts.experience
        for row, group in enumerate(rows.group.tolist()):
            found = rows.advantages[row, rows.action_mask[row]].tolist()
            assert found == pytest.approx([float(rows.rewards[row]) - expected[group]] * len(found), abs=1e-5)
            self.checked += 1


class Asking(Environment):
    """Begins a conversation, and pays what ``lengthy`` pays; remembers what it was asked."""

    asked: ClassVar[list[tuple[int, list[int]]]] = []

    def reset(self, prompt: Prompt) -> list[dict[str, str]]:
        self.asked.append((prompt.index, prompt.token_ids.tolist()))
        return [{"role": "user", "content": f"Now {prompt.text}"}]

    def step(self, action: Action) -> Step:
        return Step(reward=reward_of(action.token_ids, action.text), done=True)


class ChatEpisodes(Episodes):
    """Episodes of a tokenizer that has got a chat template."""

    def configure_tokenizer(self, tokenizer: Any, chat_template_kwargs: Any = None) -> None:
        tokenizer.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
        super().configure_tokenizer(tokenizer, chat_template_kwargs)


def check_baseline(folder: Path, engine: Any, reward: Any, group_size: int = 1, **more: Any) -> RolloutCallback:
    """16 samples of ReMax are compared with the greedy answers to their prompts."""
    greedy, sampling = Greedy(), SamplingSpec(group_size=group_size, max_new_tokens=8)
    _, _, rollouts = fit_run(
        folder,
        module_arguments={"preset": "remax"},
        rollouts=RolloutCallback(reward, engine=engine, sampling=sampling, **more),
        data_arguments={"micro_batch_size": 4 * group_size},
        callbacks=[greedy],
        max_epochs=2 // group_size,
    )
    assert greedy.checked == 16
    return rollouts


def check_answers_and_episodes(folder: Path, engine: Any) -> None:
    """Greedy answers to prompts, and on conversations that an environment has begun, as the sampled ones."""
    check_baseline(folder, engine, lengthy)
    Asking.asked.clear()
    rollouts = check_baseline(folder, engine, EnvironmentReward(), 2, group=ChatEpisodes(Asking, max_turns=1))
    drawn = dict(Asking.asked)
    assert len(Asking.asked) == 8 * 3  # two samples and the greedy answer
    assert all(tokens == drawn[index] for index, tokens in Asking.asked)
    assert all(sample.prompt.num_tokens == len(drawn[sample.prompt.index]) + 4 for sample in rollouts.samples)


def test_the_baseline_is_the_reward_of_the_greedy_answer(tmp_path: Path) -> None:
    check_answers_and_episodes(tmp_path, LocalEngine())


@pytest.mark.vllm
@pytest.mark.ray
def test_greedy_answers_and_episodes_of_vllm_are_the_policys(vllm_pool: Any, vllm_model: Path, tmp_path: Path) -> None:
    tmp_path.joinpath("model").symlink_to(vllm_model)
    check_answers_and_episodes(tmp_path, vllm_pool)


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"advantages": math.nan, "rollout_logprobs": math.nan},
            r"advantages of 1 of 24 trained tokens \(first: sample 1 of prompt 3\) are not finite. "
            r"Neither are there: rollout_logprobs \(the engine, or a wrapper",
        ),
        (
            {"rollout_logprobs": -math.inf},
            r"rollout_logprobs: log-probs of 1 of 24 trained .* are infinite",
        ),
        ({"advantages": math.inf}, r"advantages of .* What they are computed from is finite there"),
        ({"rollout_logprobs": math.nan}, None),  # nobody knows it
    ],
)
def test_an_advantage_or_log_prob_that_is_not_finite_is_named(values: dict[str, float], message: str | None) -> None:
    batch = experience()
    batch.advantages = torch.ones(6, 6)
    for name, value in values.items():
        getattr(batch, name)[1, 2] = value
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_advantages(batch, PolicyLoss("ppo_loss"), [])


def half(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    return torch.where(group == group.min(), torch.inf, rewards)


def test_no_update_is_made_with_advantages_that_are_not_finite(tmp_path: Path) -> None:
    trainer, module, data, _ = setup_run(tmp_path, module_arguments={"advantages": half})
    with pytest.raises(ValueError, match=r"half\): advantages of "):
        trainer.fit(module, data)
    assert trainer.global_step == 0


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
