"""What people ask other libraries for, and is a few lines here: what such lines rest on.

Covers what rollout/groups.py, modules/on_policy, datamodules and strategies/deepspeed/synchronized_steps.py allow.
"""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from modules import data_runs
from rl_runs import digits, fit_run, setup_run
from strategies import ranks
from test_docs_parts import PAGE, examples
from tiny_models import completion_logprobs, tiny_model, token_logprobs
from torch import nn
from transformers import AutoModelForCausalLM

from rlhfkit import (
    DPOModule,
    Part,
    PreferenceDataModule,
    Prompt,
    RolloutCallback,
    Sample,
    SamplingSpec,
    SFTDataModule,
    Stage,
)
from rlhfkit.modules.parts import Correction, TeacherAdvantages
from rlhfkit.rollout import GroupSampler, ModuleWeights
from rlhfkit.strategies.deepspeed.synchronized_steps import SynchronizedSteps

DATA = PAGE.with_name("data.md")
TEMPERATURES = (0.6, 1.0, 1.4, 0.6)

# ---------------------------------------------------------------------- sampling of single requests


async def spread(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
    """Each sample of a group at a temperature of its own."""
    group: list[Sample] = []
    for attempt, temperature in enumerate(TEMPERATURES):
        sampler.sampling = dataclasses.replace(sampler.sampling, temperature=temperature)
        group += await sampler.sample(prompt, 1, attempt=attempt)
    return group


def own_limit(prompt: Prompt) -> dict[str, Any]:
    return {"stop": "57"[prompt.index % 2], "max_new_tokens": 40 + prompt.index % 3}


async def own_limits(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
    """Samples with the length and the stop of their prompt."""
    sampler.sampling = dataclasses.replace(sampler.sampling, **own_limit(prompt))
    return await sampler.sample(prompt, size)


async def nucleus(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
    sampler.sampling = dataclasses.replace(sampler.sampling, top_p=0.5)
    return await sampler.sample(prompt, size)


def test_samples_of_a_group_at_other_temperatures_have_log_probs_to_weigh_them_by(tmp_path: Path) -> None:
    rollouts = RolloutCallback(digits, group=spread, sampling=SamplingSpec(group_size=4, max_new_tokens=8))
    arguments = {"parts": [Correction("tis")]}
    trainer, _, _ = fit_run(tmp_path, module_arguments=arguments, rollouts=rollouts, max_epochs=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for sample in rollouts.samples:
        expected = completion_logprobs(model, sample, TEMPERATURES[sample.sample_index])
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected.detach(), atol=1e-5, rtol=0)
    assert float(trainer.callback_metrics["rollout_corr/is_std"]) > 0.1


@pytest.mark.parametrize(
    ("group", "error"),
    [(spread, "temperature 0.6 .* the run's 1: give the module a Correction"), (nucleus, "may not set top_p")],
)
def test_a_group_function_may_not_sample_what_the_trainer_takes_for_the_policy(
    tmp_path: Path, group: Any, error: str
) -> None:
    rollouts = RolloutCallback(digits, group=group, sampling=SamplingSpec(group_size=4, max_new_tokens=8))
    with pytest.raises(ValueError, match=error):
        fit_run(tmp_path, rollouts=rollouts)


def test_a_prompt_may_have_a_length_and_a_stop_of_its_own(tmp_path: Path) -> None:
    rollouts = RolloutCallback(digits, group=own_limits, sampling=SamplingSpec(group_size=4, max_new_tokens=64))
    fit_run(tmp_path, rollouts=rollouts, max_epochs=1)
    assert {sample.finish_reason for sample in rollouts.samples} == {"stop", "length"}
    for sample in rollouts.samples:
        limit = own_limit(sample.prompt)
        assert limit["stop"] not in sample.text[:-1]
        assert sample.num_tokens == limit["max_new_tokens"] or sample.finish_reason == "stop"


# ---------------------------------------------------------------------- rewards that a part makes


class Counted(Part):
    """The reward is how often a token was written."""

    stage, writes = Stage.SHAPE, ("rewards",)

    def prepare(self, rows: Any) -> Any:
        return dataclasses.replace(rows, rewards=((rows.input_ids == 30) & rows.attention_mask).sum(-1).float())


def test_a_part_that_makes_the_rewards_needs_no_reward_of_the_callback(tmp_path: Path) -> None:
    rollouts = RolloutCallback(sampling=SamplingSpec(group_size=4, max_new_tokens=8))
    fit_run(tmp_path, module_arguments={"parts": [Counted()]}, rollouts=rollouts)
    assert rollouts.experience is not None
    assert bool(rollouts.experience.advantages.any())  # type: ignore[union-attr]  # there are some


# ---------------------------------------------------------------------- forward passes over other rows


def test_a_teacher_reads_a_hint_that_the_student_does_not(tmp_path: Path) -> None:
    parts = [examples()["HintedTeacher"]("(hint)"), TeacherAdvantages()]
    trainer, module, rollouts = fit_run(tmp_path, module_arguments={"parts": parts}, max_epochs=1)
    rows, hint = rollouts.experience, torch.tensor(module.tokenizer.encode("(hint)"))
    assert rows is not None
    for row in range(len(rows)):
        first, last = int(rows.prompt_lengths[row]), int(rows.lengths[row])
        ids = torch.cat([rows.input_ids[row, :first], hint, rows.input_ids[row, first:last]])
        expected = token_logprobs(module.reference, ids.tolist())[first + len(hint) - 1 :]
        found = rows.columns["teacher_logprobs"][row]
        torch.testing.assert_close(found[first - 1 : last - 1], expected, atol=1e-5, rtol=0)
    assert float(trainer.callback_metrics["distillation/reverse_kl"]) > 0


# ---------------------------------------------------------------------- layers that are frozen during training


class Freeze(L.Callback):
    """Freezes the first layer before the second update, as one would with torch's optimizers."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            for name, weight in module.policy.named_parameters():
                weight.requires_grad_("layers.0." not in name)


def freezing(folder: Path, place: str) -> None:
    """What a rank of its own runs: the first layer stands still after its update, or the run is stopped."""
    for way in ("0", "2", "3", "2 by its rate", "3 by its rate"):
        seen: list[float] = []

        class Keep(L.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
                layer = (one for name, one in ModuleWeights(module.policy) if "layers.0." in name)
                seen.append(sum(float(one.double().abs().sum()) for one in layer))  # noqa: B023

        by_rate = way.endswith("rate")
        trainer, module, data, _ = setup_run(
            Path(place),
            callbacks=[Keep()] if by_rate else [Freeze(), Keep()],
            module_arguments={"parts": [examples()["FreezeAfter"](1)] if by_rate else []},
            strategy=f"rlhf_zero{way[0]}",
        )
        if way in ("2", "3"):
            with pytest.raises(RuntimeError, match="requires_grad of 9 parameters of 'policy' was changed during"):
                trainer.fit(module, data)
        else:
            trainer.fit(module, data)
            assert seen[0] != seen[1] == seen[-1], way


@pytest.mark.distributed
def test_layers_that_are_frozen_during_training_stand_still_or_stop_the_run(tmp_path: Path) -> None:
    ranks.run("test_requests:freezing", 1, tmp_path / "rank", place=str(tmp_path))


def test_a_layer_that_is_trained_only_now_stops_the_run_at_every_stage() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = object()
    engine: Any = SimpleNamespace(module=model, optimizer=optimizer, basic_optimizer=optimizer, fp16_enabled=bool)
    steps = SynchronizedSteps({"policy": engine}, torch.device("cpu"))
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"2 parameters of 'policy' .*first: 0.bias"):
        steps.step({"policy": engine})


# ---------------------------------------------------------------------- numbers of rows of data in losses


def weighted_rows(**more: Any) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{i}+{i}=", "completion": str(2 * i), "weight": i % 3, **more} for i in (1, 20, 3, 400, 5, 60, 7)
    ]


@pytest.mark.parametrize("more", [{}, {"streaming": True, "steps_per_epoch": 1}])
@pytest.mark.parametrize(("size", "accumulate"), [(7, 1), (1, 7)])
def test_numbers_of_rows_weigh_them(tmp_path: Path, more: dict[str, Any], size: int, accumulate: int) -> None:
    folder, rows = tiny_model(tmp_path / "model"), weighted_rows()
    data = SFTDataModule(rows, numbers=["weight"], micro_batch_size=size, shuffle=False, **more)
    module = examples(DATA)["WeightedSFT"](str(folder), lr=1e-9)
    trainer = data_runs.trainer(tmp_path, max_epochs=1, accumulate_grad_batches=accumulate)
    trainer.fit(module, data)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), module.tokenizer
    total, count = 0.0, 0
    for row in rows:
        prompt, answer = (tokenizer.encode(row[name]) for name in ("prompt", "completion"))
        logprobs = token_logprobs(model, [*prompt, *answer, tokenizer.eos_token_id])
        total -= row["weight"] * logprobs[len(prompt) - 1 :].sum().item()
        count += len(answer) + 1
    assert float(trainer.callback_metrics["loss"]) == pytest.approx(total / count, rel=1e-5)


def test_numbers_of_rows_weigh_pairs(tmp_path: Path) -> None:
    folder = str(tiny_model(tmp_path / "model"))
    pairs = [{"prompt": "1+1=", "chosen": str(n), "rejected": "x", "weight": float(n)} for n in range(4)]
    losses = []
    weighted = examples(DATA)["WeightedDPO"](folder, lr=1e-9, use_weighting=True)
    for module in (weighted, DPOModule(folder, lr=1e-9)):
        trainer = data_runs.trainer(tmp_path, max_epochs=1)
        trainer.fit(module, PreferenceDataModule(pairs, numbers=["weight"], micro_batch_size=4))
        losses.append(float(trainer.callback_metrics["loss"]))
    assert losses[1] == pytest.approx(math.log(2))
    assert losses[0] == pytest.approx(1.5 * math.log(2))  # all margins are 0, and weights 0 to 3


def test_a_column_without_numbers_is_refused(tmp_path: Path) -> None:
    rows, folder = weighted_rows(weight="much"), tiny_model(tmp_path / "model")
    with pytest.raises(ValueError, match=r"column 'weight' of .*row 0, must hold a number, it holds 'much'"):
        SFTDataModule(rows, numbers=["weight"], tokenizer=str(folder)).setup()
