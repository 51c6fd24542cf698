"""The loop against a few lines of Transformers: gradients, old log-probs, models with dropout, fresh weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from modules.on_policy.preparation.test_rewards import reward_model
from rl_runs import PlainGRPO, digits, fit_run, setup_run, weights
from strategies import ranks
from tiny_models import completion_logprobs, tiny_tokenizer
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from rlhfkit import LocalEngine, RolloutCallback, Sample, SamplingSpec
from rlhfkit.rewards import WeightedSum

from .callback_ranks import selected


def some_unscored(samples: Sequence[Sample]) -> list[float | None]:
    """Digits and length, so that rewards differ; every fifth sample is not scored, and one whole prompt."""
    scores = [value + len(sample.token_ids) / 100 for sample, value in zip(samples, digits(samples), strict=True)]
    missing = [i % 5 == 2 or sample.prompt.index == samples[0].prompt.index for i, sample in enumerate(samples)]
    return [None if gone else score for gone, score in zip(missing, scores, strict=True)]


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant-length"]
)
def test_first_step_is_the_policy_gradient_of_the_scored_samples(tmp_path: Path, aggregation: str) -> None:
    constant = {"policy_loss_arguments": {"max_length": 8}} if aggregation == "constant-length" else {}
    trainer, module, data, rollouts = setup_run(
        tmp_path,
        module=PlainGRPO,
        module_arguments={"lr": 0.1, "advantage_scale": "none", "aggregation": aggregation} | constant,
        rollouts=RolloutCallback(some_unscored, sampling=SamplingSpec(group_size=4, max_new_tokens=8)),
        accumulate_grad_batches=4,
        max_epochs=1,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trainer.fit(module, data)
    assert trainer.global_step == 1

    # At ratio 1 the gradient of the clipped surrogate is that of -A log p, in which only scored samples are.
    groups: dict[int, list[Sample]] = {}
    for sample in rollouts.samples:
        if sample.reward is not None:
            groups.setdefault(sample.prompt.index, []).append(sample)
    scored = [sample for group in groups.values() for sample in group]
    assert len(scored) == 23  # of 32: a whole group of 4, and 5 others
    tokens = sum(len(sample.token_ids) for sample in scored)
    loss = torch.zeros(())
    for group in groups.values():
        mean = sum(sample.reward for sample in group) / len(group)  # type: ignore[misc]
        for sample in group:
            chosen = completion_logprobs(model, sample)
            weight = {
                "token-mean": 1 / tokens,
                "sequence-mean-token-mean": 1 / (len(scored) * len(sample.token_ids)),
                "sequence-mean-token-sum": 1 / len(scored),
                "constant-length": 1 / (len(rollouts.samples) * 8),  # of all rows, as in Dr.GRPO and TRL
            }[aggregation]
            loss = loss - weight * (sample.reward - mean) * chosen.sum()  # type: ignore[operator]
    loss.backward()
    moved = weights(module)
    for name, parameter in model.named_parameters():
        step = (parameter.detach() - moved[name]) / 0.1
        # fp32: the step is the difference of two weights of about 0.1 to 1, whose spacing / 0.1 is about 6e-7
        torch.testing.assert_close(step, parameter.grad, rtol=1e-3, atol=3e-6)
        assert parameter.grad.abs().max() > 1e-4
    assert trainer.callback_metrics["rollout/unscored_fraction"] == pytest.approx(9 / 32)


def test_rewards_that_are_all_missing_leave_the_policy_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rollouts = RolloutCallback(lambda samples: [None] * len(samples), sampling=SamplingSpec(group_size=4))
    trainer, module, data, _ = setup_run(tmp_path, module_arguments={"kl_coef": 0.1}, rollouts=rollouts, max_epochs=1)
    rollouts.sampling = SamplingSpec(group_size=4, max_new_tokens=8)
    trainer.fit(module, data)
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for name, tensor in weights(module).items():
        assert torch.equal(tensor, start[name]), name
    assert trainer.callback_metrics["rollout/unscored_fraction"] == 1
    assert "iteration 0: the reward returned None for all 32 samples, so nothing is learned from them" in caplog.text
    assert "the reward is constant" not in caplog.text  # the alarm on equal rewards


def test_a_model_with_dropout_is_published_and_trained(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=128, n_embd=64, n_layer=2, n_head=2, n_positions=64, eos_token_id=1, bos_token_id=1, pad_token_id=0,
        initializer_range=0.1,
    )  # fmt: skip
    assert config.resid_pdrop == 0.1
    tmp_path.joinpath("model").mkdir()
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    trainer, module, _ = fit_run(tmp_path, max_epochs=1)
    assert trainer.callback_metrics["rollout/probe_difference"] < 1e-5
    assert module.policy.training


def test_validation_never_samples_from_the_weights_of_an_earlier_run(tmp_path: Path) -> None:
    """Two runs, or two checkpoints, at the same step have the same version and are not the same policy."""
    trainer, module, data, rollouts = setup_run(tmp_path)
    data.validation_data, data.validation_split = data.data, "train"
    trainer.validate(module, data, verbose=False)
    first = [sample.token_ids.tolist() for sample in rollouts.validation_samples]
    trainer.validate(module, data, verbose=False)
    assert [sample.token_ids.tolist() for sample in rollouts.validation_samples] == first
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter.mul_(-1.5)
    trainer.validate(module, data, verbose=False)
    second = rollouts.validation_samples
    assert [sample.token_ids.tolist() for sample in second] != first
    model = module.policy.eval()
    with torch.no_grad():  # what was sampled is greedy under the weights of now
        ids = torch.tensor([second[0].prompt.token_ids.tolist()])
        assert model(input_ids=ids).logits[0, -1].argmax() == second[0].token_ids.tolist()[0]


def test_a_part_of_the_reward_that_is_missing_is_left_out_of_its_mean(tmp_path: Path) -> None:
    def sometimes(samples: Sequence[Sample]) -> list[float | None]:
        return [None if sample.prompt.index % 2 else 0.5 for sample in samples]

    reward = WeightedSum({"digits": digits, "sometimes": sometimes}, missing="skip")
    rollouts = RolloutCallback(reward, sampling=SamplingSpec(group_size=4, max_new_tokens=8))
    trainer, module, data, _ = setup_run(tmp_path, rollouts=rollouts)
    data.validation_data, data.validation_split = data.data, "train"
    assert trainer.validate(module, data, verbose=False)[0]["val/sometimes"] == 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a reward model in ``reward``."""
    made = tmp_path_factory.mktemp("two")
    reward_model(made)
    return made


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict[str, Any]]:
    return ranks.run("callbacks.rollout.callback_ranks:everything", 2, folder)


