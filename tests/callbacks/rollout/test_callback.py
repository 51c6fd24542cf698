"""What must hold in every iteration: ratios, versions, exactness over splits, ranks and resumes, and learning.

Covers ``callback.py``, ``micro_batching.py`` and ``weight_sync.py`` of ``callbacks/rollout/``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import digits, setup_run, weights
from strategies import ranks

from rlhfkit import GRPOModule, RolloutCallback, Sample, SamplingSpec
from rlhfkit.callbacks.report.page import read_page
from rlhfkit.data import Experience
from rlhfkit.losses import LossOutput, group_advantages


class Recorder(L.Callback):
    """Keeps each micro-batch and the metrics of its step."""

    def __init__(self) -> None:
        self.batches: list[Experience] = []
        self.steps: list[int] = []
        self.versions: list[tuple[int, int | None]] = []
        self.tokens: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)
        self.steps.append(trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        rollouts = trainer.callbacks[0]
        self.versions.append((trainer.global_step, rollouts.engine.version))
        self.tokens += [sample.token_ids.tolist() for sample in rollouts.samples]


class Watched(GRPOModule):
    """Keeps the metrics of each micro-batch's loss."""

    def loss(self, batch: Any, out: Any) -> LossOutput:
        result = super().loss(batch, out)
        self.__dict__.setdefault("seen", []).append((batch, out.logprobs.detach(), result.metrics))
        return result


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Watched, Recorder, RolloutCallback]:
    recorder = Recorder()
    trainer, module, data, rollouts = setup_run(
        tmp_path_factory.mktemp("watched"), module=Watched, module_arguments={"kl_coef": 0.1}, callbacks=[recorder]
    )
    trainer.fit(module, data)
    return module, recorder, rollouts  # type: ignore[return-value]


def test_the_first_update_of_an_iteration_has_ratio_exactly_one(
    watched: tuple[Watched, Recorder, RolloutCallback],
) -> None:
    module, recorder, _ = watched
    firsts = [entry for entry in module.seen if (entry[0].update == 0).all()]
    assert len(firsts) == 4  # two micro-batches in each of two iterations
    for batch, _, metrics in firsts:
        assert batch.old_logprobs is None
        assert metrics["policy/ratio_mean"] == 1
        assert metrics["policy/ratio_max"] == 1
        assert metrics["policy/clip_fraction"] == 0
    assert recorder.steps == [0, 0, 1, 1, 2, 2, 3, 3]


def test_later_updates_get_the_log_probs_of_the_policy_that_sampled(
    watched: tuple[Watched, Recorder, RolloutCallback],
) -> None:
    module, _, _ = watched
    later = [entry for entry in module.seen if (entry[0].update == 1).all()]
    assert len(later) == 4
    for batch, _, metrics in later:
        assert batch.old_logprobs is not None
        torch.testing.assert_close(batch.old_logprobs, batch.rollout_logprobs, rtol=0, atol=2e-5)
        assert metrics["policy/ratio_mean"] != 1


def test_reference_is_the_policy_at_step_zero(watched: tuple[Watched, Recorder, RolloutCallback]) -> None:
    module, _, _ = watched
    batch, logprobs, metrics = module.seen[0]
    torch.testing.assert_close(batch.columns["ref_logprobs"], logprobs, rtol=0, atol=2e-5)
    assert abs(float(metrics["policy/ref_kl"])) < 1e-9
    assert float(module.seen[-1][2]["policy/ref_kl"]) > 1e-6


def test_engine_serves_the_newest_policy_and_tokens_know_it(watched: tuple[Watched, Recorder, RolloutCallback]) -> None:
    _, recorder, _ = watched
    # on_train_epoch_end of a later callback: the RolloutCallback before it has published already
    assert recorder.versions == [(2, 2), (4, 4)]
    made_by = [int(batch.versions[batch.action_mask].unique()) for batch in recorder.batches]
    assert made_by == [0] * 4 + [2] * 4


def test_micro_batches_share_the_count_of_their_whole_step(watched: tuple[Watched, Recorder, RolloutCallback]) -> None:
    _, recorder, _ = watched
    for one, other in zip(recorder.batches[::2], recorder.batches[1::2], strict=True):
        tokens = int(one.action_mask.sum() + other.action_mask.sum())
        assert one.step_tokens == other.step_tokens == tokens
        assert one.step_sequences == other.step_sequences == 16
        assert one.step_micro_batches == 2


