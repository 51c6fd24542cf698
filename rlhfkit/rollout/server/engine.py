"""``VLLMServer``: running ``vllm serve`` processes as an engine."""

import asyncio
import logging
import math
import queue
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.distributed import get_rank, run_on_all_ranks
from rlhfkit.rollout.collector import Group, OpenGroups, sample_all
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec, WeightSource, check_requests, check_scored
from rlhfkit.rollout.errors import EngineError, WeightsNeededError
from rlhfkit.rollout.server.completions import (
    COMPLETIONS,
    ask_with_images,
    connect,
    parse_completion,
    parse_scores,
    reports_raw_logprobs,
    sample_body,
    score_body,
    takes_images,
)
from rlhfkit.rollout.server.connection import ServerConnections, server_options
from rlhfkit.rollout.server.weights import (
    ServerReceivers,
    ServerSync,
    ask_server_info,
    choose_sender,
    served_versions,
)
from rlhfkit.rollout.vllm.arguments import check_vllm_sampling, sample_request
from rlhfkit.rollout.weight_sync.coordinator import attempt_sync, check_transfer
from rlhfkit.serving.access import AccessToken
from rlhfkit.validation import check_integer, check_number

if TYPE_CHECKING:
    from rlhfkit.rollout.vllm.images import ImageRequests

log = logging.getLogger(__name__)

_ASK_SECONDS = 60.0


