"""A rank of a critic that trains elsewhere: a Trainer of its own, whose batches and orders come from a desk.

One epoch is one optimizer step. Everything else (values, checkpoints, exports) is asked for between two of them, except
that the training ranks may save a checkpoint inside a step. All ranks read the same requests in the same order, so
each request may be a collective.
"""

import itertools
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import lightning as L
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from rlhfkit.data.types import Experience

MAX_RETURNED_BYTES = 8e9
"""Weights above this size are not kept when the critic's ranks end."""


class TrainedCritic(Protocol):
    """What a rank asks of the LightningModule that it trains.

    :class:`~rlhfkit.modules.parts.critic_elsewhere.CriticModule` is one.
    """

    critic: nn.Module

    def value_output(self, batch: Experience) -> Tensor:
        """(B, T-1) values; 0 outside the mask."""
        ...

    def take_metrics(self) -> Mapping[str, Tensor]:
        """The metrics of all micro-batches since the last call, over all ranks. A collective."""
        ...

    def save_pretrained(
        self, folder: str | Path, *, child: str = "policy", adapter: bool = False, dtype: torch.dtype | None = None
    ) -> Path:
        """Write a Hugging Face folder. A collective."""
        ...


@dataclass(frozen=True)
class CriticRun:
    """How the ranks of a critic train."""

    make_module: Callable[[], L.LightningModule]
    make_strategy: Callable[[], Strategy] | None
    precision: Any
    gradient_clip_val: float | None
    total_steps: int | None
    """Optimizer steps of the run, for a learning rate that decays; ``None``: not needed."""
    num_nodes: int
    device: str
    checkpoint: str | None
    """Folder that the critic continues from."""
    root: str
    """``default_root_dir`` of the Trainer."""


def run_rank(run: CriticRun, desk: Any, environment: ClusterEnvironment) -> Mapping[str, Tensor] | None:
    """Train until the training ranks have finished; returns the critic's weights on rank 0, if they are not large."""
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]  # of the training rank whose environment this is
    for message in (".*does not have many workers.*", ".*number of training batches.*", ".*eval mode.*"):
        warnings.filterwarnings("ignore", message=message)
    assert run.make_strategy is not None
    module = run.make_module()
    work = CriticWork(cast(TrainedCritic, module), desk, environment.global_rank())
    trainer = L.Trainer(
        accelerator=run.device,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=run.num_nodes,
        strategy=run.make_strategy(),
        plugins=[environment],
        precision=run.precision,
        gradient_clip_val=run.gradient_clip_val,
        max_epochs=run.total_steps or -1,
        callbacks=[work],
        default_root_dir=run.root,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, train_dataloaders=CriticLoader(work), ckpt_path=run.checkpoint)
    return work.weights


class Request(NamedTuple):
    """What all training ranks ask for together, or one micro-batch for each critic rank."""

    number: int
    """That of the messages that it was made of; the answer goes by it."""
    kind: str
    parts: list[Any]
    """Of each training rank; of kind ``"batches"``: of each critic rank, ``None`` where it has no micro-batch."""
    micro_batches: int = 0
    """Of kind ``"batches"``: micro-batches of each critic rank in the optimizer step."""
    scale: float = 1.0
    """Of kind ``"batches"``: factor of the losses, more than 1 if some critic ranks have a micro-batch less."""


