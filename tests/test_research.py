"""XPO and Nash-MD of tutorials/research, against loops by hand in float64; who samples what, and by which seeds."""

import copy
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_sgd import PlainSGD
from rl_runs import setup_run, weights
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhfkit import (
    Invariants,
    LocalEngine,
    RolloutCallback,
    Sample,
    SamplingSpec,
    VLLMPool,
)
from rlhfkit.callbacks import SharedDevices
from rlhfkit.data import Prompt
from rlhfkit.models import load_causal_lm
from rlhfkit.rewards import PairwiseReward
from rlhfkit.rollout import GroupFunction, ModuleWeights, sample_seed
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


# ---------------------------------------------------------------------- the samples of both

OF_THREE = SamplingSpec(group_size=3, max_new_tokens=7, temperature=0.7, seed=5)
TEXTS = ("1+2=", "hello world", "a")


class World:
    """A model as it was at the start, the policy that it has become, and engines of both."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(tiny_model(folder))
        self.reference = load_causal_lm(self.folder).eval()
        self.policy = copy.deepcopy(self.reference)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            for parameter in self.policy.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator) * parameter.std()

    def loaded(self, engine: LocalEngine) -> LocalEngine:
        engine.start(self.folder, dtype=torch.float32)
        engine.load(ModuleWeights(self.policy), version=7)
        return engine

    def runner(self, group: GroupFunction, engine: LocalEngine | None = None) -> GroupRunner:
        engine = self.loaded(LocalEngine(max_sequences=2) if engine is None else engine)
        group.start(engine, self.folder, dtype=torch.float32)
        runner = GroupRunner(engine, group)
        runner.configure(tiny_tokenizer(), None, self.folder)
        return runner

    def alone(self, *, reference: bool) -> LocalEngine:
        engine = LocalEngine()
        if not reference:
            return self.loaded(engine)
        engine.start(self.folder, dtype=torch.float32, load_weights=True)
        return engine


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def runner(world: World) -> Iterator[GroupRunner]:
    runner = world.runner(ReferenceSamples(LocalEngine()))
    yield runner
    runner.close()


def prompts() -> list[Prompt]:
    tokenizer = tiny_tokenizer()
    return [Prompt(10 + place, tokenizer(text)["input_ids"], text) for place, text in enumerate(TEXTS)]


def tokens(samples: Sequence[Sample]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]


def others(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if set(sample.versions.tolist()) == {-1}]


def their_sampling(count: int = 1) -> SamplingSpec:
    """How the other sampler's answers are drawn, by an engine of its own."""
    seed = sample_seed(OF_THREE.seed, -1, -1, -1)
    return SamplingSpec(group_size=count, max_new_tokens=7, temperature=0.7, seed=seed)


def test_a_group_is_the_policys_samples_and_then_the_references(world: World, runner: GroupRunner) -> None:
    samples = runner.generate(prompts(), OF_THREE, iteration=4)
    assert [(sample.prompt.index, sample.sample_index) for sample in samples] == [
        (10 + place, index) for place in range(3) for index in range(3)
    ]
    assert [sample.versions.tolist()[0] for sample in samples] == [7, 7, -1] * 3
    theirs = others(samples)
    assert all(math.isnan(value) for sample in theirs for value in sample.logprobs.tolist())
    ours = [sample for sample in samples if sample not in theirs]
    expected = world.alone(reference=False).generate(
        prompts(), SamplingSpec(group_size=2, max_new_tokens=7, temperature=0.7, seed=5), iteration=4
    )
    assert tokens(ours) == tokens(expected)
    assert tokens(theirs) == tokens(world.alone(reference=True).generate(prompts(), their_sampling(), iteration=4))
    assert runner.engine.version == 7


def test_equal_models_do_not_give_equal_answers(world: World) -> None:
    policy = LocalEngine()
    policy.start(world.folder, dtype=torch.float32, load_weights=True)
    group = ReferenceSamples(LocalEngine())
    group.start(policy, world.folder, dtype=torch.float32)
    same = GroupRunner(policy, group)
    same.configure(tiny_tokenizer(), None, world.folder)
    samples = same.generate(prompts(), SamplingSpec(group_size=2, max_new_tokens=7), iteration=0)
    assert all(
        ours.token_ids.tolist() != theirs.token_ids.tolist()
        for ours, theirs in zip(samples[::2], samples[1::2], strict=True)
    )
    same.close()


@pytest.mark.parametrize("mixed", [False, True])
def test_another_reference_can_be_named(world: World, tmp_path: Path, mixed: bool) -> None:
    world.policy.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    named: dict[str, Any] = {"reference_model": str(tmp_path)}
    group = ReferenceMixture(mixture_coef=1, **named) if mixed else ReferenceSamples(LocalEngine(), **named)
    theirs = others(world.runner(group).generate(prompts(), OF_THREE, iteration=4))
    policy = world.alone(reference=False)
    assert tokens(theirs) == tokens(policy.generate(prompts(), their_sampling(), iteration=4))


@pytest.mark.parametrize("weight", [0.0, 0.35, 1.0])
def test_a_mixture_is_sampled_from_the_normalized_product_of_both_distributions(world: World, weight: float) -> None:
    """Against inverting the distribution written by hand in probabilities, token by token without a cache."""
    runner = world.runner(ReferenceMixture(mixture_coef=weight, count=2))
    theirs = others(runner.generate(prompts(), OF_THREE, iteration=4))
    assert [sample.sample_index for sample in theirs] == [1, 2] * 3
    spec = their_sampling()
    for sample in theirs:
        generator = torch.Generator().manual_seed(
            sample_seed(spec.seed, 4, sample.prompt.index, sample.sample_index - 1)
        )
        drawn, text = torch.rand(7, dtype=torch.float64, generator=generator), sample.prompt.token_ids.tolist()
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
    runner.close()


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


def test_what_cannot_be_sampled_is_refused(world: World) -> None:
    with pytest.raises(TypeError, match="VLLMPool cannot do"):
        GroupRunner(VLLMPool(1), ReferenceMixture())
    with pytest.raises(ValueError, match="mixture_coef"):
        ReferenceMixture(mixture_coef=1.5)
    with pytest.raises(TypeError, match="reference_engine must implement"):
        ReferenceSamples("sft")  # type: ignore[arg-type]
    one = LocalEngine()
    with pytest.raises(ValueError, match="make a second one"):
        GroupRunner(one, ReferenceSamples(one))
    with pytest.raises(ValueError, match="two engines of one kind"):
        GroupRunner(one, ReferenceSamples(VLLMPool(1)))
    with pytest.raises(ValueError, match="sleep_level=1"):
        ReferenceSamples(VLLMPool(1, colocate=True))
    runner = world.runner(ReferenceSamples(LocalEngine(), count=2))
    with pytest.raises(ValueError, match="raise group_size"):
        runner.generate(prompts(), SamplingSpec(group_size=2), iteration=0)
    runner.close()
