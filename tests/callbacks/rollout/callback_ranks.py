"""Functions that ranks run for the tests of rollouts on two ranks: several short fits in one process."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rank_store_ranks import raised
from rl_runs import (
    RANK,
    PlainGRPO,
    SaveAt,
    SharedEngine,
    digits,
    on_all_ranks,
    samples_of_all_ranks,
    setup_run,
    weights,
)

from rlhfkit import DynamicSampling, LocalEngine, ReplayBuffer, RolloutCallback, Sample, SamplingSpec
from rlhfkit.distributed import gather_objects
from rlhfkit.modules.parts import RewardModel
from rlhfkit.rollout.weight_sync import source


class Rows(L.Callback):
    """Keeps which samples each micro-batch had."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[int, int]]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append(list(zip(batch.group.tolist(), batch.sample_index.tolist(), strict=True)))


class Dying(LocalEngine):
    """On rank 1 the engine dies when it has read one tensor."""

    def load(self, weights: Any, version: int) -> None:
        if RANK != 1:
            return super().load(weights, version)
        next(iter(weights))
        raise ConnectionError("the engine died")


def prepare(folder: Path, strategy: str, **arguments: Any) -> Any:
    """A run of ``rl_runs`` on two ranks."""
    given = on_all_ranks(strategy) | {"data_arguments": {"micro_batch_size": 4}} | arguments
    return setup_run(folder / f"rank{RANK}", **given)  # ranks must not write the same model


def failure(folder: Path, strategy: str, **arguments: Any) -> str:
    """What fitting raises."""
    trainer, module, data, _ = prepare(folder, strategy, **arguments)
    return raised(lambda: trainer.fit(module, data))[0]


def seldom(samples: Sequence[Sample]) -> list[float]:
    """Groups of every other prompt all get 0."""
    return [reward * (one.prompt.index % 2) for one, reward in zip(samples, digits(samples), strict=True)]


def resumed(folder: Path, strategy: str) -> dict[str, Any] | str:
    """A straight run of 3 iterations of 4 batches, 2 an update, and one resumed from within the second."""
    path = folder / f"{strategy}.ckpt"
    straight, rest = Rows(), Rows()

    def run(*callbacks: L.Callback, resume: str | None = None) -> Any:
        sampling, buffer = SamplingSpec(group_size=4, max_new_tokens=8), ReplayBuffer()
        rollouts = RolloutCallback(seldom, sampling=sampling, parts=[buffer])
        trainer, module, data, _ = prepare(
            folder, strategy, module=PlainGRPO, rollouts=rollouts, callbacks=callbacks, max_epochs=3
        )
        trainer.fit(module, data, ckpt_path=resume)
        return trainer, module

    expected = weights(run(straight, SaveAt(path, batch=6))[1])
    try:
        trainer, module = run(rest, resume=str(path))
    except ValueError as error:
        return str(error)
    return {
        "same rows": rest.rows == straight.rows[6:],
        "same weights": all(torch.equal(tensor, expected[name]) for name, tensor in weights(module).items()),
        "batches": len(rest.rows),
        "replayed": float(trainer.callback_metrics["rollout/replayed_fraction"]),
    }


def validation(folder: Path) -> dict[str, Any]:
    """40 prompts in batches of 13, so that the ranks never have equally many; the last batch has one."""
    trainer, module, data, rollouts = prepare(folder, "ddp")
    data.validation_data, data.validation_split, data.validation_batch_size = data.data, "train", 13
    logged = trainer.validate(module, data, verbose=False)[0]["val/reward"]
    own = {sample.prompt.index: sample.text for sample in rollouts.validation_samples}
    texts = {index: text for share in gather_objects(own) for index, text in share.items()}
    return {"logged": logged, "texts": [texts[index] for index in range(40)]}


def above_zero(sample: Sample) -> float:
    """Whether the reward model likes it."""
    return float(sample.reward_parts["model"] > 0)


def selected(folder: Path, strategy: str, engine: LocalEngine) -> list[tuple[int, list[int], float | None]]:
    """What dynamic sampling by a reward model (in ``reward``) among the module's children has chosen."""
    rollouts = RolloutCallback(
        engine=engine,
        sampling=SamplingSpec(group_size=4, max_new_tokens=8),
        parts=[DynamicSampling(by=above_zero)],
    )
    arguments = {"parts": [RewardModel(str(folder / "reward")).plain()]}
    trainer, module, data, _ = prepare(folder, strategy, rollouts=rollouts, module_arguments=arguments, max_epochs=1)
    trainer.fit(module, data)
    return [
        (sample.prompt.index, sample.token_ids.tolist(), sample.reward) for sample in samples_of_all_ranks(rollouts)
    ]


def small_buckets(monkey: Any = source) -> None:
    """A tiny model in many buckets, as a large one has them."""
    original = monkey.ModuleWeights.__iter__

    def in_small_buckets(self: Any) -> Iterator[tuple[str, torch.Tensor]]:
        self.bucket_bytes = 20_000
        return original(self)

    monkey.ModuleWeights.__iter__ = in_small_buckets


def everything(folder: Path) -> dict[str, Any]:
    """All cases of this file."""
    sampling = SamplingSpec(group_size=4, max_new_tokens=4)
    report = {
        "validation": validation(folder),
        "ddp inside": resumed(folder, "ddp"),
        "zero2 inside": resumed(folder, "rlhf_zero2"),
        "selected": selected(folder, "ddp", LocalEngine()),
        "selected sharded": selected(folder, "rlhf_zero3", SharedEngine()),
    }
    small_buckets()
    broken = RolloutCallback(digits, engine=Dying(), sampling=sampling)
    return report | {"engine": failure(folder, "rlhf_zero3", rollouts=broken)}