@pytest.mark.distributed
def test_validation_deals_prompts_to_ranks_and_loses_none(two_ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    trainer, module, data, rollouts = setup_run(tmp_path)
    data.validation_data, data.validation_split, data.validation_batch_size = data.data, "train", 40
    trainer.validate(module, data, verbose=False)
    texts = {sample.prompt.index: sample.text for sample in rollouts.validation_samples}
    for report in two_ranks:
        assert report["validation"]["texts"] == [texts[index] for index in range(40)]
        recount = sum(character.isdigit() for text in texts.values() for character in text) / 8 / 40
        assert report["validation"]["logged"] == pytest.approx(recount, abs=1e-6)


@pytest.mark.distributed
def test_dynamic_sampling_by_a_reward_model_chooses_the_same_on_any_ranks(
    two_ranks: list[dict[str, Any]], folder: Path
) -> None:
    """Whether each rank has an engine or all share one, and also where the reward model is sharded."""
    alone = selected(folder, "auto", LocalEngine())
    assert len({index for index, _, _ in alone}) == 8
    for report in two_ranks:
        for name in ("selected", "selected sharded"):
            assert [row[:2] for row in report[name]] == [list(row[:2]) for row in alone]
            assert [row[2] for row in report[name]] == pytest.approx([row[2] for row in alone], abs=1e-5)


@pytest.mark.distributed
def test_an_engine_that_dies_in_a_sharded_transfer_ends_both(two_ranks: list[dict[str, Any]]) -> None:
    first, second = (report["engine"] for report in two_ranks)
    assert second == "ConnectionError: the engine died"
    assert first == "RuntimeError: rank 1 failed: ConnectionError: the engine died"


@pytest.mark.distributed
def test_a_sharded_run_resumes_inside_an_iteration_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    for report in two_ranks:
        found = report["zero2 inside"]  # with kept groups on both ranks
        assert found.pop("replayed") > 0.2
        assert found == {"same rows": True, "same weights": True, "batches": 6}


@pytest.mark.distributed
def test_a_file_of_rank_0_alone_is_not_taken_for_the_middle_of_all_ranks(two_ranks: list[dict[str, Any]]) -> None:
    for report in two_ranks:
        assert "inside an iteration and holds the micro-batches that rank 0 of 2" in report["ddp inside"]
