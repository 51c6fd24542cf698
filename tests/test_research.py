"""XPO and Nash-MD of tutorials/research, by public names only, against loops written by hand in float64; learning."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_sgd import PlainSGD
from rl_runs import setup_run, weights
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhfkit import (
    Invariants,
    LocalEngine,
    RolloutCallback,
    Sample,
    SamplingSpec,
)
from rlhfkit.rewards import PairwiseReward

sys.path.insert(0, str(Path(__file__).parent.parent / "tutorials" / "research"))

from nash_md import NashMDModule, preference_advantages
from reference_samples import ReferenceMixture, ReferenceSamples
from xpo import XPOModule

BETA, LR, ALPHA, TEMPERATURE = 0.4, 0.05, 0.02, 0.8
SAMPLING = SamplingSpec(group_size=2, max_new_tokens=6, temperature=TEMPERATURE)


class PlainXPO(PlainSGD, XPOModule):
    """XPO with SGD."""


class PlainNash(PlainSGD, NashMDModule):
    """Nash-MD with SGD."""


def logprob(model: Any, sample: Sample) -> Tensor:
    """Scalar float64, log-prob of the answer at the temperature of sampling."""
    ids = torch.tensor([sample.all_token_ids.tolist()])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double() / TEMPERATURE
    count = len(sample.token_ids)
    return logits.log_softmax(-1)[-count:].gather(-1, ids[0, -count:, None]).sum()


def judged(pairs: Sequence[tuple[Sample, Sample]]) -> list[float | None]:
    """A judge with ties, and with comparisons that it cannot make."""
    found: list[float | None] = []
    for first, second in pairs:
        kind = (first.prompt.index + 1) % 5
        graded = 0.5 + 0.125 * (first.token_ids.tolist()[0] % 3 - second.token_ids.tolist()[0] % 3)
        found.append(None if kind == 0 else 0.5 if kind == 1 else graded)
    return found


def run(folder: Path, module: Any, group: Any, **arguments: Any) -> tuple[Any, Any, list[Sample]]:
    """One iteration of 16 prompts in two updates of two micro-batches."""
    trainer, made, data, rollouts = setup_run(
        folder,
        module=module,
        module_arguments={"lr": LR, "beta": BETA, **arguments},
        data_arguments={"rollout_batch_size": 16, "micro_batch_size": 8},
        rollouts=RolloutCallback(PairwiseReward(judged), group=group, sampling=SAMPLING),
        callbacks=[Invariants()],
        max_epochs=1,
    )
    trainer.fit(made, data)
    return trainer, made, rollouts.samples


def by_hand(folder: Path, samples: list[Sample], *, nash: bool) -> tuple[dict[str, Any], list[float], list[int]]:
    """Weights, losses, and prompts that count, of two updates with the same samples."""
    policy = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    reference = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    losses, counts = [], []
    for update in (0, 1):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for first in range(16 * update, 16 * update + 16, 2):
            ours, theirs = samples[first : first + 2]
            assert min(ours.versions.tolist()) >= 0
            assert set(theirs.versions.tolist()) == {-1}
            if ours.reward is None or (not nash and ours.reward == theirs.reward):
                continue
            count += 1
            with torch.no_grad():
                known = [logprob(reference, sample) for sample in (ours, theirs)]
            log_ratio = logprob(policy, ours) - known[0]
            if nash:
                weight = ours.reward - 0.5 - BETA * log_ratio.detach()
                total = total - logprob(policy, ours) * weight
                continue
            explored = logprob(policy, theirs)
            sign = 1 if ours.reward > theirs.reward else -1
            margin = BETA * sign * (log_ratio - (explored - known[1]))
            total = total - torch.nn.functional.logsigmoid(margin) + ALPHA * explored
        (total / count).backward()
        losses.append(float(total.detach() / count))
        counts.append(count)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter -= LR * parameter.grad
                parameter.grad = None
    return policy.state_dict(), losses, counts


@pytest.mark.parametrize("nash", [False, True], ids=["xpo", "nash-md"])
def test_an_iteration_is_the_loop_by_hand(tmp_path: Path, nash: bool) -> None:
    if nash:
        trainer, module, samples = run(tmp_path, PlainNash, ReferenceMixture(mixture_coef=0.3))
    else:
        group = ReferenceSamples(LocalEngine())
        trainer, module, samples = run(tmp_path, PlainXPO, group, alpha=ALPHA)
    expected, losses, counts = by_hand(tmp_path, samples, nash=nash)
    assert 4 <= sum(counts) < 16
    logged = trainer.callback_metrics
    assert float(logged["loss"]) == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert float(logged["rollout/unscored_fraction"]) > 0
    if nash:
        assert 0.25 < float(logged["nash/preference"]) < 0.75
    else:
        assert float(logged["exploration/logps"]) < 0
    assert "rollout_corr/logprob_abs_diff_mean" not in logged or float(
        logged["rollout_corr/logprob_abs_diff_mean"]
    ) == pytest.approx(0, abs=1e-4)  # of the policy's samples only
    for name, tensor in weights(module).items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=0, atol=2e-6)


def test_preferences_are_those_between_the_two_samplers_of_a_prompt() -> None:
    nan = float("nan")
    rewards = torch.tensor([1.0, 0.25, 0.5, 0.5, nan, 1.0, 0.0, nan, 0.75, 0.0, 0.5])
    group = torch.tensor([4, 4, 7, 7, 8, 8, 9, 9, 1, 1, 1])
    ours = torch.tensor([1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0]).bool()
    found = preference_advantages(rewards, group, ours)
    expected = torch.tensor([0.375, nan, 0.0, nan, nan, nan, nan, nan, 0.25, nan, nan])
    torch.testing.assert_close(found, expected, equal_nan=True)
    scores = preference_advantages(10 * rewards[:2], group[:2], ours[:2], link="bradley-terry")
    assert float(scores[0]) == pytest.approx(1 / (1 + torch.tensor(-7.5).exp().item()) - 0.5)
    with pytest.raises(ValueError, match="win rates are in"):
        preference_advantages(10 * rewards, group, ours)


def test_what_has_no_meaning_is_refused() -> None:
    for kind, arguments, message in (
        (XPOModule, {"alpha": -1.0}, "alpha must not be negative"),
        (NashMDModule, {"link": "elo"}, "link must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            kind("model", **arguments)  # type: ignore[arg-type]
    for kind in (XPOModule, NashMDModule):
        with pytest.raises(ValueError, match="group_size=4"):
            kind("model").check_group_size(4)
        with pytest.raises(ValueError, match="group=Reference"):
            kind("model").check_engine(LocalEngine())
