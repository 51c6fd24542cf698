"""``ServedModel``: a frozen model that running ``vllm serve`` processes have, asked over HTTP.

As a reference or teacher it gives log-probs of given tokens, as a teacher also those of the likeliest ones. It computes
in the server's types with vLLM's kernels, so the numbers are those of a child of the module up to rounding.
"""

import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhfkit.data.batch import TokenExample
from rlhfkit.data.types import Experience
from rlhfkit.distributed import run_on_all_ranks
from rlhfkit.roles.frozen_model import EarlyRows, FrozenModel, ModelPoolError
from rlhfkit.roles.replica import Role
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.server.completions import COMPLETIONS, connect, parse_scores, parse_top, score_body
from rlhfkit.rollout.server.connection import ServerConnections, server_options
from rlhfkit.serving.access import AccessToken
from rlhfkit.validation import check_number

T = TypeVar("T")

MAX_TOP = 20
"""Likeliest tokens that vLLM returns at most, unless it is started with a larger ``--max-logprobs``."""


class ServedModel(FrozenModel):
    """A language model behind ``/v1/completions`` of vLLM, in the place of a :class:`~rlhfkit.roles.ModelPool`.

    Every rank asks the servers itself; several share the requests. Log-probs of prompts are those at temperature 1,
    so the policy has to sample at that. The server needs no special mode; its log-probs of given tokens are the
    model's whatever its ``--logprobs-mode``.

    Example::

        GRPOModule("sft", kl_coef=0.01, parts=[Reference(ServedModel("sft", "http://10.0.0.5:8000"))])
        OnPolicyDistillationModule("Qwen/Qwen3-0.6B", teacher=ServedModel("Qwen/Qwen3-32B", "http://10.0.0.5:8000"))

    Args:
        model: Folder or hub name of what is served, whose tokenizer is compared with the student's.
        urls: Addresses, ``http://10.0.0.5:8000`` each.
        served_model: Name by which the servers know the model; ``None``: the only one they have.
        token_variable: Environment variable that holds the servers' ``--api-key``.
        concurrency: Requests in flight on each server, of each rank.
        start_timeout: Seconds in which the servers must answer at the start.
        request_timeout: Seconds in which a server must answer a request, its time in the server's queue included.
        retries: How often a request is sent again that found no connection or no answer, or status 408, 429 or 5xx.
        ssl_ca_certs: File of certificate authorities (PEM) to verify the servers with; ``None``: the system's.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        model: str,
        urls: str | Sequence[str],
        *,
        served_model: str | None = None,
        token_variable: str | None = None,
        concurrency: int = 64,
        start_timeout: float = 120.0,
        request_timeout: float = 600.0,
        retries: int = 5,
        ssl_ca_certs: str | None = None,
    ) -> None:
        self.options = server_options(
            urls,
            token=AccessToken.optional(variable=token_variable),
            concurrency=concurrency,
            request_timeout=request_timeout,
            retries=retries,
            ssl_ca_certs=ssl_ca_certs,
        )
        check_number("start_timeout", start_timeout, above=0, why="it is in seconds")
        super().__init__(model)
        self.served_model = served_model
        self.token_variable = token_variable
        self.urls, self.concurrency, self.request_timeout = list(self.options.urls), concurrency, request_timeout
        self.start_timeout, self.retries, self.ssl_ca_certs = start_timeout, retries, ssl_ca_certs
        self._taken = 0.0, 0.0  # of ``waited`` and ``hidden``
        self._connections: ServerConnections | None = None
        self._name = ""
        self._context = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connections": None, "early": EarlyRows()}

    # ---------------------------------------------------------------- start and end

    @property
    def started(self) -> bool:
        return self._connections is not None

    def start(self, role: Role, *, weights: torch.dtype, compute: torch.dtype, policy: Any = "") -> None:
        """Connect, once. A collective; the types are the servers' own.

        Raises:
            ModelPoolError: On all ranks, if a server does not answer or has another model, or a reward is asked for.
        """
        if self.started:
            return
        if role != "logprobs":
            raise ModelPoolError(
                f"ServedModel({self.model!r}) is a language model and has no rewards or values: RemoteReward asks a "
                "server for rewards, ModelPool runs a reward model or a frozen critic"
            )
        run_on_all_ranks(self.connect, error_type=ModelPoolError)

    def connect(self) -> None:
        """Connect this process; ModelPoolError if a server does not answer or has another model."""
        if self.started:
            return
        try:
            self._connections, self._name, self._context = connect(self.options, self.served_model, self.start_timeout)
        except EngineError as error:
            raise ModelPoolError(str(error)) from None

    def close(self) -> None:
        """Disconnect; :meth:`start` may be called again."""
        if self._connections is not None:
            self._connections.close()
        self._connections, self.early = None, EarlyRows()

    # ---------------------------------------------------------------- requests

    def take_seconds(self) -> tuple[float, float]:
        """Seconds since the last call that this rank has waited, and that were hidden from it."""
        (waited, hidden), self._taken = self._taken, (self.waited, self.hidden)
        return self.waited - waited, self.hidden - hidden

    def submit(self, experience: Experience, batches: Sequence[Tensor]) -> "PendingScores":
        """Ask for the log-probs of some rows of an iteration; returns at once.

        Args:
            experience: B sequences of this rank.
            batches: Indices (b,) of rows.

        Raises:
            ModelPoolError: If the policy was sampled from at another temperature than 1.
        """
        if experience.temperature != 1.0:
            raise ModelPoolError(
                f"a vLLM server has log-probs of given tokens at temperature 1, and samples are at "
                f"{experience.temperature}: use SamplingSpec(temperature=1), or ModelPool, which divides the logits"
            )
        asked = {}
        for row in torch.cat([*batches, torch.zeros(0, dtype=torch.int64)]).tolist():
            token_ids = experience.input_ids[row, : int(experience.lengths[row])].tolist()
            seen = bool(experience.attachments and experience.attachments[int(row)])
            asked[int(row)] = (token_ids, self._ask(token_ids, self.top, has_images=seen))
        return PendingScores(self, experience.action_mask.cpu(), asked)

    def top_tokens(self, examples: Sequence[TokenExample], top: int) -> list[tuple[Tensor, Tensor]]:
        """The likeliest next tokens of each prefix of sequences of T tokens.

        Returns:
            For each sequence log-probs (T-1, top) float32, the likeliest first, and ids (T-1, top) int64.

        Raises:
            ModelPoolError: If the servers cannot compute them; vLLM returns 20 at most (``--max-logprobs``).
        """
        asked = [
            (list(one.input_ids), self._ask(one.input_ids, top, has_images=bool(one.attachments))) for one in examples
        ]
        found = []
        for token_ids, future in asked:
            values, ids = self._answer(future, partial(parse_top, token_ids=token_ids, top=top))
            found.append((torch.tensor(values), torch.tensor(ids)))
        return found

    def _ask(
        self, token_ids: Sequence[int], top: int = 0, *, has_images: bool = False
    ) -> "concurrent.futures.Future[Any]":
        """Ask about one sequence; what is wrong with it is raised where the answer is waited for, as on all ranks."""
        if self._connections is None:
            raise RuntimeError("ServedModel is not connected: ServedModel.start comes first")
        problem = None
        if has_images:
            problem = (
                "a sample has images, which /v1/completions of vLLM does not take: use ModelPool or a model in this "
                "process"
            )
        elif not 2 <= len(token_ids) < self._context:
            problem = (
                f"{self.options.urls[0]} takes sequences of 2 to {self._context - 1} tokens (it samples one more), got "
                f"one of {len(token_ids)}: start it with a larger --max-model-len"
            )
        if problem is not None:
            refused: concurrent.futures.Future[Any] = concurrent.futures.Future()
            refused.set_exception(ModelPoolError(problem))
            return refused
        return self._connections.submit(
            self._connections.ask(COMPLETIONS, {"model": self._name, **score_body(token_ids, top)})
        )

    def _answer(self, future: "concurrent.futures.Future[Any]", parse: Callable[[Any], T]) -> T:
        try:
            return parse(future.result())
        except EngineError as error:
            raise ModelPoolError(f"the served {self.model} has no log-probs for this run: {error}") from None


class PendingScores:
    """Rows that the servers are computing."""

    def __init__(
        self,
        served: ServedModel,
        mask: Tensor,
        asked: Mapping[int, tuple[list[int], "concurrent.futures.Future[Any]"]],
    ) -> None:
        self._served = served
        self._asked_at = self._last_answer = time.monotonic()
        for _, future in asked.values():
            future.add_done_callback(self._answered)
        self._mask = mask
        self._asked = asked

    def _answered(self, _: Any) -> None:
        self._last_answer = time.monotonic()

    def result(self, columns: int | None = None) -> Tensor:
        """Wait for all of them; float32 on the CPU, 0 outside the mask and in rows that were not asked for.

        Returns:
            (B, T-1) log-probs, or (B, T-1, 2 K) those of the K likeliest tokens and their ids.

        Raises:
            ModelPoolError: If no server answers, or one answers something else.
        """
        started = time.monotonic()
        top = self._served.top
        values = torch.zeros(*self._mask.shape, *((2 * top,) if top else ()))
        for row, (token_ids, future) in self._asked.items():
            read: Callable[[Any], Tensor] = partial(_columns, token_ids=token_ids, top=top)
            scores = self._served._answer(future, read if top else partial(_scores, token_ids=token_ids))
            values[row, : len(scores)] = scores
        self._served.waited += time.monotonic() - started
        self._served.hidden += max(0.0, min(started, self._last_answer) - self._asked_at)
        return values.where(self._mask.bool()[..., None] if top else self._mask.bool(), 0.0)


def _scores(answer: Any, token_ids: Sequence[int]) -> Tensor:
    """(T-1,) log-probs."""
    return torch.tensor(parse_scores(answer, token_ids))


def _columns(answer: Any, token_ids: Sequence[int], top: int) -> Tensor:
    """(T-1, 2 K) log-probs and ids of the likeliest tokens."""
    values, ids = parse_top(answer, token_ids, top)
    return torch.cat([torch.tensor(values), torch.tensor(ids).float()], -1)
