"""``Run``: everything about a run that its costs depend on, as plain values.

:func:`~rlhfkit.costs.estimation.estimate` makes one from a module, its data and its callbacks; it can be written by
hand as well.
"""

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from rlhfkit.costs.hardware import GPU, Efficiency
from rlhfkit.costs.model_shape import ModelShape
from rlhfkit.mesh import Mesh, SequenceParallel
from rlhfkit.models.load import precision_dtype
from rlhfkit.modules.optimizers.factories import StateBytes
from rlhfkit.validation import check_integer, check_number


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How training is spread over its ranks."""

    ranks: int = 1
    sequence: int = 1
    """Ranks that divide the tokens of a forward pass (``sequence_parallel_size``)."""
    tensor: int = 1
    """Ranks that divide the weights of every layer (``tensor_parallel_size``)."""
    sequence_parallel: SequenceParallel = "ulysses"
    stage: int | None = None
    """ZeRO stage of a DeepSpeed engine, 0 to 3; ``None``: Lightning's own strategies, with DDP on several ranks."""
    offload_optimizer: bool = False
    """Main weights, moments and gradients for them are in the host's memory."""
    offload_parameters: bool = False
    """ZeRO 3: shards of the weights are in the host's memory."""
    bucket: int = 200_000_000
    """Gradients that are reduced at once, in numbers (Lightning's ``DeepSpeedStrategy(reduce_bucket_size=...)``)."""
    overlap: bool = True
    """A second bucket is filled while the first is reduced, at stage 2; off at lower stages (``engine_config``)."""
    live_parameters: int = 1_050_000_000
    """ZeRO 3: most numbers of gathered weights (DeepSpeed's ``max_live_parameters`` and ``prefetch_bucket_size``)."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_integer("Sharding.ranks", self.ranks, minimum=1)
        Mesh(world_size=self.ranks, sequence=self.sequence, tensor=self.tensor)
        if self.sequence_parallel not in get_args(SequenceParallel):
            raise ValueError(
                f"Sharding.sequence_parallel must be one of {', '.join(get_args(SequenceParallel))}, got "
                f"{self.sequence_parallel!r}"
            )
        check_integer("Sharding.stage", self.stage, minimum=0, maximum=3, optional=True)
        check_integer("Sharding.bucket", self.bucket, minimum=1)
        check_integer("Sharding.live_parameters", self.live_parameters, minimum=1)

    @property
    def group(self) -> int:
        """Ranks that compute a forward pass together."""
        return self.sequence * self.tensor

    @property
    def data(self) -> int:
        """Groups of ranks that compute forward passes together."""
        return self.ranks // self.group

    @property
    def shards(self) -> int:
        """Ranks with the same part of every weight, over which ZeRO divides it."""
        return self.ranks // self.tensor


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of a number, by what it is used for."""

    weights: int = 2
    compute: int = 2
    """Of matrix products; less than ``weights`` under Lightning's ``-mixed``."""
    main_weights: int = 4
    """Of the copy that the optimizer updates and of its moments; equal to ``weights``: there is no copy."""

    @classmethod
    def of(cls, precision: str | int, *, deepspeed: bool) -> "Precision":
        """Of Lightning's ``precision``; under DeepSpeed ``-true`` and ``-mixed`` have float32 main weights alike."""
        compute = precision_dtype(str(precision), compute=True).itemsize
        weights = compute if deepspeed else precision_dtype(str(precision)).itemsize
        return cls(weights=weights, compute=compute, main_weights=max(weights, 4) if deepspeed else weights)


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """The engines that generate."""

    count: int = 1
    tensor_parallel: int = 1
    """GPUs that divide every layer."""
    pipeline_parallel: int = 1
    """Stages of consecutive layers, each on ``tensor_parallel`` GPUs."""
    data_parallel: int = 1
    """Replicas of both that divide requests, and the experts of a mixture."""
    memory_share: float = 0.9
    """The share of a GPU that an engine may use (``gpu_memory_utilization``)."""
    cache_bytes: float | None = None
    """Of the key-value cache per GPU; ``None``: what is left of the share."""
    itemsize: int = 2
    """Bytes of a weight and of a number in the cache."""
    quantized: bool = False
    """Weights are held in 8 bits, but for embedding and output layer."""
    cache_itemsize: int | None = None
    """Bytes of a number in the cache; ``None``: ``itemsize``."""
    takes_adapter: bool = False
    """The engines apply LoRA's matrices themselves, and are sent nothing else."""
    colocated: bool = False
    """On the GPUs of the training ranks, asleep while these train."""
    sleeping_weights_on_host: bool = False
    """Sleeping engines move their weights to the host's memory (vLLM's level 1) and do not drop them (level 2)."""
    local: bool = False
    """A :class:`~rlhfkit.LocalEngine` in every rank: a model that stays, and no paged cache."""
    shares_weights: bool = False
    """A ``LocalEngine`` uses the memory of the policy's weights, and has no copy of them."""
    max_sequences: int = 1024
    """Sequences that are decoded at once at most (vLLM's default for large GPUs)."""
    prefill_tokens: int = 16384
    """Tokens of prompts in one step (vLLM's default for large GPUs)."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in (
            *("count", "tensor_parallel", "pipeline_parallel", "data_parallel"),
            *("max_sequences", "prefill_tokens"),
        ):
            check_integer(f"EngineShape.{name}", getattr(self, name), minimum=1)
        check_number("EngineShape.memory_share", self.memory_share, above=0, maximum=1)
        check_number("EngineShape.cache_bytes", self.cache_bytes, above=0, optional=True)


PlacedRole = Literal["reference", "reward model", "teacher", "critic", "frozen critic"]
"""What a model on GPUs of its own is for; a ``critic`` is trained there."""


@dataclass(frozen=True, kw_only=True)
class PlacedModel:
    """A model on GPUs of its own."""

    role: PlacedRole
    shape: ModelShape
    replicas: int = 1
    """Of the whole model, which share the requests; of a critic 1."""
    gpus: int = 1
    """Of a replica, over which its weights are sharded; of a critic its ranks."""
    name: str = ""
    """Of one of several models with the same role."""
    sharding: Sharding | None = None
    """Of a critic; ``None``: ZeRO 3 where it has several ranks, else 2."""
    precision: Precision | None = None
    """Of a critic; ``None``: that of the policy."""
    optimizer_state: StateBytes | None = None
    """Of a critic's optimizer; ``None``: that of the policy."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.role not in get_args(PlacedRole):
            raise ValueError(f"PlacedModel.role must be one of {', '.join(get_args(PlacedRole))}, got {self.role!r}")
        check_integer("PlacedModel.replicas", self.replicas, minimum=1, maximum=1 if self.role == "critic" else None)
        check_integer("PlacedModel.gpus", self.gpus, minimum=1)

    @property
    def label(self) -> str:
        """The role, and which of several models it is."""
        return f"{self.role} {self.name}" if self.name else self.role

    @property
    def total_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.replicas * self.gpus


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run. Without an ``engine`` it learns from data; an "iteration" is then one optimizer step."""

    policy: ModelShape
    gpu: GPU
    sharding: Sharding = field(default_factory=Sharding)
    precision: Precision = field(default_factory=Precision)
    critic: ModelShape | None = None
    reference: ModelShape | None = None
    """A frozen copy; ``None``: there is none, or the policy without its adapters is the reference."""
    reference_is_policy: bool = False
    """Whether the policy without its adapters is the reference: no weights, and one more forward pass."""
    reward_model: ModelShape | None = None
    more_reward_models: tuple[ModelShape, ...] = ()
    """Beside ``reward_model``, where the reward is the sum of several."""
    teacher: ModelShape | None = None
    more_teachers: tuple[ModelShape, ...] = ()
    """Beside ``teacher``, where prompts have different ones: each computes its own prompts' samples."""
    placed: tuple[PlacedModel, ...] = ()
    """Models that the training ranks do not hold; of each role, either here or above."""
    asked_by_group: bool = True
    """Whether placed frozen models are asked as soon as a group is finished, and not when all groups are."""
    engine: EngineShape | None = None
    optimizer_state: StateBytes | None = None
    """What the optimizer needs per parameter; ``None``: AdamW's default kernels, with moments like the main weights."""
    offload_training: bool = False
    """Training states go to the host's memory while colocated engines generate."""
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    """What ``gradient_checkpointing`` keeps waits in the host's memory."""
    tiled_mlp: bool | int = False
    """Feed-forward blocks are computed in tiles of so many tokens; true: as many as the hidden size."""
    attention: str = "packed"
    """``eager`` holds all scores of a sequence's tokens with one another; others do not."""
    entropy: bool = False
    """Whether entropy is computed beside log-probs."""
    shared_prefix: bool = True
    """Whether packed rows hold once what their sequences share: the prompt of a group."""

    sequences: int = 64
    """Of an iteration, all ranks together."""
    group_size: int = 1
    prompt_tokens: float = 256.0
    """Mean of a prompt."""
    answer_tokens: float = 1024.0
    """Mean of an answer."""
    max_answer_tokens: int = 1024
    """An answer is cut off at it."""
    answer_spread: float = 0.6
    """Standard deviation of the logarithm of the answers' lengths (lognormal); 0: all are equally long."""
    micro_batch_tokens: float = 16384.0
    """Tokens of a forward and backward pass, padding not counted: of a rank's micro-batch, or of those of all ranks of
    a forward group together. Where these differ: of the largest."""
    micro_batch_sequences: int | None = None
    """Sequences of a micro-batch, where their number is fixed; ``None``: as many as have ``micro_batch_tokens``."""
    trained_share: float = 1.0
    """The share of a micro-batch's tokens that go through the output layer with gradient."""
    updates: int = 1
    """Optimizer updates of an iteration, of all passes."""
    passes: int = 1
    """Times that each sequence is trained on in an iteration."""
    sequences_together: int = 1
    """Sequences that are in one micro-batch always: 2 of a preference pair."""
    prepare_tokens: int = 16192
    """Tokens of a forward pass without gradient (``max_tokens_per_forward``) that a rank brings."""
    old_logprobs: bool = False
    """Whether the old log-probs of all sequences are computed, and not only of those after the first update."""
    later_logprobs: bool = True
    """Whether those after the first update are computed, unless one pass is one update."""
    score_seconds: float = 0.0
    """Of scoring an iteration, beyond what overlaps with generation."""
    max_staleness: int = 0
    """Iterations that generation may be ahead of training; above 0 the two overlap."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    gpus_per_machine: int = 8

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("sequences", "group_size", "max_answer_tokens", "updates", "passes", "prepare_tokens"):
            check_integer(f"Run.{name}", getattr(self, name), minimum=1)
        check_integer("Run.gpus_per_machine", self.gpus_per_machine, minimum=1)
        check_integer("Run.sequences_together", self.sequences_together, minimum=1)
        check_integer("Run.max_staleness", self.max_staleness, minimum=0)
        check_integer("Run.micro_batch_sequences", self.micro_batch_sequences, minimum=1, optional=True)
        held = {"critic": self.critic, "reference": self.reference, "teacher": self.teacher}
        labels = [model.label for model in self.placed]
        if len(set(labels)) < len(labels):
            raise ValueError(f"Run.placed has several models of one role and name: {', '.join(labels)}")
        held |= {"frozen critic": self.critic}
        for role in (model.role for model in self.placed if not model.name):
            if (held | {"reward model": self.reward_model}).get(role) is not None:
                raise ValueError(f"Run.placed has the {role}, and the training ranks have one: leave one of them out")
        for name in ("prompt_tokens", "micro_batch_tokens"):
            check_number(f"Run.{name}", getattr(self, name), above=0)
        for name in ("answer_tokens", "answer_spread", "score_seconds"):
            check_number(f"Run.{name}", getattr(self, name), minimum=0)
        check_number("Run.trained_share", self.trained_share, minimum=0, maximum=1)

    @property
    def gpus(self) -> int:
        """All GPUs: of training ranks, of engines that are not on these, and of placed models."""
        engine = self.engine
        own = 0
        if engine is not None and not (engine.colocated or engine.local):
            own = engine.count * engine.tensor_parallel * engine.pipeline_parallel * engine.data_parallel
        return self.sharding.ranks + own + sum(model.total_gpus for model in self.placed)

    @property
    def sequence_tokens(self) -> float:
        """Mean tokens of a prompt and its answer."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def tokens(self) -> float:
        """Tokens of an iteration, all ranks together, that training computes.

        Prompts count once for the samples of a group in a micro-batch.
        """
        together = min(self.group_size, self.micro_batch_sequences or self.group_size)
        shared = together if self.shared_prefix and self.attention == "packed" else 1
        return self.sequences * (self.answer_tokens + self.prompt_tokens / shared)

    @property
    def longest(self) -> float:
        """Tokens of the longest sequence that fits into the limits; of given data, all are equally long."""
        return self.sequence_tokens if self.engine is None else self.prompt_tokens + self.max_answer_tokens

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a forward group in an iteration."""
        if self.micro_batch_sequences is not None:
            return max(1, round(self.sequences * self.passes / (self.micro_batch_sequences * self.sharding.data)))
        return max(1, round(self.tokens * self.passes / (self.micro_batch_tokens * self.sharding.data)))

    def tile(self, shape: ModelShape) -> float | None:
        """Tokens of a tile of a model's feed-forward blocks; ``None``: these are computed at once."""
        if self.tiled_mlp is False or shape.experts:
            return None
        size = shape.layer.hidden if self.tiled_mlp is True else self.tiled_mlp
        return float(size) if size < self.part_tokens else None

    @property
    def part_tokens(self) -> float:
        """Tokens of a micro-batch that a rank computes: its part of those of its forward group."""
        return self.micro_batch_tokens / self.sharding.sequence

    @property
    def trained_part_tokens(self) -> float:
        """Most tokens that go through the output layer of a rank: answers after a long prompt all lie in its end."""
        return min(self.micro_batch_tokens * self.trained_share, self.part_tokens)

    def state_bytes(self, shape: ModelShape) -> float:
        """Mean bytes of the optimizer's state per trained parameter of a model."""
        if self.optimizer_state is None:
            return 2.0 * self.precision.main_weights
        return _mean(shape, self.optimizer_state.matrices, self.optimizer_state.others)

    def step_bytes(self, shape: ModelShape) -> float:
        """Mean bytes of the temporary tensors of the optimizer's step per trained parameter of a model."""
        if self.optimizer_state is None:
            return 2.0 * self.precision.main_weights
        return _mean(shape, self.optimizer_state.step_matrices, self.optimizer_state.step_others)

    def orthogonal_flops(self, shape: ModelShape) -> float:
        """Operations of Muon's step per trained parameter: of an iteration ``4 H + 2 H`` for a matrix of H rows.

        With X of H rows and as many columns or more those are ``X X'``, its square, and its product with X. Of adapters
        they are few.
        """
        if self.optimizer_state is None or shape.adapters:
            return 0.0
        return _mean(shape, 6.0 * shape.layer.hidden * self.optimizer_state.orthogonal_steps, 0.0)

    def of_trained(self, shape: ModelShape) -> "Run":
        """The run with the types in which a model's trained parameters are.

        Under Lightning's own strategies adapters stay in float32 beside weights of 16 bits
        (:func:`~rlhfkit.models.lora.add_lora`).
        """
        if not shape.adapters or self.sharding.stage is not None:
            return self
        return replace(self, precision=Precision(weights=4, compute=self.precision.compute, main_weights=4))


def _mean(shape: ModelShape, matrices: float, others: float) -> float:
    """The mean of a number per parameter in matrices and one per parameter in others."""
    if shape.adapters:
        return matrices
    part = (shape.embedding + shape.head + shape.experts) / shape.parameters  # norms and biases are few
    return part * others + (1 - part) * matrices