@pytest.mark.distributed
def test_one_rank_and_two_ranks_train_on_the_same_samples_to_the_same_weights(tmp_path: Path) -> None:
    single = ranks.run("rl_runs:train_on_ranks", 1, tmp_path / "one", strategies=["auto", "auto stream"], world=1)[0]
    alone, streamed = single["auto"], single["auto stream"]
    strategies = ["ddp", "ddp shared", "rlhf_zero2", "rlhf_zero3", "ddp stream"]
    both = ranks.run("rl_runs:train_on_ranks", 2, tmp_path / "two", strategies=strategies, world=2)[0]
    # Of a stream, two ranks go on with the second iteration of one rank.
    resumed = both.pop("ddp stream")
    assert resumed["tokens"] == streamed["tokens"][32:]
    assert resumed["weights"] == pytest.approx(streamed["weights"], rel=1e-5)
    [report] = read_page(tmp_path / "two" / "ddp.html")
    assert [one["iteration"] for one in report.samples] == [0, 1]
    for sample in (one for kept in report.samples for group in kept["groups"] for one in group["samples"]):
        assert len(sample["difference"]) == sample["length"]  # whichever rank has trained on it
    for name, run in both.items():
        assert run["steps"] == alone["steps"] == 4
        assert run["tokens"] == alone["tokens"], name
        assert run["metrics"]["time/generate"] > 0
        for one, other in zip(alone["weights"], run["weights"], strict=True):
            assert one == pytest.approx(other, rel=1e-5), name
        measured = {name for name in alone["metrics"] if not name.startswith(("time/", "grad_norm/"))}
        assert {
            "policy/ratio_max",
            "rollout_corr/logprob_abs_diff_max",
            "rollout_corr/untruncated_eff_sample_size",
        } <= measured
        for metric in measured:
            assert run["metrics"][metric] == pytest.approx(alone["metrics"][metric], rel=1e-4, abs=2e-6), (name, metric)


@pytest.mark.distributed
def test_an_error_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = ranks.run("rl_runs:fail_on_one_rank", 2, tmp_path)
    assert first == "ArithmeticError: the reward is broken"
    assert second == "RuntimeError: rank 0 failed: ArithmeticError: the reward is broken"


def test_unscored_samples_are_not_trained_on(tmp_path: Path) -> None:
    def sometimes(samples: Sequence[Sample]) -> list[float | None]:
        return [
            None if sample.sample_index == 0 else value for sample, value in zip(samples, digits(samples), strict=True)
        ]

    recorder = Recorder()
    rollouts = RolloutCallback(sometimes, sampling=SamplingSpec(group_size=4, max_new_tokens=8))
    trainer, module, data, _ = setup_run(tmp_path, rollouts=rollouts, callbacks=[recorder], max_epochs=1)
    trainer.fit(module, data)
    for batch in recorder.batches:
        unscored = batch.sample_index == 0
        assert not batch.action_mask[unscored].any()
        assert (batch.advantages[unscored] == 0).all()  # type: ignore[index]
        assert batch.rewards[unscored].isnan().all()
        scored = ~recorder.batches[0].rewards.isnan()
        assert scored.any()
    assert trainer.callback_metrics["rollout/unscored_fraction"] == 0.25
    assert {batch.step_sequences for batch in recorder.batches} <= {float(n) for n in range(8, 17)}


def test_the_curious_subclass_of_the_design_works(tmp_path: Path) -> None:
    class CuriousGRPO(GRPOModule):
        def __init__(self, *args: Any, entropy_coef: float = 1e-3, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

        def loss(self, batch: Any, out: Any) -> LossOutput:
            base = super().loss(batch, out)
            entropy = self.token_mean(out.entropy, batch)
            return LossOutput(
                base.loss - self.hparams.entropy_coef * entropy, base.metrics | {"policy/entropy": entropy.detach()}
            )

    plain = setup_run(tmp_path, max_epochs=1)
    curious = setup_run(tmp_path, module=CuriousGRPO, module_arguments={"entropy_coef": 0.5}, max_epochs=1)
    for trainer, module, data, _ in (plain, curious):
        trainer.fit(module, data)
    assert curious[1].hparams.entropy_coef == 0.5
    gap = plain[0].callback_metrics["loss"] - curious[0].callback_metrics["loss"]
    # The first update is the same in both; the entropy term is about half of 3 to 4.5 nats.
    assert 1.0 < float(gap) < 3.0


def test_another_estimator_is_one_method(tmp_path: Path) -> None:
    class DrGRPO(GRPOModule):
        def advantages(self, experience: Experience) -> torch.Tensor:
            return group_advantages(experience.rewards, experience.group, scale="none")

    trainer, module, data, rollouts = setup_run(tmp_path, module=DrGRPO, max_epochs=1)
    trainer.fit(module, data)
    experience = rollouts.experience
    assert experience is not None
    groups = experience.rewards.view(8, 4)
    expected = (groups - groups.mean(1, keepdim=True)).flatten()
    torch.testing.assert_close(experience.advantages[:, 0], expected)  # type: ignore[index]


def test_fast_dev_run_is_one_short_update(tmp_path: Path) -> None:
    trainer, module, data, rollouts = setup_run(tmp_path, fast_dev_run=True)
    trainer.fit(module, data)
    assert trainer.global_step == 1
    assert len(rollouts.samples) == 4
    assert max(len(sample.token_ids) for sample in rollouts.samples) <= 8


def test_validation_is_a_greedy_recount(tmp_path: Path) -> None:
    trainer, module, data, rollouts = setup_run(tmp_path)
    data.validation_data, data.validation_split, data.validation_batch_size = data.data, "train", 16
    metrics = trainer.validate(module, data, verbose=False)[0]
    assert len(rollouts.validation_samples) == 40
    rewards = [digits([sample])[0] for sample in rollouts.validation_samples]
    assert metrics["val/reward"] == pytest.approx(sum(rewards) / 40, abs=1e-6)
    assert sorted(sample.prompt.index for sample in rollouts.validation_samples) == list(range(40))


def test_a_reference_is_left_out_of_checkpoints_and_they_load(tmp_path: Path) -> None:
    trainer, module, data, _ = setup_run(tmp_path, module_arguments={"kl_coef": 0.1}, max_epochs=1)
    trainer.fit(module, data)
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
