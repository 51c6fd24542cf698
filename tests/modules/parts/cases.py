"""What each part is tried out with, and a run of it.

Every part of ``rlhfkit/modules/parts`` has a :class:`Case` here, for which ``test_every_part.py`` checks the same: its
formula against an independent computation, equal numbers on one rank and two, a resumed run, and plain values.
"""

import copy
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rl_runs import PlainGRPO, digits, setup_run
from torch import Tensor

import rlhfkit.modules.parts
from modules.on_policy.ppo_cases import PlainPPO
from rlhfkit import Experience, GRPOModule, PolicyOutput, RolloutCallback, SamplingSpec, SFTDataModule
from rlhfkit.modules.parts import Critic
from rlhfkit.parts import Part

LR = 0.05
UNSCALED = {"advantage_scale": "none"}
ENDS = SamplingSpec(group_size=4, max_new_tokens=8, stop=tuple("aeiouAEIOU"))  # of some answers, others are cut off


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


CASES: dict[str, Case] = {}


def case(make: Callable[[], Part], name: str | None = None, **more: Any) -> Callable[[Any], Any]:
    """Decorates the formula of a part; or is given the file which has it. ``more``: of a :class:`Case`."""

    def add(formula: Any) -> Any:
        CASES[name or getattr(make, "func", make).__name__] = Case(make, formula, **more)
        return formula

    return add


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


def output_of(batch: Experience) -> PolicyOutput:
    """Log-probs and entropies, NaN where no token is trained on."""
    generator = torch.Generator().manual_seed(1)
    shape = batch.action_mask.shape
    logprobs = -torch.rand(shape, generator=generator)
    entropy = torch.rand(shape, generator=generator).masked_fill(~batch.action_mask, torch.nan)
    return PolicyOutput(logprobs.requires_grad_(), entropy.requires_grad_())


def attached(part: Part, **module: Any) -> Any:
    """The part in a module that is not loaded."""
    GRPOModule("no/model", parts=[part], **module)
    return part


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0), *(tensor.detach().flatten() for tensor in tensors)])


class Watch(L.Callback):
    """Before each update and in the end: policy, its moments and the critic; and the samples that the update is for."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Tensor, Tensor, list[Any]]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        number, inside = divmod(batch_idx, trainer.accumulate_grad_batches)
        if not inside:
            rollouts = trainer.callbacks[0]
            rows = (rollouts.experience.update == number).nonzero()[:, 0].tolist()
            self.keep(trainer, pl_module, [rollouts.samples[row] for row in rows])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.keep(trainer, pl_module, [])

    def keep(self, trainer: Any, pl_module: Any, samples: list[Any]) -> None:
        policy, state = copy.deepcopy(pl_module.policy), trainer.optimizers[0].state
        moments = flat(state[one]["exp_avg"] for one in pl_module.policy.parameters() if one in state)
        self.seen.append((policy, moments, flat(pl_module.critic.parameters()), samples))


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
