"""The registry of parts: what each is tried out with, and a run of it.

Every part of ``rlhfkit/modules/parts`` has a :class:`Case` here, for which ``test_every_part.py`` checks the same: its
formula against an independent computation, equal numbers on one rank and two, a resumed run, and plain values.
"""

import importlib
import inspect
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from plain_sgd import PlainSGD
from rl_runs import PlainGRPO, digits, setup_run
from tiny_models import tiny_mixture
from torch import Tensor

import rlhfkit.modules.parts
from modules.on_policy.ppo_cases import PlainPPO
from rlhfkit import (
    Experience,
    OnlineDPOModule,
    OnPolicyDistillationModule,
    PolicyOutput,
    Prompt,
    RolloutCallback,
    Sample,
    SamplingSpec,
    SFTDataModule,
)
from rlhfkit.modules.parts.advantages import (
    AdvantagesBy,
    GroupAdvantages,
    TokenCredit,
    WhitenAdvantages,
)
from rlhfkit.modules.parts.correction import Correction, EngineMismatch, NoCorrection
from rlhfkit.modules.parts.critic import GAE, Critic, CriticWarmup, Returns, ValueLoss
from rlhfkit.modules.parts.entropy import EntropyBonus, EntropyTarget
from rlhfkit.modules.parts.kl_control import KLTarget, StopEarly
from rlhfkit.modules.parts.kl_penalty import KLInReward, KLPenalty, Reference
from rlhfkit.modules.parts.moving_reference import MovingReference
from rlhfkit.modules.parts.old_policy import LogLinear, OldLogprobs
from rlhfkit.modules.parts.pairs import Pairs
from rlhfkit.modules.parts.pretraining_loss import PretrainingLoss
from rlhfkit.modules.parts.reward_model import RewardModel
from rlhfkit.modules.parts.rewards import ClipRewards, MaskTruncated, MissingEndPenalty, NormalizeRewards, StopProperly
from rlhfkit.modules.parts.routers import RouterReplay
from rlhfkit.modules.parts.teacher import DivergenceLoss, ScaledAdvantages, Teacher, TeacherAdvantages
from rlhfkit.modules.parts.token_filters import OffPolicyMask, Rejection, TopEntropy
from rlhfkit.parts import Part

from .credit_cases import (
    Half,
    advantages_by_formula,
    credit_formula,
    divergence_formula,
    scaled_formula,
    teacher_folder,
    warmup_formula,
)
from .kl_control_cases import (
    kl_in_reward_formula,
    kl_penalty_formula,
    kl_target_formula,
    stop_early_formula,
)
from .old_policy_cases import mismatch_formula, old_logprobs_formula
from .reward_cases import (
    clip_formula,
    mask_formula,
    missing_end_formula,
    normalize_formula,
    reward_folder,
    reward_model_formula,
    stop_properly_formula,
)

LR = 0.05


class Distilled(PlainSGD, OnPolicyDistillationModule):
    """On-policy distillation with SGD."""

    def __init__(self, model: str, teacher: str | None = None, **kwargs: Any) -> None:
        super().__init__(model, teacher or teacher_folder(), **kwargs)


class Judged(PlainSGD, OnlineDPOModule):
    """Online DPO with SGD."""


RATES: dict[Any, dict[str, Any]] = {PlainPPO: {"critic_lr": 0.02}}
"""Of a critic that is not the part which is looked at."""


@dataclass(frozen=True)
class Case:
    """A part, what else its module is given, and a check of its formula."""

    make: Callable[[], Part]
    formula: Callable[[Path], None] | str
    """Checks its numbers; or the file whose tests do, in a run beside a loop by hand."""
    module: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    """What it logs."""
    model: Callable[[Path], Any] | None = None
    """Makes the policy in a folder; ``None``: that of all other runs."""
    sampling: SamplingSpec = SamplingSpec(group_size=4, max_new_tokens=8)
    kind: Any = PlainGRPO
    """The module that it is a part of."""
    group: Any = None
    """Group function of the rollouts."""
    of_rows: tuple[str, ...] = ()
    """Metrics over all tokens of packed rows, in which a prompt that samples share stands once: not the same where
    micro-batches have other samples."""
    trainer: dict[str, Any] = field(default_factory=dict)
    always: bool = False
    """Whether the module makes one itself."""
    text: Callable[[int], SFTDataModule] | None = None
    """Makes the text that it learns from beside samples, for a number of ranks."""


