"""Several epochs over an iteration (``PromptDataModule(epochs_per_iteration=...)``).

Covers ``OldLogprobs`` of ``modules/parts/old_policy.py``.
"""

import copy
import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import weights
from strategies import ranks
from tiny_models import token_logprobs

from callbacks.rollout.capped_runs import ON_RANKS, PPO_ARGUMENTS, fit
from rlhfkit.callbacks.rollout.micro_batching import plan_iteration
from rlhfkit.data import Experience, Prompt, Sample
from rlhfkit.data.packing import IterationShape, epoch_order

CASES: dict[str, dict[str, Any]] = {
    "two updates": {"temperature": 0.7},
    "one update": {"updates": 1, "module_arguments": {"kl_coef": 0.0}},
    "PPO": PPO_ARGUMENTS,
    "capped": {"cap": 30},
    "overlap": {"max_staleness": 1},
}


class Policies(L.Callback):
    """Keeps the rows of each iteration, and a copy of the policy before it."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.policies: list[Any] = []
        self.tokens: list[dict[tuple[int, int], list[int]]] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.updates == 1:  # the first epoch's own forward passes give them
            pl_module.passes.statistics = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.policies.append(copy.deepcopy(pl_module.policy).eval())
            self.tokens.append({})
        for row in range(len(batch)):
            key = int(batch.group[row]), int(batch.sample_index[row])
            self.tokens[-1][key] = batch.input_ids[row, batch.attention_mask[row]].tolist()


@pytest.mark.parametrize("case", CASES)
def test_old_log_probs_are_those_of_the_policy_before_the_iteration_in_every_epoch(tmp_path: Path, case: str) -> None:
    arguments = CASES[case]
    policies = Policies(arguments.get("updates", 2))
    trainer, module, watch = fit(tmp_path, epochs=2, max_epochs=2, callbacks=[policies], **arguments)
    updates = 2 * policies.updates
    assert trainer.global_step == watch.steps[-1] == 2 * updates
    assert module.at_ratio_one == {0, updates}  # the first of each iteration
    assert len(module.old) == 2 * 2 * 32
    cache: dict[Any, torch.Tensor] = {}
    for step, *place, old in module.old:
        key = step // updates, *place
        tokens = policies.tokens[key[0]][key[1:]]
        if key not in cache:
            with torch.no_grad():
                cache[key] = token_logprobs(policies.policies[key[0]], tokens, arguments.get("temperature", 1.0))
        known = old != 0
        torch.testing.assert_close(old[known], cache[key][known], rtol=0, atol=1e-5)


def test_the_order_keeps_the_samples_of_a_prompt_together_and_is_a_function_of_its_arguments() -> None:
    groups = [5, 5, 2, 2, 9, 9, 7, 7]
    order = epoch_order(groups, 3, seed=1, iteration=4)
    assert order[:8] == list(range(8))
    for first in (8, 16):
        rows = order[first : first + 8]
        assert sorted(rows) == list(range(8))
        assert [one + 1 for one in rows[::2]] == rows[1::2]
    assert order == epoch_order(groups, 3, seed=1, iteration=4)
    assert order != epoch_order(groups, 3, seed=2, iteration=4)
    assert order != epoch_order(groups, 3, seed=1, iteration=5)
    assert epoch_order(groups, 1, seed=1, iteration=4) == list(range(8))


@pytest.mark.parametrize("ranks_per_forward", [1, 2, 4])
@pytest.mark.parametrize("max_tokens", [None, 40])
def test_every_epoch_is_shared_by_all_ranks_also_by_those_that_compute_together(
    ranks_per_forward: int, max_tokens: int | None
) -> None:
    samples = []
    for row in range(32):
        length = 1 + 5 * row % 7
        samples.append(Sample(Prompt(row // 4, [1] * 3), row % 4, [2] * length, [0.0] * length, [0] * length, "stop"))
    summary = Experience.from_samples(samples).summarize()
    shape = IterationShape(32, 4, 2).repeated(3)
    whole = {"ranks_per_forward": ranks_per_forward, "max_tokens": max_tokens, "seed": 5, "iteration": 2}
    plan = plan_iteration(summary, shape, 4, **whole)
    assert len({len(share) for share in plan.micro_batches}) == 1
    rows: dict[int, list[int]] = {}
    for share in plan.micro_batches:
        for one in share:
            rows.setdefault(one.update, []).extend(one.rows if one.trained else [])
    assert [len(rows[update]) for update in range(6)] == [16] * 6
    for first in (0, 2, 4):
        assert sorted(rows[first] + rows[first + 1]) == list(range(32))
    assert len({frozenset(rows[first]) for first in (0, 2, 4)}) == 3  # in another order each time
    for own, trained in zip(plan.own_rows, plan.trained_rows, strict=True):
        assert set(own.tolist()) <= set(trained.tolist())
    assert sorted(torch.cat(plan.own_rows).tolist()) == list(range(32))


def test_the_first_epoch_is_bitwise_the_run_of_one(tmp_path: Path) -> None:
    one, first = (weights(fit(tmp_path, epochs=epochs, max_steps=2)[1]) for epochs in (1, 2))
    for name, tensor in one.items():
        assert torch.equal(tensor, first[name])


@pytest.mark.distributed
def test_any_number_of_ranks_trains_on_the_same_updates(tmp_path: Path) -> None:
    ddp = ("two updates, PPO", "one update", "two updates, pairs", "capped")
    runs = [*(("ddp", name) for name in ddp), ("rlhf_zero2", "capped"), ("rlhf_zero2", "capped, pairs")]
    runs += [("rlhf_zero2", "scattered"), ("rlhf_zero3", "scattered")]
    alone = {name: fit(tmp_path, **ON_RANKS[name]) for name in ON_RANKS}
    for reports in ranks.run("callbacks.rollout.capped_runs:on_ranks", 2, tmp_path, runs=runs):
        for (_, name), found in zip(runs, reports, strict=True):
            trainer, _, watch = alone[name]
            assert found["steps"] == trainer.global_step
            assert found["weights"] == pytest.approx(watch.weights, rel=1e-5), name
            assert max(map(max, found["sizes"])) <= max(ON_RANKS[name].get("cap", math.inf), max(map(max, watch.sizes)))
            if name == "scattered":
                assert (watch.accumulated, found["accumulated"]) == ([9, 9], [5, 5])  # 10 of two ranks for 9 samples
                for metric, value in trainer.callback_metrics.items():
                    if not metric.startswith("time/"):
                        assert found["metrics"][metric] == pytest.approx(float(value), rel=1e-4, abs=2e-6), metric
