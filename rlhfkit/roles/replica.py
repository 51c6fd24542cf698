"""``ModelReplica``: a frozen model in a Ray actor, and what it is sent.

Nothing is kept between two requests, so that Ray may restart an actor and repeat what it was asked.
"""

import pkgutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.models import ModelLoading, load_causal_lm, load_scalar_model, load_tokenizer, policy_output, reward_output
from rlhfkit.models.distillation import likeliest_tokens
from rlhfkit.models.forward import unwrap
from rlhfkit.models.heads import critic_values
from rlhfkit.models.load import context_length, disable_dropout

Role = Literal["logprobs", "reward", "values"]
"""What is asked for: a language model's log-probs of tokens, a reward model's scores, or a critic's values."""


READS = ("tokens", "text", "chat")
"""The policy's token ids; prompt and answer as one text; or as two turns in the model's own chat template."""


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
    """What a reward model reads, see :data:`READS`."""
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
        top: K: the likeliest tokens are wanted in place of log-probs of the sequence's own; 0: these.
        attachments: The images of each; ``None``: there are none. Paths must be those of the replica's machine, too.
    """

    input_ids: Tensor
    lengths: Tensor
    mask: Tensor
    temperature: float
    top: int = 0
    attachments: tuple[tuple[Any, ...], ...] | None = None

    @classmethod
    def of(cls, experience: Experience, rows: Sequence[int] | Tensor, top: int = 0) -> "TokenRows":
        batch = experience.select(rows)
        ids, lengths, mask = batch.input_ids.int().cpu(), batch.lengths.int().cpu(), batch.action_mask.cpu()
        return cls(ids, lengths, mask, batch.temperature, top=top, attachments=batch.attachments)


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
        self.attachments = rows.attachments


class TextReading:
    """Writes sequences of the policy as texts, and reads them with a reward model's tokenizer.

    Args:
        reads: ``text``, ``chat``, or the dotted name of a function of prompt and answer that returns the text.
        policy: Folder or hub name of the policy, for its tokenizer, or a tokenizer.
        model: Folder or hub name of the reward model, likewise.
        trust_remote_code: Run Python code that comes with them.
    """

    def __init__(self, reads: str, policy: Any, model: str, trust_remote_code: bool) -> None:
        self._reads = reads
        named = isinstance(policy, str)
        self._policy = load_tokenizer(policy, trust_remote_code=trust_remote_code) if named else policy
        self._own = load_tokenizer(model, trust_remote_code=trust_remote_code)
        self._write: Callable[[str, str], str] | None = None if reads in READS else pkgutil.resolve_name(reads)

    def read(self, input_ids: Tensor, lengths: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids (B, T') int64 and lengths (B,) of B sequences, whose answers begin at the first token of ``mask``.

        ``input_ids`` are (B, T), ``mask`` (B, T-1).
        """
        rows = []
        for ids, length, chosen in zip(input_ids.tolist(), lengths.tolist(), mask, strict=True):
            begin = int(chosen.long().argmax()) + 1 if bool(chosen.any()) else length
            tokens = self._tokens(self._text(ids[:begin]), self._text(ids[begin:length]))
            rows.append(tokens or [0])  # control tokens only, as a placeholder may have: no text, and a model needs one
        longest = max(map(len, rows))
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return padded, torch.tensor([len(row) for row in rows])

    def _text(self, ids: list[int]) -> str:
        return str(self._policy.decode(ids, skip_special_tokens=True))

    def _tokens(self, prompt: str, answer: str) -> list[int]:
        if self._reads == "chat":
            turns: list[dict[str, Any]] = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer},
            ]
            text = self._own.apply_chat_template(turns, tokenize=False)
            return list(self._own(text, add_special_tokens=False)["input_ids"])
        text = prompt + answer if self._write is None else self._write(prompt, answer)
        return list(self._own(text)["input_ids"])


def load_frozen(options: ReplicaOptions) -> nn.Module:
    """Load a model that is not trained, on the CPU or where the strategy puts it."""
    load: Any = load_causal_lm if options.role == "logprobs" else load_scalar_model
    model: nn.Module = load(
        options.model,
        dtype=options.weights,
        loading=ModelLoading(attention=options.attention, trust_remote_code=options.trust_remote_code),
        **({} if options.role == "logprobs" else {"new_head": False}),
    )
    disable_dropout(model)
    return model.eval().requires_grad_(False)


def spread(model: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    """Move a model to devices, of which each gets an equal number of its layers.

    Embeddings, the last norm and the head are on the first device, where what surrounds the layers is computed. Each
    layer gets its inputs on its own device and returns its outputs to that of the inputs.
    """
    if len(devices) == 1:
        return model.to(devices[0])
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = max(lists, key=len, default=nn.ModuleList())
    if len(layers) < len(devices):
        raise ValueError(f"a model of {len(layers)} layers cannot be divided over {len(devices)} devices")
    for number, layer in enumerate(layers):
        device = devices[number * len(devices) // len(layers)]
        layer.to(device)
        add_hook_to_module(layer, AlignDevicesHook(execution_device=device, io_same_device=True))
    inside = {id(tensor) for layer in layers for tensor in (*layer.parameters(), *layer.buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in inside:
            tensor.data = tensor.data.to(devices[0])
    return model


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
        rows = replace(rows, input_ids=ids, lengths=lengths, attachments=None)
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
        self._reading: TextReading | None = None
        self._last_finished = time.monotonic()

    def idle_seconds(self) -> float:
        """Seconds since it has finished a request, or was started. Ray calls it in a thread beside :meth:`compute`."""
        return time.monotonic() - self._last_finished

    def load(self) -> int:
        """Load the model if that has not happened yet; returns the number of its parameters."""
        if self._model is None:
            self._reading = text_reading(self.options)
            self._model = spread(load_frozen(self.options), self._devices())
        return sum(parameter.numel() for parameter in self._model.parameters())

    @staticmethod
    def _devices() -> list[torch.device]:
        import ray

        return [torch.device("cuda", number) for number in range(len(ray.get_gpu_ids()))] or [torch.device("cpu")]

    def compute(self, rows: TokenRows) -> Answer:
        started = time.monotonic()
        self.load()
        assert self._model is not None
        options, device = self.options, self._devices()[0]
        mixed = options.compute != options.weights
        context: Any = torch.autocast(device.type, dtype=options.compute) if mixed else nullcontext()
        with context:
            values = compute_rows(self._model, rows, options, self._reading, device)
        self._last_finished = time.monotonic()
        return Answer(values, self._last_finished - started)