class VLLMServer(RolloutEngine):
    """One or several running ``vllm serve`` processes of one model, as one engine. They go on when the run ends.

    Samples are those of :class:`~rlhfkit.VLLMPool` with the same weights: same requests, same seeds. Tokens are sent
    and returned as ids over ``/v1/completions``; with images over ``/inference/v1/generate``, if the servers were
    started with ``--enable-scale-out``.

    To train, the servers need vLLM's endpoints for weights; without them :meth:`start` raises an error that says how to
    start them, unless only the model's own weights are asked for (``rlhfkit generate``, evaluations).

    Example::

        RolloutCallback(engine=VLLMServer("http://10.0.0.5:8000"), reward=math_match)

    Args:
        urls: Addresses, ``http://10.0.0.5:8000`` each, without ``/v1``.
        served_model: Name by which the servers know the model; ``None``: the only one they have.
        token: The servers' ``--api-key``. Prefer ``token_variable``: this one is in every pickle of the engine.
        token_variable: Environment variable that holds it.
        concurrency: Requests in flight on each server, of each rank.
        start_timeout: Seconds in which the servers must answer at the start.
        request_timeout: Seconds in which a server must answer a request, its time in the server's queue included.
        sync_timeout: Seconds for each step of a weight transfer, and for each bucket.
        retries: How often a request is sent again that found no connection or no answer, or status 408, 429 or 5xx;
            to another server, if there is one.
        backoff: Seconds before the first repetition; doubled each time up to 30, plus a random part of up to this.
        transfer: ``"auto"``: gloo from or to CPUs, NCCL between GPUs; or ``"gloo"``, ``"nccl"``.
        bucket_bytes: Bytes per broadcast of a weight transfer; ``None``: 64 MiB through main memory, 512 MiB between
            GPUs.
        ssl_ca_certs: File of certificate authorities (PEM) to verify the servers with; ``None``: the system's.

    Raises:
        ValueError: If an argument is out of range.
    """

    shared = True
    can_stream = True
    continuous_batching = True

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        served_model: str | None = None,
        token: str | None = None,
        token_variable: str | None = None,
        concurrency: int = 256,
        start_timeout: float = 120.0,
        request_timeout: float = 1800.0,
        sync_timeout: float = 300.0,
        retries: int = 5,
        backoff: float = 1.0,
        transfer: str = "auto",
        bucket_bytes: int | None = None,
        ssl_ca_certs: str | None = None,
    ) -> None:
        self.options = server_options(
            urls,
            token=AccessToken.optional(token, variable=token_variable),
            concurrency=concurrency,
            request_timeout=request_timeout,
            retries=retries,
            backoff=backoff,
            ssl_ca_certs=ssl_ca_certs,
        )
        check_number("start_timeout", start_timeout, above=0, why="it is in seconds")
        check_number("sync_timeout", sync_timeout, above=0, why="it is in seconds")
        check_integer("bucket_bytes", bucket_bytes, minimum=1, optional=True)
        if transfer not in ("auto", "gloo", "nccl"):
            raise ValueError(f"VLLMServer(transfer=...) must be 'auto', 'gloo' or 'nccl', got {transfer!r}")
        self.served_model = served_model
        self.start_timeout = start_timeout
        self.sync_timeout = sync_timeout
        self.transfer = check_transfer(transfer, device=None, colocate=False)
        self.bucket_bytes = bucket_bytes
        self.version: int | None = None
        self._connections: ServerConnections | None = None
        self._sync: ServerSync | None = None  # on rank 0, if weights can be sent
        self._takes_weights = False
        self._own_weights = False
        self._name = ""
        self._context = 0
        self._vocabulary = 0
        self._stops: tuple[int, ...] = ()
        self._given_tokenizer: Any = None
        self._tokenizer: Any = None  # the one in use
        self._same_vocabulary = True  # of the run's tokenizer and the model's own, which the servers have
        self._images: ImageRequests | None = None  # None: the model reads text only
        self._takes_images = False
        self._reports_raw: bool | None = None  # log-probs before temperature and truncation; None: not asked yet
        self._sync_metrics: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"VLLMServer({list(self.options.urls)!r})"

    @property
    def max_model_len(self) -> int | None:
        """Maximum tokens of prompt and completion, of the servers; ``None`` before :meth:`start`."""
        return self._context or None

    # ---------------------------------------------------------------- start and end

    def configure_tokenizer(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._given_tokenizer = tokenizer

    def start(
        self, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False, load_weights: bool = False
    ) -> None:
        """Connect; see :meth:`RolloutEngine.start`. ``dtype`` is the servers' own.

        Raises:
            EngineError: On all ranks, if a server does not answer, has other models, or is to be sent weights and
                cannot take them.
        """
        if self._stops:
            return
        try:
            run_on_all_ranks(lambda: self._start(model, trust_remote_code, load_weights), error_type=EngineError)
        except BaseException:
            self.close()
            raise
        self._own_weights = load_weights
        self.version = 0 if load_weights else None

    def _start(self, model: str, trust_remote_code: bool, load_weights: bool) -> None:
        from rlhfkit.models.attention.families import sees_images
        from rlhfkit.models.load import load_config, load_tokenizer, stop_token_ids

        connections, config = self._connect(), load_config(model, trust_remote_code=trust_remote_code)
        self._vocabulary = int(config.get_text_config().vocab_size)
        self._check_vocabulary(connections, model)
        if not load_weights:
            infos = [connections.submit(ask_server_info(connections, one)).result() for one in connections.endpoints]
            self._takes_weights = True
            if get_rank() == 0:
                sender = choose_sender(
                    infos,
                    self.transfer,
                    trainer_has_gpu=torch.cuda.is_available(),
                    timeout=self.sync_timeout,
                    bucket_bytes=self.bucket_bytes,
                )
                receivers = ServerReceivers(connections, [info.workers for info in infos], self.sync_timeout)
                self._sync = ServerSync(receivers, sender)
        own = load_tokenizer(model, trust_remote_code=trust_remote_code)
        tokenizer = own if self._given_tokenizer is None else self._given_tokenizer
        self._tokenizer, self._same_vocabulary = tokenizer, own.get_vocab() == tokenizer.get_vocab()
        if sees_images(config):
            from rlhfkit.models.vision import vision_processor
            from rlhfkit.rollout.vllm.images import ImageRequests

            processor = vision_processor(model, config, trust_remote_code=trust_remote_code)
            self._images = ImageRequests(processor, tokenizer)
            self._takes_images = all(
                connections.submit(takes_images(connections, one, self._name, timeout=_ASK_SECONDS)).result()
                for one in connections.endpoints
            )
        self._stops = stop_token_ids(model, tokenizer, trust_remote_code=trust_remote_code)

    def _connect(self) -> ServerConnections:
        """Open the connections, once, and learn the model's name and context."""
        if self._connections is not None:
            return self._connections
        self._connections, self._name, self._context = connect(self.options, self.served_model, self.start_timeout)
        return self._connections

    def _check_vocabulary(self, connections: ServerConnections, model: str) -> None:
        """Have every server compute the last token of the policy's vocabulary: one of a smaller model refuses it."""
        for endpoint in connections.endpoints:
            body = {"model": self._name, **score_body([self._vocabulary - 1])} | {"prompt_logprobs": None}
            try:
                connections.submit(connections.call(endpoint, "POST", COMPLETIONS, body, timeout=_ASK_SECONDS)).result()
            except EngineError as error:
                raise EngineError(f"{endpoint.url} cannot compute {model}, which it has to serve: {error}") from None

    def close(self) -> None:
        """Disconnect; the servers go on with the weights that they have."""
        if self._sync is not None:
            self._sync.close()
        if self._connections is not None:
            self._connections.close()
        self._connections, self._sync, self.version, self._given_tokenizer = None, None, None, None
        self._stops, self._takes_weights, self._reports_raw, self._context = (), False, None, 0
        self._images, self._takes_images = None, False

    # ---------------------------------------------------------------- weights

    def load(self, weights: WeightSource, version: int) -> None:
        """Send the weights to all servers, in whose log they have this version. Called on every rank.

        Nothing of ours may be in flight. After a failure ``version`` is ``None``, and a server that was being sent
        weights stays paused until a later sync succeeds.

        Raises:
            EngineError: If a server failed or did not confirm within ``sync_timeout``; on every rank.
        """
        if not self._takes_weights:
            raise RuntimeError("VLLMServer.load was called before VLLMServer.start, or for servers that only generate")
        before, self.version = self.version, None
        whole = weights.in_checkpoint_format()
        outcome = attempt_sync(whole, version, None, self._sync)
        if outcome.error is not None:
            if not outcome.started:
                self.version = before
            raise outcome.error
        self._own_weights, self.version = False, version
        self._sync_metrics = {"rollout/sync_bytes": float(sum(info.num_bytes for info in whole.metadata()))}

    def sync_metrics(self) -> dict[str, float]:
        """Return ``rollout/sync_bytes``, what the last :meth:`load` sent to each server."""
        return self._sync_metrics

    def _check_weights(self, connections: ServerConnections) -> None:
        """Raise WeightsNeededError if a server was started again, or sent weights by another run, since our sync."""
        if self._own_weights:
            return
        for endpoint, served in zip(connections.endpoints, served_versions(connections), strict=True):
            if served != str(self.version):
                raise WeightsNeededError(
                    f"{endpoint.url} serves the weights {served!r}, not version {self.version} of this run: it was "
                    "started again, or another run has sent it weights"
                )

    # ---------------------------------------------------------------- sampling

    def configure_logprobs(self, sampling: SamplingSpec) -> bool:
        """Whether the servers report log-probs at the sampling temperature before truncation.

        vLLM reports them either before temperature and truncation (``--logprobs-mode raw_logprobs``, its default) or
        after both (``processed_logprobs``), which is found out by asking every server.

        Raises:
            EngineError: If the servers differ in that, where it matters.
        """
        if sampling.constrained:  # a grammar removes tokens before vLLM takes either of them
            return False
        if sampling.temperature in (0.0, 1.0) and not sampling.truncates:
            return True
        if self._reports_raw is None:
            connections = self._connect()
            raw = {
                one.url: connections.submit(
                    reports_raw_logprobs(connections, one, self._name, timeout=_ASK_SECONDS)
                ).result()
                for one in connections.endpoints
            }
            if len(set(raw.values())) > 1:
                raise EngineError(
                    "the servers report different log-probs, those before the temperature "
                    f"({', '.join(url for url, before in raw.items() if before)}) and those after it "
                    f"({', '.join(url for url, before in raw.items() if not before)}): start all with the same "
                    "--logprobs-mode"
                )
            self._reports_raw = set(raw.values()) == {True}
        if self._reports_raw:
            return sampling.temperature in (0.0, 1.0)
        return not sampling.truncates

    @property
    def image_processor(self) -> Any:
        return self._images.processor if self._images is not None and self._takes_images else None

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """Sample on all servers, for this rank alone; see :meth:`RolloutEngine.generate`. Any thread."""
        return sample_all(self.stream(sampling, iteration=iteration), prompts, tokenizer=self._tokenizer)

    def stream(self, sampling: SamplingSpec, *, iteration: int) -> "ServerStream":
        """Return groups of this rank as they are finished. Any thread, several streams at a time.

        Raises:
            ValueError: If vLLM does not support these settings.
            WeightsNeededError: If a server does not have the weights of the last :meth:`load` any more.
        """
        connections = self._serving()
        check_vllm_sampling(sampling, same_vocabulary=self._same_vocabulary)
        self._check_weights(connections)
        return ServerStream(self, connections, sampling, iteration)

    def _serving(self) -> ServerConnections:
        if self._connections is None or not self._stops:
            raise RuntimeError("VLLMServer is not connected: VLLMServer.start comes first (RolloutCallback calls it)")
        if self.version is None:
            raise RuntimeError(
                "the servers have no complete weights of this run: none were loaded yet, or the last VLLMServer.load "
                "failed. RolloutCallback loads them; or call load() yourself"
            )
        return self._connections

    def score(self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Any, ...]] = ()) -> list[list[float]]:
        """Return the log-probs of given tokens, of the servers in turn; see :meth:`RolloutEngine.score`. Any thread."""
        connections = self._serving()
        check_scored(sequences, context=self._context, vocabulary=self._vocabulary)
        asked = [self._scores(connections, row, images[place] if images else ()) for place, row in enumerate(sequences)]
        futures = [connections.submit(one) for one in asked]
        return [parse_scores(future.result(), sequence) for future, sequence in zip(futures, sequences, strict=True)]

    async def _scores(self, connections: ServerConnections, sequence: Sequence[int], images: Sequence[Any]) -> Any:
        if images:
            assert self._images is not None
            sent = self._images.sent(sequence, images)
            return await ask_with_images(connections, self._name, sequence, sent)
        return await connections.ask(COMPLETIONS, {"model": self._name, **score_body(sequence)})


