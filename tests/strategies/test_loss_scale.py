"""One loss over two fp16 engines: the gradients of both are right whatever their scales, and both step or neither.

Covers strategies/deepspeed/precision.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rl_runs import SaveAt
from torch import Tensor

from rlhfkit.strategies import RLHFDeepSpeedStrategy
from strategies import toys
from strategies.parity_cases import Spy, fit
from strategies.ranks import on_two_ranks

UPDATES = 4
Gradients = dict[str, dict[str, Tensor]]
"""Of each child by name."""


class Summed(toys.Toy):
    """The weights stay; the optimizer adds up the gradients of all updates."""

    def configure_optimizers(self) -> Any:
        children = [self.policy, self.critic]
        rate = 0.0 if self.hparams.optimizer == "sum" else 0.05
        return torch.optim.SGD([{"params": child.parameters()} for child in children], lr=rate, momentum=1.0)


class Scales(toys.pl.Callback):
    """Loss scales and the number of skipped updates after each update, and the momentum in the end."""

    def __init__(self) -> None:
        self.history: list[tuple[float, float]] = []
        self.rescaled: list[float] = []
        self.buffers: Gradients = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index % 2:
            metrics = trainer.callback_metrics
            self.history.append((float(metrics["loss_scale/policy"]), float(metrics["loss_scale/critic"])))
            self.rescaled.append(float(metrics["rescaled_updates"]))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.buffers = {name: dict(momentum_of(engine)) for name, engine in trainer.strategy.engines.items()}


def momentum_of(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """The full momentum of every parameter, which no loss scale multiplies. A collective."""
    from deepspeed.utils import safe_get_full_optimizer_state

    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    if engine.zero_optimization():
        for parameter, name in names.items():
            yield name, safe_get_full_optimizer_state(parameter, "momentum_buffer")
    else:
        for own, main in zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True):
            for half, full in zip(own, main, strict=True):
                yield names[half], engine.basic_optimizer.state[full].get("momentum_buffer", torch.zeros_like(full))


def run(stage: int, model: str, powers: tuple[int, int], callbacks: Any, path: Any = None, **options: Any) -> Spy:
    """Windows of two micro-batches; the scales grow after every second update without an overflow."""
    strategy = RLHFDeepSpeedStrategy(
        stage=stage,
        initial_scale_power=powers[0],
        loss_scale_window=2,
        hysteresis=1,
        engine_configs={"critic": {"fp16": {"initial_scale_power": powers[1]}}},
    )
    trainer = {"precision": "16-true", "callbacks": callbacks, "accumulate_grad_batches": 2, "resume": path}
    spy = fit(Summed(model, critic=True, **options), strategy, toys.global_batches(2 * UPDATES), **trainer)
    assert strategy.skipped_updates == 0, "an overflow is no error"
    return spy


def exact_gradients(model: str) -> list[Gradients]:
    """Of each update in float64, of weights that are rounded to fp16 once."""
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


@on_two_ranks
def test_scales_move_alone_and_gradients_of_both_engines_are_those_of_float64_whatever_they_are(
    folder: Path, model: str
) -> None:
    """Runs whose loss scales of policy and critic begin with such powers of two; the gradients are those of float64.

    Of the updates that were not skipped, in both engines. fp16 has 11 bits, 5e-4, and the model six layers; an update
    that only one engine takes, or whose scale is wrong by a factor of 2, is an error of at least 0.08.
    """
    toys.compute_in_fp16()
    exact = exact_gradients(model)
    for stage in range(4):
        overflows = stage % 2  # the engine that does
        for powers in ((14, 3), (10, 18) if overflows else (19, 8)):
            scales = Scales()
            run(stage, model, powers, [scales], optimizer="sum")
            stepped = [now == before for before, now in zip([0, *scales.rescaled], scales.rescaled, strict=False)]
            gradients = [gradient for gradient, took in zip(exact, stepped, strict=True) if took]
            what = f"stage {stage}, {powers}: {scales.history}, {stepped}"
            for name, buffers in scales.buffers.items():
                apart = distance(buffers, [gradient[name] for gradient in gradients])
                assert apart < 3e-3, f"{what}: the gradients of {name} are {apart} off"
            if powers == (14, 3):  # nothing overflows: the scales grow
                assert stepped == [True] * UPDATES, what
                assert scales.history == [(2.0**p, 2.0**c) for p, c in [(14, 3), (14, 3), (15, 4), (15, 4)]], what
            else:  # an overflow lowers the scale of its engine only
                assert stepped[:2] == [False, False], what
                first, second = scales.history[:2]
                assert second[overflows] == first[overflows] / 2, what
                assert first[1 - overflows] == second[1 - overflows] == 2.0 ** powers[1 - overflows], what


@on_two_ranks
def test_a_resumed_run_has_the_scales_and_the_state_of_the_straight_one_bitwise(folder: Path, model: str) -> None:
    """A run that is stopped after its second update, when a scale has fallen, has all that the straight one has."""
    toys.compute_in_fp16()
    for stage in range(4):
        straight, again, path = Scales(), Scales(), folder / f"{stage}.ckpt"
        first = run(stage, model, (19, 8), [straight, SaveAt(path, 4)])
        second = run(stage, model, (4, 4), [again], path=path)
        assert again.history[0][0] > 2.0**4, "not the scale with which the resumed run was configured"
        assert (second.losses, again.history) == (first.losses[4:], straight.history[2:]), stage
        for name, values in again.buffers.items():
            for key, value in values.items():
                assert torch.equal(straight.buffers[name][key], value), f"stage {stage}: momentum of {name}.{key}"
