"""What must hold in every iteration: ratios, versions, exactness over splits, ranks and resumes, and learning.

Covers ``callback.py``, ``micro_batching.py`` and ``weight_sync.py`` of ``callbacks/rollout/``.
"""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import fit_run, weights
from strategies import ranks

from rlhfkit import GRPOModule, RolloutCallback
from rlhfkit.callbacks.report.page import read_page
from rlhfkit.data import Experience
from rlhfkit.losses import LossOutput


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
    _, module, rollouts = fit_run(
        tmp_path_factory.mktemp("watched"), module=Watched, module_arguments={"kl_coef": 0.1}, callbacks=[recorder]
    )
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


@pytest.mark.distributed
def test_one_rank_and_two_ranks_train_on_the_same_samples_to_the_same_weights(tmp_path: Path) -> None:
    single = ranks.run("rl_runs:train_on_ranks", 1, tmp_path / "one", strategies=["auto", "auto stream"])[0]
    alone, streamed = single["auto"], single["auto stream"]
    strategies = ["ddp", "ddp shared", "rlhf_zero2", "rlhf_zero3", "ddp stream"]
    both = ranks.run("rl_runs:train_on_ranks", 2, tmp_path / "two", strategies=strategies)[0]
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


def test_fast_dev_run_is_one_short_update(tmp_path: Path) -> None:
    trainer, _, rollouts = fit_run(tmp_path, fast_dev_run=True)
    assert trainer.global_step == 1
    assert len(rollouts.samples) == 4
    assert max(len(sample.token_ids) for sample in rollouts.samples) <= 8


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
