"""``ModelReplica``: a frozen model in a Ray actor, and what it is sent.

Nothing is kept between two requests, so that Ray may restart an actor and repeat what it was asked.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.models import load_causal_lm, load_scalar_model, policy_output, reward_output
from rlhfkit.models.load import disable_dropout

Role = Literal["logprobs", "reward"]
"""What a model is asked for: log-probs of tokens, by a language model, or scores, by a reward model."""


@dataclass(frozen=True)
class ReplicaOptions:
    """How a replica loads and runs its model."""

    model: str
    """Folder or hub name, as the replica's machine sees it."""
    role: Role
    weights: torch.dtype
    compute: torch.dtype
    """Type of matrix products; if it is not that of the weights, by autocast, as ``precision="bf16-mixed"``."""
    attention: str | None
    trust_remote_code: bool


@dataclass(frozen=True)
class TokenRows:
    """Sequences of one forward pass.

    Attributes:
        input_ids: (B, T) int32.
        lengths: (B,) int32, tokens of each.
        mask: (B, T-1) bool, the tokens whose log-probs are wanted; not used for scores.
        temperature: Divides the logits.
    """

    input_ids: Tensor
    lengths: Tensor
    mask: Tensor
    temperature: float

    @classmethod
    def of(cls, experience: Experience, rows: Sequence[int] | Tensor) -> "TokenRows":
        """Some rows of an iteration."""
        batch = experience.select(rows)
        return cls(batch.input_ids.int().cpu(), batch.lengths.int().cpu(), batch.action_mask.cpu(), batch.temperature)


class _Sequences:
    """What a forward pass reads."""

    def __init__(self, rows: TokenRows, device: torch.device) -> None:
        self.input_ids = rows.input_ids.long().to(device)
        self.attention_mask = (torch.arange(rows.input_ids.shape[1]) < rows.lengths[:, None]).to(device)


class ModelReplica:
    """A frozen model; loaded by the first call, also after Ray has restarted the actor."""

    def __init__(self, options: ReplicaOptions) -> None:
        self.options = options
        self._model: nn.Module | None = None

    def load(self) -> int:
        """Load the model if that has not happened yet; returns the number of its parameters."""
        options = self.options
        if self._model is None:
            load: Any = load_causal_lm if options.role == "logprobs" else load_scalar_model
            model = load(
                options.model,
                dtype=options.weights,
                attention=options.attention,
                trust_remote_code=options.trust_remote_code,
                **({} if options.role == "logprobs" else {"new_head": False}),
            )
            disable_dropout(model)
            self._model = model.eval().requires_grad_(False).to(self._device())
        return sum(parameter.numel() for parameter in self._model.parameters())

    @staticmethod
    def _device() -> torch.device:
        import ray

        return torch.device("cuda" if ray.get_gpu_ids() else "cpu")

    @torch.no_grad()
    def compute(self, rows: TokenRows) -> Tensor:
        """(B, T-1) float32 log-probs, 0 outside the mask, or (B, 1) normalized scores, on the CPU."""
        self.load()
        assert self._model is not None
        options, device = self.options, self._device()
        mixed = options.compute != options.weights
        context: Any = torch.autocast(device.type, dtype=options.compute) if mixed else nullcontext()
        sequences = _Sequences(rows, device)
        with context:
            if options.role == "reward":
                return reward_output(self._model, sequences, normalized=True)[:, None].float().cpu()
            out = policy_output(self._model, sequences, rows.mask.to(device), temperature=rows.temperature)
            return out.logprobs.float().cpu()
