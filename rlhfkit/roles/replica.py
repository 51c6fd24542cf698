"""``ModelReplica``: a frozen model in a Ray actor, and what it is sent.

Nothing is kept between two requests but weights that were received, whose version each request names, so that Ray may
restart an actor and repeat what it was asked.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.models import load_causal_lm, load_scalar_model, policy_output, reward_output, unwrap
from rlhfkit.models.distillation import likeliest_tokens
from rlhfkit.models.heads import critic_values
from rlhfkit.models.load import context_length, disable_dropout
from rlhfkit.roles.replicas.reading import TextReading
from rlhfkit.roles.replicas.weights import received
from rlhfkit.rollout.weight_sync.process_group.receiver import Invitation, WeightReceiver

Role = Literal["logprobs", "reward", "values"]
"""What is asked for: a language model's log-probs of tokens, a reward model's scores, or a critic's values."""


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
    reads: str = "tokens"
    """What a reward model reads, see :mod:`rlhfkit.roles.replicas.reading`."""
    policy: Any = ""
    """Folder or hub name of the policy, whose tokenizer writes the text, or the tokenizer itself."""


@dataclass(frozen=True)
class TokenRows:
    """Sequences of one forward pass.

    Attributes:
        input_ids: (B, T) int32.
        lengths: (B,) int32, tokens of each.
        mask: (B, T-1) bool, the tokens whose log-probs or values are wanted; not used for scores.
        temperature: Divides the logits.
        version: Version of the weights that compute them: 0, or how often the model has moved.
        top: K: the likeliest tokens are wanted in place of log-probs of the sequence's own; 0: these.
    """

    input_ids: Tensor
    lengths: Tensor
    mask: Tensor
    temperature: float
    version: int = 0
    top: int = 0

    @classmethod
    def of(cls, experience: Experience, rows: Sequence[int] | Tensor, top: int = 0) -> "TokenRows":
        """Some rows of an iteration."""
        batch = experience.select(rows)
        ids, lengths, mask = batch.input_ids.int().cpu(), batch.lengths.int().cpu(), batch.action_mask.cpu()
        return cls(ids, lengths, mask, batch.temperature, top=top)

    def placeholder(self) -> "TokenRows":
        """Two tokens, for a rank that only takes part in the forward pass of others."""
        two = torch.tensor([2], dtype=torch.int32)
        return replace(self, input_ids=self.input_ids[:1, :2], lengths=two, mask=torch.ones_like(self.mask[:1, :1]))


class Answer(NamedTuple):
    """What a replica has computed."""

    values: Tensor
    """(B, T-1) or (B, 1) float32 on the CPU."""
    seconds: float
    """How long it took."""


class _Sequences:
    """What a forward pass reads."""

    def __init__(self, rows: TokenRows, device: torch.device) -> None:
        self.input_ids = rows.input_ids.long().to(device)
        self.attention_mask = (torch.arange(rows.input_ids.shape[1]) < rows.lengths[:, None]).to(device)


def load_frozen(options: ReplicaOptions) -> nn.Module:
    """Load a model that is not trained, on the CPU or where the strategy puts it."""
    load: Any = load_causal_lm if options.role == "logprobs" else load_scalar_model
    model: nn.Module = load(
        options.model,
        dtype=options.weights,
        attention=options.attention,
        trust_remote_code=options.trust_remote_code,
        **({} if options.role == "logprobs" else {"new_head": False}),
    )
    disable_dropout(model)
    return model.eval().requires_grad_(False)


def text_reading(options: ReplicaOptions) -> TextReading | None:
    """What writes the rows as text and reads them; ``None`` for a model that has the policy's tokens."""
    if options.reads == "tokens":
        return None
    return TextReading(options.reads, options.policy, options.model, options.trust_remote_code)