# ---------------------------------------------------------------- streams


class ServerStream:
    """A :class:`~rlhfkit.rollout.collector.GroupStream`, for one thread at a time; several may be open at once.

    ``iteration`` is that of prompts submitted without one.
    """

    def __init__(
        self, server: VLLMServer, connections: ServerConnections, sampling: SamplingSpec, iteration: int
    ) -> None:
        self._server = server
        self._connections = connections
        self._iteration = iteration
        self._groups = OpenGroups(sampling)
        self._knows_logprobs = server.configure_logprobs(sampling)
        self._version = server.version or 0
        self._running: dict[Future[Group], int] = {}  # by number of the prompt
        self._done: queue.SimpleQueue[Future[Group]] = queue.SimpleQueue()

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        """Start these groups too; RequestError, before anything is sent, if a prompt cannot be sampled."""
        server = self._server
        limits = {"context": server._context, "vocabulary": server._vocabulary}
        check_requests(prompts, self._groups.sampling, **limits, sees_images=server.image_processor is not None)
        for number, prompt in zip(self._groups.open(prompts), prompts, strict=True):
            group = self._group(prompt, self._iteration if iteration is None else iteration)
            future = self._connections.submit(group)
            self._running[future] = number
            future.add_done_callback(self._done.put)

    async def _group(self, prompt: Prompt, iteration: int) -> Group:
        async with asyncio.TaskGroup() as tasks:
            made = [
                tasks.create_task(self._sample(prompt, index, iteration))
                for index in range(self._groups.sampling.group_size)
            ]
        return [task.result() for task in made]

    async def _sample(self, prompt: Prompt, index: int, iteration: int) -> Sample:
        server, sampling = self._server, self._groups.sampling
        request = sample_request(prompt, index, sampling, iteration, server._stops)
        if server._images is not None:
            request = server._images.request(request, prompt.attachments)
        token_ids, arguments = request
        if (images := arguments.pop("images", None)) is not None:
            answer = await ask_with_images(self._connections, server._name, token_ids, images, arguments)
        else:
            answer = await self._connections.ask(COMPLETIONS, {"model": server._name, **sample_body(request)})
        token_ids, logprobs, finish = parse_completion(answer)
        if finish == "length" and len(token_ids) < sampling.max_new_tokens:
            raise EngineError(
                f"the server ended a completion after {len(token_ids)} of {sampling.max_new_tokens} tokens, a limit of "
                "its own: start it with --generation-config vllm"
            )
        return Sample(
            prompt,
            index,
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=np.array(logprobs if self._knows_logprobs else [math.nan] * len(token_ids), dtype=np.float32),
            finish_reason="stop" if finish == "stop" else "length",
            versions=np.full(len(token_ids), self._version),
        )

    def collect(self, most: int, *, wait: float | None = None) -> list[Group]:
        """Wait for groups, up to ``wait`` seconds.

        Raises:
            RequestError: If a server refuses a request.
            EngineError: If no server answers one.
        """
        deadline = math.inf if wait is None else time.monotonic() + wait
        while not self._groups.complete and self._running:
            left = deadline - time.monotonic()
            try:
                self._take(self._done.get(timeout=None if left == math.inf else max(left, 0.0)))
            except queue.Empty:
                return []
            while not self._done.empty():
                self._take(self._done.get())
        return self._groups.take(most)

    def _take(self, future: Future[Group]) -> None:
        number = self._running.pop(future)
        try:
            self._groups.add(number, future.result())
        except ExceptionGroup as failures:  # of a task group; the other requests of the group were cancelled
            raise failures.exceptions[0] from None

    def close(self) -> None:
        for future in self._running:
            future.cancel()
        self._running = {}
        self._groups.clear()
