"""Small LightningModules and data for strategy tests: global batches that any number of ranks split."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

VOCABULARY = 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}


def save_tiny_llama(folder: str | Path, *, tied: bool = False, seed: int = 1) -> str:
    """A model folder: two layers, hidden size 32.

    Models are always loaded from it: random initialisation draws other numbers when a model is built in shards.
    """
    config = LlamaConfig(**SIZES, intermediate_size=64, tie_word_embeddings=tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def save_tiny_mixtral(folder: str | Path) -> str:
    """A mixture of four experts, two for each token."""
    config = MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        MixtralForCausalLM(config).save_pretrained(folder)
    return str(folder)


class Critic(nn.Module):
    """A backbone that is not a Hugging Face class, with a scalar head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY, 16)
            self.hidden = nn.Linear(16, 16)
            self.value = nn.Linear(16, 1)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Values (B, T)."""
        return self.value(torch.tanh(self.hidden(self.embedding(input_ids)))).squeeze(-1)


class Toy(pl.LightningModule):
    """Next-token loss of a policy, optionally with a critic and a frozen reference.

    ``self.losses`` gets the loss of each batch, averaged over ranks.
    """

    def __init__(
        self,
        model: str,
        *,
        optimizer: str = "adamw",
        critic: bool = False,
        reference: bool = False,
        dropout: float = 0.0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.losses: list[float] = []
        self.learning_rates: list[list[float]] = []

    def configure_model(self) -> None:
        if hasattr(self, "policy"):
            return
        options = self.hparams
        self.policy = LlamaForCausalLM.from_pretrained(options.model, attention_dropout=options.dropout).train()
        if options.checkpointing:
            self.policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if options.critic:
            self.critic = Critic(seed=2)
        if options.reference:
            self.reference = LlamaForCausalLM.from_pretrained(options.model).requires_grad_(False).eval()

    def policy_loss(self, batch: Tensor) -> Tensor:
        logits = self.policy(input_ids=batch).logits[:, :-1].float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        if self.hparams.reference:
            with torch.no_grad():
                reference = self.reference(input_ids=batch).logits[:, :-1].float()
            loss = loss + 0.1 * (logits.log_softmax(-1) - reference.log_softmax(-1)).square().mean()
        return loss

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = self.policy_loss(batch)
        if self.hparams.critic:
            loss = loss + 0.5 * (self.critic(batch) - batch / VOCABULARY).square().mean()
        self.losses.append(self.mean_over_ranks(loss))
        self.learning_rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])
        return loss

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.log("validation_loss", self.policy_loss(batch), sync_dist=True)

    def mean_over_ranks(self, value: Tensor) -> float:
        return float(self.trainer.strategy.reduce(value.detach().clone(), reduce_op="mean"))

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p for p in self.policy.parameters() if p.requires_grad], "lr": self.rate}]
        if self.hparams.critic:
            groups.append({"params": self.critic.parameters(), "lr": self.rate / 2})
        kind = torch.optim.AdamW if self.hparams.optimizer == "adamw" else torch.optim.SGD
        optimizer = kind(groups, lr=self.rate)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def rate(self) -> float:
        return 3e-3 if self.hparams.optimizer == "adamw" else 0.5


def global_batches(count: int, size: int = 8, length: int = 12, seed: int = 0) -> list[Tensor]:
    """``count`` batches (size, length) of token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (size, length), generator=generator) for _ in range(count)]


class ShareLoader:
    """This rank's share of each global batch, in order; remembers where it was, as Lightning's stateful loaders do."""

    def __init__(self, batches: list[Tensor], rank: int, world_size: int) -> None:
        self.shares = [batch[rank::world_size] for batch in batches]
        self.next, self.resumed = 0, False

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[Tensor]:
        first, self.resumed = (self.next if self.resumed else 0), False
        for index in range(first, len(self)):
            self.next = index + 1
            yield self.shares[index]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next, self.resumed = state["next"] % len(self), True


def trainer(strategy: Any, ranks: int, **changes: Any) -> pl.Trainer:
    """A quiet CPU trainer."""
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": ranks,
        "strategy": strategy,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**(options | changes))


def compute_in_fp16() -> None:
    """From now on in this process: torch does on every CPU, slowly; DeepSpeed refuses those without instructions."""
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True
