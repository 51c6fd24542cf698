"""What one rank runs for the fp16 tests: one loss over two engines, each with a loss scale of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_optimizer_state
from rl_runs import SaveAt
from torch import Tensor

from rlhfkit.strategies import RLHFDeepSpeedStrategy
from strategies import toys
from strategies.parity_cases import RANK, RANKS

UPDATES = 4
CASES = {
    "far apart": (14, 3),
    "the policy overflows": (19, 8),
    "the critic overflows": (10, 18),
}
"""Powers of two of the first loss scales of policy and critic."""


class Summed(toys.Toy):
    """The weights stay; the optimizer adds up the gradients of all updates."""

    def configure_optimizers(self) -> Any:
        children = [self.policy, self.critic]
        rate = 0.0 if self.hparams.optimizer == "sum" else 0.05
        return torch.optim.SGD([{"params": child.parameters()} for child in children], lr=rate, momentum=1.0)


class Scales(toys.pl.Callback):
    """Loss scales, and the number of skipped updates, after each update."""

    def __init__(self) -> None:
        self.history: list[tuple[float, float]] = []
        self.rescaled: list[float] = []
        self.buffers: dict[str, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index % 2 and hasattr(trainer.strategy, "engines") and trainer.precision == "16-true":
            metrics = trainer.callback_metrics
            self.history.append((float(metrics["loss_scale/policy"]), float(metrics["loss_scale/critic"])))
            self.rescaled.append(float(metrics["rescaled_updates"]))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        engines = getattr(trainer.strategy, "engines", None)
        if engines is not None:
            self.buffers = {name: dict(momentum_of(engine)) for name, engine in engines.items()}
            return
        states = module.optimizers().optimizer.state  # under plain DDP
        for name, child in module.named_children():
            named = child.named_parameters()
            self.buffers[name] = {key: states[p]["momentum_buffer"].clone() for key, p in named if p in states}


def momentum_of(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """The full momentum of every parameter, which no loss scale multiplies. A collective."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    if engine.zero_optimization():
        for parameter, name in names.items():
            yield name, safe_get_full_optimizer_state(parameter, "momentum_buffer")
    else:
        for own, main in zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True):
            for half, full in zip(own, main, strict=True):
                yield names[half], engine.basic_optimizer.state[full].get("momentum_buffer", torch.zeros_like(full))


def run(stage: int, model: str, powers: tuple[int, int], callbacks: Any, path: Any = None, **options: Any) -> Any:
    """Windows of two micro-batches; the scales grow after every second update without an overflow."""
    strategy = RLHFDeepSpeedStrategy(
        stage=stage,
        initial_scale_power=powers[0],
        loss_scale_window=2,
        hysteresis=1,
        engine_configs={"critic": {"fp16": {"initial_scale_power": powers[1]}}},
    )
    module = Summed(model, critic=True, **options)
    trainer = toys.trainer(strategy, RANKS, precision="16-true", callbacks=callbacks, accumulate_grad_batches=2)
    trainer.fit(module, toys.ShareLoader(toys.global_batches(2 * UPDATES), RANK, RANKS), ckpt_path=path)
    return module, strategy


def reference(model: str) -> list[dict[str, dict[str, Tensor]]]:
    """The gradients of each update in float64, of weights that are rounded to fp16 once."""
    module = Summed(model, critic=True)
    module.configure_model()
    children = {"policy": module.policy.half().double(), "critic": module.critic.half().double()}
    # Rotary frequencies are not rounded in training either.
    children["policy"].model.rotary_emb = toys.LlamaForCausalLM.from_pretrained(model).model.rotary_emb
    found = []
    for first, second in zip(*[iter(toys.global_batches(2 * UPDATES))] * 2, strict=True):
        for tokens in (first, second):
            logits = children["policy"](input_ids=tokens).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss = loss + 0.5 * (children["critic"](tokens) - tokens / toys.VOCABULARY).square().mean()
            (loss / 2).backward()
        found.append({name: {key: p.grad for key, p in c.named_parameters()} for name, c in children.items()})
        for child in children.values():
            child.zero_grad(set_to_none=True)
    return found


def distance(buffers: dict[str, Tensor], gradients: list[dict[str, Tensor]]) -> float:
    """Norm of the difference of summed gradients, in units of their norm."""
    expected = {key: sum(g[key] for g in gradients) for key in gradients[0]}
    squares = [
        ((buffers[key].double() - value).square().sum(), value.square().sum()) for key, value in expected.items()
    ]
    return float((sum(a for a, _ in squares) / sum(b for _, b in squares)).sqrt())


def everything(folder: Path, model: str) -> dict[str, Any]:
    """All cases in one launch."""
    # torch computes in fp16 on every CPU, slowly; DeepSpeed refuses CPUs without instructions for it.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    exact, report = reference(model), {}
    for stage in range(4):
        overflow = "the critic overflows" if stage % 2 else "the policy overflows"
        for case in ("far apart", overflow):
            powers, scales = CASES[case], Scales()
            _, strategy = run(stage, model, powers, [scales], optimizer="sum")
            stepped = [now == before for before, now in zip([0, *scales.rescaled], scales.rescaled, strict=False)]
            gradients = [gradient for gradient, took in zip(exact, stepped, strict=True) if took]
            report[f"{case}, stage {stage}"] = {
                "scales": scales.history,
                "stepped": stepped,
                "skipped": strategy.skipped_updates,
                "distance": {n: distance(b, [g[n] for g in gradients]) for n, b in scales.buffers.items()},
            }
        report[f"resume, stage {stage}"] = resume(folder / f"{stage}.ckpt", stage, model)
    return report


def resume(path: Path, stage: int, model: str) -> dict[str, Any]:
    """A run that is stopped after its second update, when a scale has fallen, against a straight one."""
    straight, again = Scales(), Scales()
    first, _ = run(stage, model, (19, 8), [straight, SaveAt(path, 4)])
    second, _ = run(stage, model, (4, 4), [again], path=path)
    return {
        "losses": first.losses[4:] == second.losses,
        "scales": straight.history[2:] == again.history,
        "first": again.history[:1],
        "momentum": all(
            torch.equal(straight.buffers[name][key], value)
            for name, values in again.buffers.items()
            for key, value in values.items()
        ),
    }
