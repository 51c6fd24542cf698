"""XPO and Nash-MD of tutorials/research, against loops by hand in float64; who samples what, and by which seeds."""

import copy
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from plain_sgd import PlainSGD, sgd_by_hand
from rl_runs import fit_run, weights
from tiny_models import completion_logprobs, local_engine, prompts_of, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhfkit import Invariants, LocalEngine, RolloutCallback, Sample, SamplingSpec, VLLMPool
from rlhfkit.callbacks import SharedDevices
from rlhfkit.models import load_causal_lm
from rlhfkit.rewards import PairwiseReward
from rlhfkit.rollout import GroupFunction, sample_groups, sample_seed
from rlhfkit.rollout.groups import GroupRunner

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
    trainer, made, rollouts = fit_run(
        folder,
        module=module,
        module_arguments={"lr": LR, "beta": BETA, **arguments},
        data_arguments={"rollout_batch_size": 16, "micro_batch_size": 8},
        rollouts=RolloutCallback(PairwiseReward(judged), group=group, sampling=SAMPLING),
        callbacks=[Invariants()],
        max_epochs=1,
    )
    return trainer, made, rollouts.samples


def logprob(model: Any, sample: Sample) -> Tensor:
    """Of the answer at the temperature of sampling."""
    return completion_logprobs(model, sample, TEMPERATURE).sum()


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
            own = logprob(policy, ours)
            log_ratio = own - known[0]
            if nash:
                weight = ours.reward - 0.5 - BETA * log_ratio.detach()
                total = total - own * weight
                continue
            explored = logprob(policy, theirs)
            sign = 1 if ours.reward > theirs.reward else -1
            margin = BETA * sign * (log_ratio - (explored - known[1]))
            total = total - torch.nn.functional.logsigmoid(margin) + ALPHA * explored
        (total / count).backward()
        losses.append(float(total.detach() / count))
        counts.append(count)
        sgd_by_hand(policy, lr=LR)
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
    # Of the policy's samples only.
    assert float(logged.get("rollout_corr/logprob_abs_diff_mean", 0.0)) == pytest.approx(0, abs=1e-4)
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


# ---------------------------------------------------------------------- the samples of both

OF_THREE = SamplingSpec(group_size=3, max_new_tokens=7, temperature=0.7, seed=5)
THEIRS = replace(OF_THREE, group_size=1, seed=sample_seed(OF_THREE.seed, -1, -1, -1))
"""How the other sampler's answers are drawn, by an engine of its own."""
PROMPTS = prompts_of(("1+2=", "hello world", "a"))


class World(NamedTuple):
    """A model as it was at the start, and the policy that it has become."""

    folder: Path
    reference: Any
    policy: Any

    def samples(self, group: GroupFunction, sampling: SamplingSpec = OF_THREE) -> list[Sample]:
        engine = local_engine(self.folder, self.policy, version=7, max_sequences=2)
        group.start(engine, str(self.folder), dtype=torch.float32)
        return sample_groups(engine, group, PROMPTS, sampling, model=str(self.folder), iteration=4)

    def theirs(self, group: GroupFunction) -> list[Sample]:
        """The samples of the other sampler, each marked as one."""
        return [sample for sample in self.samples(group) if set(sample.versions.tolist()) == {-1}]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tiny_model(tmp_path_factory.mktemp("model"))
    reference = load_causal_lm(str(folder)).eval()
    policy, generator = copy.deepcopy(reference), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator) * parameter.std()
    return World(folder, reference, policy)


def tokens(samples: Sequence[Sample]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]


def test_a_group_is_the_policys_samples_and_then_the_references(world: World) -> None:
    """Drawn by seeds of their own, so that equal models do not give equal answers."""
    samples = world.samples(ReferenceSamples(LocalEngine()))
    assert [(sample.prompt.index, sample.sample_index) for sample in samples] == [
        (place, index) for place in range(3) for index in range(3)
    ]
    assert [sample.versions.tolist()[0] for sample in samples] == [7, 7, -1] * 3
    ours = [sample for sample in samples if sample.sample_index < 2]
    theirs = [sample for sample in samples if sample.sample_index == 2]
    assert all(math.isnan(value) for sample in theirs for value in sample.logprobs.tolist())
    policy, reference = local_engine(world.folder, world.policy, version=7), local_engine(world.folder)
    assert tokens(ours) == tokens(policy.generate(PROMPTS, replace(OF_THREE, group_size=2), iteration=4))
    assert tokens(theirs) == tokens(reference.generate(PROMPTS, THEIRS, iteration=4))