def merge_requests(rounds: Iterable[Sequence[tuple[Any, ...]]], receivers: int) -> Iterator[Request]:
    """Merge the messages of all training ranks to requests: those are the same, in the same order, on each critic rank.

    Micro-batches are divided among the critic ranks in the order of training, as soon as there is one for each.

    Args:
        rounds: Messages by training rank: kind, part, and with the kind ``"batch"`` the number of micro-batches of each
            training rank in the optimizer step.
        receivers: Number of critic ranks.

    Raises:
        RuntimeError: If the training ranks ask for different things at a time.
    """
    window: list[Any] = []  # micro-batches of the optimizer step that no critic rank has
    arrived = 0  # micro-batches of the optimizer step
    for number, messages in enumerate(rounds):
        kinds = {kind for kind, *_ in messages}
        if len(kinds) > 1:
            raise RuntimeError(f"training ranks ask for different things at a time: {', '.join(sorted(kinds))}")
        parts = [message[1] for message in messages]
        if kinds != {"batch"}:
            yield Request(number, messages[0][0], parts)
            continue
        window += parts
        arrived += len(parts)
        total = messages[0][2] * len(messages)
        each = -(-total // receivers)
        last = arrived == total
        while len(window) >= receivers or (last and window):
            batches, window = window[:receivers], window[receivers:]
            batches += [None] * (receivers - len(batches))
            yield Request(number, "batches", batches, each, each * receivers / total)
        if last:
            arrived = 0


class CriticLoader:
    """The micro-batches of one optimizer step of this rank, each read when it is asked for."""

    def __init__(self, work: "CriticWork") -> None:
        self._work = work

    def __len__(self) -> int:
        return self._work.micro_batches

    def __iter__(self) -> Iterator[tuple[Experience, float]]:
        for _ in range(self._work.micro_batches):
            yield self._work.next_batch()


class CriticWork(L.Callback):
    """Reads the requests of the training ranks, answers them, and hands micro-batches to the Trainer."""

    def __init__(self, module: TrainedCritic, desk: Any, rank: int) -> None:
        self._module, self._desk, self._rank = module, desk, rank
        self._requests: Iterator[Request] = iter(())
        self._next: Request | None = None  # the first micro-batch of the coming step
        self._trainer: L.Trainer | None = None
        self._learning_rate = 0.0
        self._began = 0.0
        self.micro_batches = 1
        """Of the current optimizer step."""
        self.weights: Mapping[str, Tensor] | None = None
        """After the last request: the critic's weights, on rank 0, if they are not large."""

    # ------------------------------------------------------------------ between two optimizer steps

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Train until the training ranks say stop: the length of the run was for the learning rates, which have it."""
        trainer.fit_loop.max_epochs = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._trainer = trainer
        self._requests = merge_requests(self._messages(), trainer.world_size)
        self._wait_for_step(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._wait_for_step(trainer)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self._learning_rate = float(optimizer.param_groups[0]["lr"])

    def on_train_batch_start(self, *args: Any) -> None:
        self._began = time.time()

    def on_train_batch_end(self, *args: Any) -> None:
        """Tell the training ranks that there is progress."""
        self._desk.worked.remote(self._rank, "update", self._began, time.time())

    def _wait_for_step(self, trainer: L.Trainer) -> None:
        request = self._read()
        while request.kind not in ("batches", "stop"):
            self._answer(request)
            request = self._read()
        if request.kind == "stop":
            self._keep_weights(trainer)
            self._send(request, None)
            trainer.should_stop = True
            return
        self._next, self.micro_batches = request, request.micro_batches
        # What Lightning 2.6.6 derived from the length of the loader.
        trainer.accumulate_grad_batches = request.micro_batches
        loop = trainer.fit_loop
        loop.max_batches = request.micro_batches
        if loop._combined_loader is not None:
            loop._combined_loader.limits = [request.micro_batches]
        if loop._data_fetcher is not None:
            loop._data_fetcher.length = request.micro_batches

    # ------------------------------------------------------------------ requests

    def _messages(self) -> Iterator[list[tuple[Any, ...]]]:
        """The messages of all training ranks, by number."""
        import ray

        for number in itertools.count():
            state, found = ray.get(self._desk.messages.remote(number))
            if state == "failed":
                raise RuntimeError(f"the critic's training ranks have failed: {found}")
            yield found

    def _read(self) -> Request:
        return next(self._requests)

    def _send(self, request: Request, value: Any) -> None:
        import ray

        ray.get(self._desk.answer.remote(self._rank, request.number, value))

    def next_batch(self) -> tuple[Experience, float]:
        """This rank's next micro-batch, which may be a placeholder, and the factor of its loss."""
        import ray

        request, self._next = self._next or self._read(), None
        while request.kind != "batches":  # a checkpoint inside the step
            self._answer(request)
            request = self._read()
        part = request.parts[self._rank]
        if part is not None:
            return ray.get(part[0]), request.scale
        filled = next(part for part in request.parts if part is not None)
        batch: Experience = ray.get(filled[0])
        return batch.placeholder(), request.scale

    def _answer(self, request: Request) -> None:
        assert self._trainer is not None
        value: Any = None
        first = request.parts[0]
        if request.kind == "values":
            began = time.time()
            value = self._values(request.parts)
            self._desk.worked.remote(self._rank, "compute", began, time.time())
        elif request.kind == "ready":
            value = (socket.gethostname(), os.getpid())
        elif request.kind == "report":
            value = self._report(self._trainer)
        elif request.kind == "save":
            self._trainer.save_checkpoint(first)
        elif request.kind == "export":
            self._module.save_pretrained(first["folder"], child="critic", **first["options"])
        else:
            raise ValueError(f"a critic has no answer to {request.kind!r}")
        self._send(request, value)

    @torch.no_grad()
    def _values(self, parts: list[list[Any]]) -> dict[int, list[Any]]:
        """This rank's share of the batches of all training ranks: by rank, the object that has them by their number.

        All ranks run equally many forward passes, as a sharded critic gathers its weights in each.
        """
        import ray

        assert self._trainer is not None
        everyone = sorted((number, sender) for sender, refs in enumerate(parts) for number in range(len(refs)))
        ranks = self._trainer.world_size
        own = everyone[self._rank :: ranks]
        device = self._trainer.strategy.root_device
        found: dict[int, dict[int, Tensor]] = {}
        training = self._module.critic.training
        self._module.critic.eval()
        for turn in range(-(-len(everyone) // ranks)):
            number, sender = own[turn] if turn < len(own) else everyone[0]
            batch: Experience = ray.get(parts[sender][number])
            if turn >= len(own):
                batch = batch.placeholder()
            with self._trainer.precision_plugin.forward_context():
                values = self._module.value_output(batch.to(device)).float().cpu()
            if turn < len(own):
                found.setdefault(sender, {})[number] = values
        self._module.critic.train(training)
        return {sender: [ray.put(values)] for sender, values in found.items()}

    def _report(self, trainer: L.Trainer) -> dict[str, float]:
        """Metrics of the micro-batches since the last report, and of the last optimizer step."""
        metrics = {name: float(value) for name, value in self._module.take_metrics().items()}
        for name, logged in {
            "grad_norm/critic": "grad_norm/critic",
            "value/skipped_updates": "skipped_updates",
        }.items():
            if logged in trainer.callback_metrics:
                metrics[name] = float(trainer.callback_metrics[logged])
        return metrics | {"value/lr": self._learning_rate, "value/updates": float(trainer.global_step)}

    def _keep_weights(self, trainer: L.Trainer) -> None:
        """Gather the weights, if they are not large. A collective."""
        strategy = cast(Any, trainer.strategy)  # one of rlhfkit's, as only these start ranks on Ray
        size = sum(
            getattr(one, "ds_numel", one.numel()) * one.element_size() for one in self._module.critic.parameters()
        )
        if size <= MAX_RETURNED_BYTES:
            weights = strategy.consolidated_state_dict("critic")
            self.weights = weights if self._rank == 0 else None
