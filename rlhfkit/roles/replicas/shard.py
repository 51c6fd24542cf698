"""A rank of a sharded replica: a Trainer that predicts, in whose only step the rank does what its replica asks for.

The model is a frozen child under ZeRO 3, as in a module: the Trainer's strategy divides it while it is loaded.
"""

import os
import socket
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.utils.data import DataLoader

from rlhfkit.distributed import full_parameters
from rlhfkit.models import unwrap
from rlhfkit.roles.replica import Answer, ReplicaOptions, TokenRows, compute_rows, load_frozen, text_reading
from rlhfkit.roles.replicas.weights import received
from rlhfkit.rollout.weight_sync.process_group.receiver import Invitation, WeightReceiver

_KINDS = {torch.float32: "32", torch.bfloat16: "bf16", torch.float16: "16"}


class ShardProcess(NamedTuple):
    """A rank that has loaded the model."""

    host: str
    pid: int
    parameters: int
    """Numbers that it holds of the model's."""

    @classmethod
    def of(cls, model: nn.Module) -> "ShardProcess":
        """This process."""
        held = sum(getattr(parameter, "ds_tensor", parameter).numel() for parameter in model.parameters())
        return cls(socket.gethostname(), os.getpid(), held)


def precision_of(options: ReplicaOptions) -> str:
    """Lightning's name of the precision with these types of weights and matrix products."""
    return f"{_KINDS[options.compute]}-{'true' if options.weights == options.compute else 'mixed'}"


def run_shard(
    options: ReplicaOptions,
    make_strategy: Callable[[], Strategy],
    device: str,
    replica: Any,
    run: str,
    environment: ClusterEnvironment,
) -> None:
    """Do what a replica asks for, until it ends.

    Args:
        options: How the model is loaded and run.
        make_strategy: Makes the strategy that divides it.
        device: ``"cpu"`` or ``"cuda"``.
        replica: The Ray actor, a :class:`~rlhfkit.roles.replicas.sharded.ShardedReplica`.
        run: What the replica knows these ranks by.
        environment: Of this rank.
    """
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]  # of the training rank whose environment this is
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    trainer = L.Trainer(
        accelerator=device,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=make_strategy(),
        plugins=[environment],
        precision=precision_of(options),  # type: ignore[arg-type]  # one of Lightning's names
        inference_mode=False,  # DeepSpeed changes parameters in place
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = ShardModule(options, replica, run, environment.global_rank())
    trainer.predict(module, dataloaders=DataLoader([0]), return_predictions=False)  # type: ignore[arg-type]


class ShardModule(L.LightningModule):
    """One rank's part of the model, and the loop of its work."""

    model: nn.Module

    def __init__(self, options: ReplicaOptions, replica: Any, run: str, rank: int) -> None:
        super().__init__()
        self._options, self._replica, self._run, self._rank = options, replica, run, rank
        self._reading = text_reading(options)
        self._receiver = WeightReceiver(torch.device("cpu"))

    def configure_model(self) -> None:
        """Load the model; a strategy at ZeRO stage 3 divides it meanwhile."""
        self.model = load_frozen(self._options)

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        """Do what the replica asks for, round by round."""
        replica, place = self._replica, 0
        self._call(replica.ready, ShardProcess.of(self.model))
        while True:
            kind, part = self._call(replica.work, place)
            if kind == "end":
                return
            self._call(replica.finished, place, self._answer(kind, part))
            place += 1

    def _call(self, method: Any, *arguments: Any) -> Any:
        """Call a method of the replica; once, as one that was started again has ranks of its own."""
        import ray

        return ray.get(method.options(max_task_retries=0).remote(self._run, self._rank, *arguments))

    def _answer(self, kind: str, part: Any) -> Answer | None:
        if kind == "join":
            self._receiver.join(Invitation(**part), 0)
            return None
        if kind == "receive":
            self._receive(part[0])
            return None
        rows: TokenRows = part
        started = time.monotonic()
        with self.trainer.precision_plugin.forward_context():
            values = compute_rows(self.model, rows, self._options, self._reading, self.device)
        return Answer(values, time.monotonic() - started)

    @torch.no_grad()
    def _receive(self, update_info: dict[str, Any]) -> None:
        """Receive all weights, in place, and leave the group. A collective of the ranks."""
        parameters = dict(unwrap(self.model).named_parameters())
        try:
            for name, tensor in received(update_info, self._receiver):
                with full_parameters([parameters[name]], modifier_rank=0):
                    parameters[name].copy_(tensor)
        finally:
            self._receiver.leave()