@pytest.mark.parametrize("mixed", [False, True])
def test_another_reference_can_be_named(world: World, tmp_path: Path, mixed: bool) -> None:
    world.policy.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    named: dict[str, Any] = {"reference_model": str(tmp_path)}
    group = ReferenceMixture(mixture_coef=1, **named) if mixed else ReferenceSamples(LocalEngine(), **named)
    policy = local_engine(world.folder, world.policy)
    assert tokens(world.theirs(group)) == tokens(policy.generate(PROMPTS, THEIRS, iteration=4))


@pytest.mark.parametrize("weight", [0.0, 0.35, 1.0])
def test_a_mixture_is_sampled_from_the_normalized_product_of_both_distributions(world: World, weight: float) -> None:
    """Against inverting the distribution written by hand in probabilities, token by token without a cache."""
    theirs = world.theirs(ReferenceMixture(mixture_coef=weight, count=2))
    assert [sample.sample_index for sample in theirs] == [1, 2] * 3
    for sample in theirs:
        seed = sample_seed(THEIRS.seed, 4, sample.prompt.index, sample.sample_index - 1)
        drawn = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        text = sample.prompt.token_ids.tolist()
        for uniform, token in zip(drawn, sample.token_ids.tolist(), strict=False):
            with torch.no_grad():
                ids = torch.tensor([text])
                chances = [
                    (model(input_ids=ids).logits[0, -1].double() / 0.7).softmax(-1)
                    for model in (world.policy, world.reference)
                ]
            mixed = chances[0] ** (1 - weight) * chances[1] ** weight
            assert int(torch.searchsorted((mixed / mixed.sum()).cumsum(-1), uniform)) == token
            text.append(token)


def test_either_engine_may_be_on_the_ranks_gpus_and_prompts_have_to_fit_both() -> None:
    """An engine that shares GPUs is put to sleep while the policy learns, and woken only where ``colocate`` says so."""
    shares: dict[str, Any] = {"colocate": True, "sleep_level": 1}
    for ours, theirs, expected in (({}, {}, False), (shares, {}, True), ({}, shares, True)):
        rollouts = RolloutCallback(
            engine=VLLMPool(1, max_model_len=64, **ours), group=ReferenceSamples(VLLMPool(1, **theirs))
        )
        assert (rollouts.part(SharedDevices) is not None) is expected
    for lengths, expected_length in (((64, 32), 32), ((64, None), 64), ((None, None), None)):
        policy, reference = (VLLMPool(1, max_model_len=length) for length in lengths)
        assert GroupRunner(policy, ReferenceSamples(reference)).max_model_len == expected_length


ENGINE = LocalEngine()
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: XPOModule("model", alpha=-1.0), "alpha must not be negative"),
    (lambda: NashMDModule("model", link="elo"), "link must be one of"),
    (lambda: XPOModule("model").check_group_size(4), "group_size=4"),
    (lambda: NashMDModule("model").check_group_size(4), "group_size=4"),
    (lambda: XPOModule("model").check_engine(LocalEngine()), "group=Reference"),
    (lambda: NashMDModule("model").check_engine(LocalEngine()), "group=Reference"),
    (lambda: GroupRunner(VLLMPool(1), ReferenceMixture()), "VLLMPool cannot do"),
    (lambda: ReferenceMixture(mixture_coef=1.5), "mixture_coef"),
    (lambda: ReferenceSamples("sft"), "reference_engine must implement"),  # type: ignore[arg-type]
    (lambda: GroupRunner(ENGINE, ReferenceSamples(ENGINE)), "make a second one"),
    (lambda: GroupRunner(ENGINE, ReferenceSamples(VLLMPool(1))), "two engines of one kind"),
    (lambda: ReferenceSamples(VLLMPool(1, colocate=True)), "sleep_level=1"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_has_no_meaning_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_a_group_has_room_for_the_policys_samples(world: World) -> None:
    with pytest.raises(ValueError, match="raise group_size"):
        world.samples(ReferenceSamples(LocalEngine(), count=2), SamplingSpec(group_size=2))