@torch.no_grad()
def compute_rows(
    model: nn.Module, rows: TokenRows, options: ReplicaOptions, reading: TextReading | None, device: torch.device
) -> Tensor:
    """What a model says of some rows, float32 on the CPU.

    Returns:
        (B, T-1) log-probs or values, 0 outside the mask; (B, T-1, 2 K) log-probs of the K likeliest tokens and their
        ids, which float32 holds exactly; or (B, 1) normalized scores.

    Raises:
        ValueError: If a text is longer than the context of the model that reads it.
    """
    if reading is not None:
        ids, lengths = reading.read(rows.input_ids, rows.lengths, rows.mask)
        context = context_length(unwrap(model).config)
        if context is not None and ids.shape[1] > context:
            raise ValueError(
                f"the text of a sample has {ids.shape[1]} tokens, and {options.model} reads at most {context}: lower "
                "max_new_tokens, shorten what it reads with reads='my_package.write', or use one with a longer context"
            )
        rows = replace(rows, input_ids=ids, lengths=lengths)
    sequences = _Sequences(rows, device)
    if options.role == "reward":
        return reward_output(model, sequences, normalized=True)[:, None].float().cpu()
    if options.role == "values":
        return critic_values(model, sequences, rows.mask.to(device))[0].float().cpu()
    mask = rows.mask.to(device)
    if rows.top:
        return likeliest_tokens(model, sequences, mask, rows.top, rows.temperature).cpu()
    return policy_output(model, sequences, mask, temperature=rows.temperature).logprobs.float().cpu()


class ModelReplica:
    """A frozen model; loaded by the first call, also after Ray has restarted the actor."""

    def __init__(self, options: ReplicaOptions) -> None:
        self.options = options
        self._model: nn.Module | None = None
        self._version = 0
        self._reading: TextReading | None = None
        self._receiver: WeightReceiver | None = None
        self._last_finished = time.monotonic()

    def idle_seconds(self) -> float:
        """Seconds since it has finished a request, or was started. Ray calls it in a thread beside :meth:`compute`."""
        return time.monotonic() - self._last_finished

    def load(self) -> int:
        """Load the model if that has not happened yet; returns the number of its parameters."""
        if self._model is None:
            self._reading = text_reading(self.options)
            self._model = load_frozen(self.options).to(self._device())
        return sum(parameter.numel() for parameter in self._model.parameters())

    @staticmethod
    def _device() -> torch.device:
        import ray

        return torch.device("cuda" if ray.get_gpu_ids() else "cpu")

    # ---------------------------------------------------------------- weights of a model that moves

    def version(self) -> int:
        """Version of its weights; 0 after a restart."""
        return self._version

    def join(self, init_info: dict[str, Any]) -> None:
        """Join the group of a :class:`~rlhfkit.rollout.weight_sync.process_group.sender.ProcessGroupSender`."""
        self.load()
        self._receiver = WeightReceiver(torch.device("cpu"))
        self._receiver.join(Invitation(**init_info), 0)

    @torch.no_grad()
    def receive(self, update_info: dict[str, Any], version: int) -> None:
        """Receive all weights, in place, and leave the group."""
        assert self._model is not None
        assert self._receiver is not None
        self._version = -1  # until it has all of them
        parameters = dict(self._model.named_parameters())
        try:
            for name, tensor in received(update_info, self._receiver):
                parameters[name].copy_(tensor)
        finally:
            self._receiver.leave()
        self._version = version

    # ---------------------------------------------------------------- requests

    def compute(self, rows: TokenRows) -> Answer | None:
        """Compute rows, and measure how long it takes; ``None`` if it has not the version of the weights."""
        if rows.version != self._version:
            self._last_finished = time.monotonic()
            return None
        started = time.monotonic()
        self.load()
        assert self._model is not None
        options, device = self.options, self._device()
        mixed = options.compute != options.weights
        context: Any = torch.autocast(device.type, dtype=options.compute) if mixed else nullcontext()
        with context:
            values = compute_rows(self._model, rows, options, self._reading, device)
        self._last_finished = time.monotonic()
        return Answer(values, self._last_finished - started)
