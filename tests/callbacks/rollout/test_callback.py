"""The loop of one process: its gradient against a few lines of Transformers, fresh weights, trials and checkpoints.

Covers ``callback.py`` of ``callbacks/rollout/``. Ranks and engines that share an iteration: ``test_sharing.py``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import PlainGRPO, digits, fit_run, setup_run, weights
from tiny_models import completion_logprobs
from transformers import AutoModelForCausalLM

from rlhfkit import GRPOModule, RolloutCallback, Sample, SamplingSpec


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


def test_fast_dev_run_is_one_short_update(tmp_path: Path) -> None:
    rollouts = RolloutCallback(digits, sampling=SamplingSpec(group_size=4, max_new_tokens=32))
    trainer, *_ = fit_run(tmp_path, rollouts=rollouts, fast_dev_run=True)
    assert trainer.global_step == 1
    assert len(rollouts.samples) == 4
    assert max(len(sample.token_ids) for sample in rollouts.samples) == 8


def test_a_reference_is_left_out_of_checkpoints_and_they_load(tmp_path: Path) -> None:
    trainer, module, _ = fit_run(tmp_path, module_arguments={"kl_coef": 0.1}, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"]
    assert saved
    assert all(name.startswith("policy.") for name in saved)
    loaded = GRPOModule.load_from_checkpoint(tmp_path / "saved.ckpt")
    for name, tensor in weights(loaded).items():
        assert torch.equal(tensor, weights(module)[name])
    saved.pop("policy.model.norm.weight")
    with pytest.raises(RuntimeError, match=r"policy\.model\.norm\.weight"):
        loaded.load_state_dict(saved)