async def distant_engine(prompt: Prompt, size: int, sampler: Any) -> list[Sample]:
    """Samples of an engine whose log-probs of every third token differ from the trainer's by 0.3 nats."""
    samples: list[Sample] = await sampler.sample(prompt, size)
    for sample in samples:
        pairs = zip(sample.token_ids.tolist(), sample.logprobs.tolist(), strict=True)
        sample.logprobs = [logprob - 0.3 * (token % 3 == 0) for token, logprob in pairs]
    return samples


class Steps(L.Callback):
    """Calls a function after each micro-batch, and keeps how many optimizer steps there were by then."""

    def __init__(self, function: Callable[[L.Trainer, Any], None]) -> None:
        self.function = function

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.function(trainer, pl_module)


def fit(folder: Path, case: Case, *, parts: list[Part] | None = None, ckpt: Path | None = None, **trainer: Any) -> Any:
    """Train with SGD, two iterations of two updates; returns the Trainer and the module."""
    torch.manual_seed(0)
    world = trainer.get("devices", 1)
    if case.model is not None:
        folder = make_model(folder, case.model)
    text = {} if case.text is None or parts == [] else {"pretraining_data": case.text(world)}
    given = [case.make()] if parts is None else parts
    rates = {} if any(isinstance(part, Critic) for part in given) else RATES.get(case.kind, {})
    made, module, data, _ = setup_run(
        folder,
        module=case.kind,
        module_arguments={"lr": LR, **rates, "parts": given} | case.module,
        data_arguments={"micro_batch_size": 8 // world} | text | case.data,
        rollouts=RolloutCallback(digits, sampling=case.sampling, group=case.group),
        **case.trainer | trainer,
    )
    made.fit(module, data, ckpt_path=ckpt)
    return made, module


def make_model(folder: Path, model: Callable[[Path], Any]) -> Path:
    """A folder in ``folder`` with the model of a case."""
    own = folder / model.__name__
    if not (own / "model").exists():
        model(own / "model")
    return own


def numbers(trainer: L.Trainer, module: Any) -> dict[str, float]:
    """Logged values, but for times, and the sums of the weights."""
    kept = {name: float(value) for name, value in trainer.callback_metrics.items() if "time/" not in name}
    sums = {name: float(value.double().abs().sum()) for name, value in module.policy.state_dict().items()}
    return kept | sums


def on_ranks(folder: Path, world: int, data: str) -> dict[str, Any]:
    """What a rank runs: every case."""
    found = {}
    home = Path(data) / f"rank{os.environ.get('LOCAL_RANK', '')} of {world}"  # ranks must not write the same files
    teacher_folder()
    for model in {case.model for case in CASES.values() if case.model is not None}:
        make_model(home, model)  # before ranks know of one another: then Transformers saves models on rank 0 only
    for name, case in CASES.items():
        strategy = "ddp" if world > 1 else "auto"
        arguments = {"strategy": strategy, "devices": world, "use_distributed_sampler": False}
        found[name] = numbers(*fit(home, case, **arguments))
    return found


def batch_of(tokens: int = 5) -> Experience:
    """Two sequences, of which the second has fewer tokens; counts of an optimizer step with another micro-batch."""
    from dataclasses import replace

    from rlhfkit.modules.on_policy.forward_passes import two_tokens

    one = two_tokens()
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(2, tokens, dtype=torch.bool)
    mask[1, 3:] = False
    values = torch.randn(2, tokens, generator=generator)
    return replace(
        one,
        input_ids=torch.zeros(2, tokens + 1, dtype=torch.int64),
        attention_mask=torch.ones(2, tokens + 1, dtype=torch.bool),
        action_mask=mask,
        rollout_logprobs=values - 2.0,
        versions=torch.zeros(2, tokens, dtype=torch.int64),
        rewards=torch.tensor([1.0, 0.0]),
        group=torch.zeros(2, dtype=torch.int64),
        sample_index=torch.arange(2),
        truncated=torch.tensor([False, True]),
        update=torch.zeros(2, dtype=torch.int64),
        advantages=torch.tensor([1.0, -1.0])[:, None].expand(2, tokens),
        step_tokens=16.0,
        step_micro_batches=2,
    )


def output_of(batch: Experience) -> PolicyOutput:
    """Log-probs and entropies, NaN where no token is trained on."""
    generator = torch.Generator().manual_seed(1)
    shape = batch.action_mask.shape
    logprobs = -torch.rand(shape, generator=generator)
    entropy = torch.rand(shape, generator=generator).masked_fill(~batch.action_mask, torch.nan)
    return PolicyOutput(logprobs.requires_grad_(), entropy.requires_grad_())


# ---------------------------------------------------------------------- formulas


def attached(part: Part) -> Part:
    """The part in a module that is not loaded."""
    from rlhfkit import GRPOModule

    GRPOModule("no/model", parts=[part])
    return part


def entropy_bonus_formula(folder: Path) -> None:
    """Minus ``coef`` times the mean entropy of the step's 16 tokens, as this micro-batch's share of two."""
    batch = batch_of()
    out = output_of(batch)
    loss = attached(EntropyBonus(0.25)).term(batch, out, out.logprobs.detach()).loss
    entropy: Tensor = out.entropy  # type: ignore[assignment]
    total = sum(entropy.detach()[batch.action_mask].tolist())
    torch.testing.assert_close(loss.item(), -0.25 * total / 16 * 2)
    loss.backward()
    gradient: Tensor = entropy.grad  # type: ignore[assignment]
    torch.testing.assert_close(gradient, -0.25 * 2 / 16 * batch.action_mask.float())


def entropy_target_formula(folder: Path) -> None:
    """The weight rises below the target, falls above it, and acts below only: the rule of section 4 by hand."""

    def weights(target: float, place: str) -> tuple[list[float], list[float]]:
        entropies: dict[int, float] = {}
        applied: list[float] = []
        part = EntropyTarget(target, step=0.3)

        class Watch(Part):
            outputs = ("entropy",)

            def observe(self, batch: Any, out: Any, old: Any) -> dict[str, Any]:
                step = self.module.global_step
                if step not in entropies:
                    applied.append(part.applied)
                mean = float((out.entropy.detach() * batch.action_mask).sum()) / batch.step_tokens
                entropies[step] = entropies.get(step, 0.0) + mean
                return {}

        fit(folder / place, Case(lambda: part, entropy_target_formula), parts=[part, Watch()], max_epochs=3)
        return list(entropies.values()), applied

    entropies, applied = weights(100.0, "below")
    torch.testing.assert_close(applied, [0.0, 0.3, 0.6, 0.9, 1.2, 1.5])
    target = sorted(entropies)[2] + 1e-4  # crossed within the run
    entropies, applied = weights(target, "across")
    coefficient, expected = 0.0, [0.0]
    for entropy in entropies:
        coefficient = max(0.0, coefficient + (0.3 if entropy < target else -0.3))
        expected.append(coefficient if entropy <= target else 0.0)
    assert len({*expected}) > 2
    torch.testing.assert_close(applied, expected[:-1])


def short_texts(world: int) -> SFTDataModule:
    """Texts of different lengths, eight in an update."""
    rows = [{"text": "ab " * (1 + row % 4) + str(row)} for row in range(20)]
    return SFTDataModule(rows, text="text", micro_batch_size=4 // world)


UNSCALED = {"advantage_scale": "none"}
MISMATCHES = tuple(
    f"rollout_corr/{name}"
    for name in ("logprob_abs_diff_mean", "logprob_abs_diff_max", "k3_kl", "untruncated_eff_sample_size")
)
ENDS = SamplingSpec(group_size=4, max_new_tokens=8, stop=tuple("aeiouAEIOU"))  # of some answers, others are cut off
CASES: dict[str, Case] = {
    "RewardModel": Case(
        lambda: RewardModel({"one": reward_folder(), "two": reward_folder()}, {"two": -0.5}),
        reward_model_formula,
        UNSCALED,
        metrics=("rollout/reward_model/one", "rollout/reward_model/two"),
    ),
    "StopProperly": Case(lambda: StopProperly(0.25), stop_properly_formula, UNSCALED, sampling=ENDS),
    "MissingEndPenalty": Case(lambda: MissingEndPenalty(0.5), missing_end_formula, UNSCALED, sampling=ENDS),
    "NormalizeRewards": Case(NormalizeRewards, normalize_formula, UNSCALED),
    "ClipRewards": Case(lambda: ClipRewards(0.1), clip_formula, UNSCALED),
    "MaskTruncated": Case(MaskTruncated, mask_formula, sampling=ENDS),
    "TopEntropy": Case(lambda: TopEntropy(0.5), "test_token_filter.py", metrics=("policy/kept_fraction",)),
    "OffPolicyMask": Case(lambda: OffPolicyMask(1e-4), "test_token_filter.py", metrics=("policy/kept_fraction",)),
    "Rejection": Case(
        lambda: Rejection("token", divergence="k2", high=0.01),
        "test_token_filter.py",
        metrics=("policy/kept_fraction",),
        group=distant_engine,
    ),
    "Correction": Case(lambda: Correction({"high": 0.9}), "test_token_filter.py"),
    "NoCorrection": Case(NoCorrection, "test_base.py", always=True),
    "EngineMismatch": Case(EngineMismatch, mismatch_formula, metrics=MISMATCHES, always=True),
    "GroupAdvantages": Case(lambda: GroupAdvantages("none"), "test_base.py"),
    "AdvantagesBy": Case(lambda: AdvantagesBy(Half, {"factor": 0.25}), advantages_by_formula),
    "TokenCredit": Case(lambda: TokenCredit(0.5), credit_formula),
    "WhitenAdvantages": Case(WhitenAdvantages, "test_ppo.py", UNSCALED),
    "Teacher": Case(lambda: Teacher(teacher_folder()), "test_distillation.py", always=True),
    "TeacherAdvantages": Case(
        lambda: TeacherAdvantages(0.5, gamma=0.5),
        "test_distillation.py",
        metrics=("distillation/reverse_kl",),
        kind=Distilled,
    ),
    "DivergenceLoss": Case(
        lambda: DivergenceLoss("reverse_kl", 0.5, top_k=4),
        divergence_formula,
        metrics=("distillation/divergence",),
        kind=Distilled,
    ),
    "ScaledAdvantages": Case(lambda: ScaledAdvantages(0.5), scaled_formula, UNSCALED),
    "Critic": Case(
        lambda: Critic(lr=0.02, normalize=True, bootstrap_truncated=True), "test_ppo.py", sampling=ENDS, kind=PlainPPO
    ),
    "GAE": Case(lambda: GAE(0.9, 0.5), "test_ppo.py", kind=PlainPPO),
    "Returns": Case(lambda: Returns(0.9, 0.5), "test_ppo.py", kind=PlainPPO),
    "ValueLoss": Case(lambda: ValueLoss(0.5, clip=1e-3), "test_ppo.py", kind=PlainPPO),
    "CriticWarmup": Case(lambda: CriticWarmup(2), warmup_formula, kind=PlainPPO),
    "Pairs": Case(lambda: Pairs(truncated=False), "test_online_dpo.py", kind=Judged, sampling=ENDS),
    "OldLogprobs": Case(
        OldLogprobs,
        old_logprobs_formula,
        data={"epochs_per_iteration": 2},
        trainer={"accumulate_grad_batches": 4},  # an epoch is one update
        always=True,
    ),
    "LogLinear": Case(LogLinear, "test_token_filter.py"),
    "RouterReplay": Case(
        RouterReplay,
        "test_router_replay.py",
        metrics=("policy/rerouted_fraction",),
        model=tiny_mixture,
        of_rows=("policy/rerouted_fraction",),
    ),
    "EntropyBonus": Case(lambda: EntropyBonus(0.1), entropy_bonus_formula),
    "Reference": Case(lambda: Reference(None), "test_ppo.py", {"kl_coef": 0.1}, always=True),
    "KLPenalty": Case(
        lambda: KLPenalty(0.5, estimator="k2", clamp=0.1, importance_weight=True),
        kl_penalty_formula,
        metrics=("policy/ref_kl",),
    ),
    "KLInReward": Case(
        lambda: KLInReward(0.5, place="sequence", estimator="k3"),
        kl_in_reward_formula,
        UNSCALED,
        metrics=("policy/ref_kl",),
    ),
    "KLTarget": Case(
        lambda: KLTarget(1e-3, horizon=100), kl_target_formula, {"kl_coef": 0.1}, metrics=("policy/kl_coef",)
    ),
    "StopEarly": Case(
        lambda: StopEarly(1e-6),
        stop_early_formula,
        metrics=("policy/kl_early_stopped",),
        trainer={"accumulate_grad_batches": 1, "max_epochs": 1},  # of four updates it stops after the first
    ),
    "MovingReference": Case(lambda: MovingReference(2, alpha=0.25), "../test_moving_reference.py", {"kl_coef": 5.0}),
    "PretrainingLoss": Case(lambda: PretrainingLoss(0.3), "test_ppo.py", metrics=("ptx/loss",), text=short_texts),
    "EntropyTarget": Case(
        lambda: EntropyTarget(100.0, step=0.02), entropy_target_formula, metrics=("policy/entropy_coef",)
    ),
}


def all_parts() -> dict[str, type[Part]]:
    """The classes of ``rlhfkit/modules/parts``, without those that others of the package derive from; tests may."""
    found: dict[str, type[Part]] = {}
    for file in pkgutil.iter_modules(rlhfkit.modules.parts.__path__):
        home = importlib.import_module(f"rlhfkit.modules.parts.{file.name}")
        for name, kind in vars(home).items():
            if (
                inspect.isclass(kind)
                and issubclass(kind, Part)
                and kind.__module__ == home.__name__
                and not any(one.__module__.startswith("rlhfkit.") for one in kind.__subclasses__())
            ):
                found[name] = kind
    return found
