"""A module, data and a callback whose run on Ray is compared with one in a single process."""

from typing import Any

import lightning as L
from torch import Tensor

from strategies.toys import ShareLoader, Toy, global_batches

HOOKS = [
    "setup",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
]


class Watched(Toy):
    """Logs the loss over all ranks, says which rank it is, predicts."""

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        self.log("loss", loss.detach(), prog_bar=True, sync_dist=True)
        if batch_index == 0:
            print(f"first batch on rank {self.global_rank}")
        return loss

    def predict_step(self, batch: Tensor, batch_index: int) -> Tensor:
        return self.policy(input_ids=batch).logits[:, -1].argmax(-1)


class Failing(Watched):
    """Fails on all ranks in the third batch."""

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        if batch_index == 2:
            raise ArithmeticError("no more")
        return super().training_step(batch, batch_index)


class SharedBatches(L.LightningDataModule):
    """Each rank's share of three batches; remembers how many epochs it has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0

    def share(self) -> ShareLoader:
        assert self.trainer is not None
        return ShareLoader(global_batches(3), self.trainer.global_rank, self.trainer.world_size)

    def train_dataloader(self) -> ShareLoader:
        self.epochs += 1
        return self.share()

    def val_dataloader(self) -> ShareLoader:
        return self.share()

    def predict_dataloader(self) -> ShareLoader:
        return self.share()

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


class HookRecorder(L.Callback):
    """The order in which Lightning calls hooks; its state comes back from the ranks as any callback's does."""

    def __init__(self) -> None:
        self.called: list[str] = []
        for name in HOOKS:
            setattr(self, name, Recorded(self.called, name))

    def state_dict(self) -> dict[str, Any]:
        return {"called": list(self.called)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.called[:] = state["called"]


class Recorded:
    """A hook that writes its name down."""

    def __init__(self, called: list[str], name: str) -> None:
        self.called, self.name = called, name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.called.append(self.name)


def weights(module: Watched) -> dict[str, Tensor]:
    """Copies of the policy's weights."""
    return {name: tensor.detach().clone() for name, tensor in module.policy.state_dict().items()}


def initial_weights(model: str) -> dict[str, Tensor]:
    """Before training."""
    module = Watched(model)
    module.configure_model()
    return weights(module)
