"""Optimizer steps of each module on the device and on the CPU, in float32, from the same weights and data."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.gpu_check.check import Figure, Setting, check
from benchmarks.gpu_check.compare import distance
from benchmarks.gpu_check.models import tiny_model

BOUND = 1e-3
"""Distance of what the weights have moved, relative in norm; TF32 is off."""


@dataclass
class Run:
    """What a run leaves behind."""

    start: Tensor
    end: Tensor
    metrics: dict[str, float]
    tokens: list[list[int]]
    """Of the samples of the last iteration; none without rollouts."""

    @property
    def moved(self) -> Tensor:
        """What was added to the weights."""
        return self.end - self.start


def train(setting: Setting, model: Path, make: Callable[[str], Any], kind: str, **arguments: Any) -> Run:
    """Four steps of supervised or preference training, or two iterations of two updates with ``kind="prompts"``.

    Half of them with small shapes.
    """
    from benchmarks.gpu_check.runs import Answers, FirstWeights, Prompts, digits, trainer, weights_of
    from rlhfkit import RolloutCallback, SamplingSpec

    module, rollouts, options = make(str(model)), None, arguments.pop("rollouts", {})
    arguments = {"accumulate_grad_batches": 2, "max_epochs": setting.size(2, 1), "gradient_clip_val": 1.0} | arguments
    if kind == "prompts":
        rollouts = RolloutCallback(digits, sampling=SamplingSpec(group_size=4, max_new_tokens=8), **options)
        arguments["callbacks"] = [rollouts]
    run, keep = trainer(setting, model, **arguments), FirstWeights()
    run.callbacks.append(keep)
    run.fit(module, Prompts() if kind == "prompts" else Answers(kind))
    metrics = {name: float(value) for name, value in run.callback_metrics.items() if not name.startswith("time/")}
    tokens = [] if rollouts is None else [sample.token_ids for sample in rollouts.samples]
    return Run(keep.weights, weights_of(module), metrics, tokens)


def against_cpu(setting: Setting, make: Callable[[str], Any], kind: str, **arguments: Any) -> Iterator[Figure]:
    """The same run on both."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "model")
        here = train(setting, model, make, kind, **arguments)
        there = train(Setting("cpu", setting.quick), model, make, kind, **arguments)
    yield Figure("what the weights have moved", distance(here.moved, there.moved), BOUND)
    if here.tokens:
        differing = sum(one != other for one, other in zip(here.tokens, there.tokens, strict=True))
        yield Figure("samples that differ", differing, 0)
    names = sorted(name for name in there.metrics if name.startswith(("loss", "grad_norm", "policy/", "reward")))
    apart = max(abs(here.metrics[name] - there.metrics[name]) / (1 + abs(there.metrics[name])) for name in names)
    yield Figure(f"{len(names)} metrics", apart, BOUND)


def _sgd(name: str, **arguments: Any) -> Callable[[str], Any]:
    """Make a module with SGD and a learning rate at which the weights visibly move."""

    def make(model: str) -> Any:
        import rlhfkit
        from benchmarks.gpu_check.runs import with_sgd

        return with_sgd(getattr(rlhfkit, name))(model, **{"lr": 0.05} | arguments)

    return make


@check("training/sft", seconds=60)
def sft(setting: Setting) -> Iterator[Figure]:
    """``SFTModule``."""
    yield from against_cpu(setting, _sgd("SFTModule"), "tokens")


@check("training/dpo", seconds=60)
def dpo(setting: Setting) -> Iterator[Figure]:
    """``DPOModule`` with a reference model."""
    yield from against_cpu(setting, _sgd("DPOModule"), "pairs")


@check("training/kto", seconds=60)
def kto(setting: Setting) -> Iterator[Figure]:
    """``KTOModule``."""
    yield from against_cpu(setting, _sgd("KTOModule"), "labels")


@check("training/reward", seconds=60)
def reward(setting: Setting) -> Iterator[Figure]:
    """``RewardModule``."""
    yield from against_cpu(setting, _sgd("RewardModule", head_std=0.1), "pairs")


@check("training/grpo", seconds=90)
def grpo(setting: Setting) -> Iterator[Figure]:
    """``GRPOModule`` with a reference model and samples of ``LocalEngine``."""
    yield from against_cpu(setting, _sgd("GRPOModule", kl_coef=0.05), "prompts")


@check("training/ppo", seconds=90)
def ppo(setting: Setting) -> Iterator[Figure]:
    """``PPOModule`` with a critic and a reference model."""
    yield from against_cpu(setting, _sgd("PPOModule", critic_lr=0.05), "prompts")


@check("training/lora", seconds=60, packages=("peft",))
def lora(setting: Setting) -> Iterator[Figure]:
    """Adapters: supervised, and GRPO whose engine gets merged weights."""
    from rlhfkit import LoRA

    for name, kind in (("SFTModule", "tokens"), ("GRPOModule", "prompts")):
        for figure in against_cpu(setting, _sgd(name, lora=LoRA(rank=4), lr=0.5), kind):
            yield Figure(f"{name}: {figure.case}", figure.value, figure.bound)


@check("training/engine_copies", seconds=90)
def engines_that_copy(setting: Setting) -> Iterator[Figure]:
    """GRPO whose ``LocalEngine`` shares the policy's weights, and one that copies them: the same samples."""
    from rlhfkit import GRPOModule, LocalEngine

    runs = []
    for share in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            model, make = tiny_model(Path(folder) / "model"), partial(GRPOModule, lr=1e-3)
            runs.append(train(setting, model, make, "prompts", rollouts={"engine": LocalEngine(share_weights=share)}))
    yield Figure(
        "samples that differ", sum(one != two for one, two in zip(*(run.tokens for run in runs), strict=True)), 0
    )
    yield Figure("distance of the weights", distance(runs[0].moved, runs[1].moved), BOUND)


@check("training/precisions", seconds=90)
def precisions(setting: Setting) -> Iterator[Figure]:
    """GRPO in ``bf16-true`` and ``bf16-mixed``: the engine's log-probs are those of the trainer, to rounding."""
    from rlhfkit import GRPOModule

    for precision in ("bf16-true", "bf16-mixed"):
        with tempfile.TemporaryDirectory() as folder:
            model = tiny_model(Path(folder) / "model")
            run = train(setting, model, lambda name: GRPOModule(name, lr=1e-4), "prompts", precision=precision)
        yield Figure(f"{precision}: the weights never moved", float(not run.moved.norm() > 0), 0)
        # Of sampled tokens, by two kernels in 8 bits: decoding with a cache, and the packed row.
        mean = run.metrics["rollout_corr/logprob_abs_diff_mean"]
        yield Figure(f"{precision}: log-probs of engine and trainer, mean difference", mean, 0.05, "nats")


@check("training/offload", seconds=90, simulated=False)
def states_leave_the_device(setting: Setting) -> Iterator[Figure]:
    """Training states in CPU memory while the engine generates: the same weights, bit for bit."""
    from rlhfkit import GRPOModule

    runs = []
    for offload in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            model, make = tiny_model(Path(folder) / "model"), partial(GRPOModule, lr=1e-3)
            runs.append(train(setting, model, make, "prompts", rollouts={"offload_training": offload}))
    yield Figure("largest difference of the weights", float((runs[0].end - runs[1].end).abs().max()), 0)
    for name, value in sorted(runs[1].metrics.items()):
        if name.startswith("memory/"):
            yield Figure(name, value)
