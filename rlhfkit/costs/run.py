"""``Run``: everything that the costs of a run depend on, as plain values.

:func:`~rlhfkit.costs.estimate` makes one from a module, its data and its callbacks; it can be written by hand as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlhfkit.costs.model_shape import ModelShape
from rlhfkit.mesh import Mesh
from rlhfkit.models.load import precision_dtype
from rlhfkit.modules.optimizers.factories import StateBytes
from rlhfkit.validation import check_number

GIB = 2**30


@dataclass(frozen=True)
class GPU:
    """One accelerator. Rates are per GPU and second, dense ones (data sheets quote twice as much with sparsity)."""

    name: str
    memory: float
    """Bytes that a program sees."""
    flops: float
    """Dense bfloat16 multiplications and additions, each counted once."""
    bandwidth: float
    """Bytes from and to its own memory."""

    def __post_init__(self) -> None:
        """Check every number."""
        for name in ("memory", "flops", "bandwidth"):
            check_number(f"GPU.{name}", getattr(self, name), above=0)


_SHEETS = (
    GPU("A100-40GB", 39.4 * GIB, 312e12, 1.555e12),  # NVIDIA A100 data sheet (2021), SXM4
    GPU("A100", 79.1 * GIB, 312e12, 2.039e12),
    GPU("H100", 79.1 * GIB, 989e12, 3.35e12),  # NVIDIA H100 data sheet (2023), SXM5
    GPU("H100-NVL", 93.1 * GIB, 835e12, 3.9e12),
    GPU("H100-PCIe", 79.1 * GIB, 756e12, 2e12),
    GPU("H200", 139.8 * GIB, 989e12, 4.8e12),  # NVIDIA H200 data sheet (2024), SXM5
    GPU("B200", 178.0 * GIB, 2250e12, 8e12),  # NVIDIA DGX B200 data sheet (2024), an eighth of it
    GPU("L40S", 44.4 * GIB, 362e12, 0.864e12),  # NVIDIA L40S data sheet (2023), PCIe 4.0
    GPU("L4", 22.0 * GIB, 121e12, 0.3e12),  # NVIDIA L4 data sheet (2023)
    GPU("A10G", 22.0 * GIB, 70e12, 0.6e12),  # AWS G5 and NVIDIA A10G data sheet (2021)
    GPU("RTX-4090", 23.5 * GIB, 165e12, 1.008e12),  # NVIDIA Ada architecture whitepaper (2022), 32-bit accumulation
    GPU("MI300X", 191.5 * GIB, 1307e12, 5.3e12),  # AMD Instinct MI300X data sheet (2023)
)
GPUS = {gpu.name: gpu for gpu in _SHEETS}
"""Known GPUs by name, with the numbers of their vendors' data sheets."""


def find_gpu(name: str | GPU) -> GPU:
    """The GPU of a name, upper and lower case alike, or the given one.

    Raises:
        ValueError: If the name is not in :data:`GPUS`; the message lists what is.
    """
    if isinstance(name, GPU):
        return name
    found = next((gpu for known, gpu in GPUS.items() if known.lower() == name.lower()), None)
    if found is None:
        raise ValueError(
            f"gpu must be one of {', '.join(GPUS)}, got {name!r}; for another one give "
            "estimate(gpu=GPU(name=..., memory=..., flops=..., bandwidth=...)), imported from rlhfkit.costs"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How training is spread over its ranks."""

    ranks: int = 1
    sequence: int = 1
    """Ranks that divide the tokens of a forward pass (``sequence_parallel_size``)."""
    tensor: int = 1
    """Ranks that divide the weights of every layer (``tensor_parallel_size``)."""
    stage: int | None = None
    """ZeRO stage of a DeepSpeed engine, 0 to 3; ``None``: Lightning's own strategies, with DDP on several ranks."""
    offload_optimizer: bool = False
    """Main weights, moments and gradients for them are in the host's memory."""
    offload_parameters: bool = False
    """ZeRO 3: shards of the weights are in the host's memory."""
    bucket: int = 200_000_000
    """Gradients that are reduced at once, in numbers (Lightning's ``DeepSpeedStrategy(reduce_bucket_size=...)``)."""
    live_parameters: int = 1_050_000_000
    """ZeRO 3: most numbers of gathered weights (DeepSpeed's ``max_live_parameters`` and ``prefetch_bucket_size``)."""

    def __post_init__(self) -> None:
        """Check that the groups divide the ranks."""
        Mesh(world_size=self.ranks, sequence=self.sequence, tensor=self.tensor)

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
    colocated: bool = False
    """On the GPUs of the training ranks, asleep while these train."""
    local: bool = False
    """A :class:`~rlhfkit.LocalEngine` in every rank: a model that stays, and no paged cache."""
    shares_weights: bool = False
    """A ``LocalEngine`` uses the memory of the policy's weights, and has no copy of them."""
    max_sequences: int = 1024
    """Sequences that are decoded at once at most (vLLM's default for large GPUs)."""
    prefill_tokens: int = 16384
    """Tokens of prompts in one step (vLLM's default for large GPUs)."""

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


@dataclass(frozen=True, kw_only=True)
class PlacedModel:
    """A model on GPUs of its own: a frozen one, or a critic that is trained there."""

    role: str
    """Reference, teacher, reward model or critic, with a name where there are several."""
    shape: ModelShape
    replicas: int = 1
    """Of the whole model, which share the requests."""
    gpus: int = 1
    """Of a replica, over which its weights are divided; of a critic its ranks."""
    sharding: Sharding | None = None
    """Of a model that is trained; ``None``: a frozen one."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run. Without an ``engine`` it learns from data; an "iteration" is then one optimizer step."""

    policy: ModelShape
    gpu: GPU
    sharding: Sharding = field(default_factory=Sharding)
    precision: Precision = field(default_factory=Precision)
    critic: ModelShape | None = None
    """Trained beside the policy, by the same ranks."""
    frozen: Mapping[str, ModelShape] = field(default_factory=dict)
    """Frozen models that the training ranks hold, by role: reference, reward models, teachers."""
    placed: tuple[PlacedModel, ...] = ()
    """Models that the training ranks do not hold."""
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

    sequences: int = 64
    """Of an iteration, all ranks together."""
    group_size: int = 1
    prompt_tokens: float = 256.0
    """Mean of a prompt."""
    answer_tokens: float = 1024.0
    """Mean of an answer."""
    max_answer_tokens: int = 1024
    """An answer is cut off at it."""
    tokens: float = 81920.0
    """Of an iteration, all ranks together; a packed row holds the prompt once for the samples of a group in it."""
    micro_batch_tokens: float = 16384.0
    """Tokens of a forward and backward pass, padding not counted: of a rank's micro-batch, or of the micro-batches of
    all ranks that compute forward passes together. The largest counts."""
    trained_share: float = 1.0
    """The share of a micro-batch's tokens that go through the output layer with gradient."""
    passes: int = 1
    """Times that each sequence is trained on in an iteration."""
    prepare_tokens: int = 16384
    """Tokens of a forward pass without gradient (``max_tokens_per_forward``) that a rank brings."""
    policy_passes: float = 0.0
    """Forward passes of the policy over an iteration before its updates: old log-probs, and as its own reference."""
    max_staleness: int = 0
    """Iterations that generation may be ahead of training; above 0 the two overlap."""

    @property
    def trained(self) -> dict[str, ModelShape]:
        """Models that the training ranks train, by role."""
        return {"policy": self.policy} | ({"critic": self.critic.with_scalar_head()} if self.critic else {})

    @property
    def held(self) -> dict[str, ModelShape]:
        """All models on the training ranks, by role."""
        return self.trained | dict(self.frozen)

    @property
    def gpus(self) -> int:
        """All GPUs: of training ranks, of engines that are not on these, and of placed models."""
        engine = self.engine
        apart = engine is not None and not (engine.colocated or engine.local)
        engines = engine.count * engine.gpus if engine is not None and apart else 0
        return self.sharding.ranks + engines + sum(model.replicas * model.gpus for model in self.placed)

    @property
    def sequence_tokens(self) -> float:
        """Mean tokens of a prompt and its answer."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def longest(self) -> float:
        """Tokens of the longest sequence that fits into the limits; of given data, all are equally long."""
        return self.sequence_tokens if self.engine is None else self.prompt_tokens + self.max_answer_tokens

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

    def of_trained(self, shape: ModelShape) -> "Run":
        """The run with the types in which a model's trained parameters are.

        Under Lightning's own strategies adapters stay in float32 beside weights of 16 bits
        (:func:`~rlhfkit.models.lora.add_lora`).
        """
        if not shape.adapters or self.sharding.stage is not None:
            return self
        return replace(self, precision=Precision(weights=4, compute=self.precision.compute, main_weights=4))

    def optimizer(self, shape: ModelShape) -> tuple[float, float]:
        """Mean bytes per trained parameter of a model: of the optimizer's state, and of its step's temporaries."""
        moments = 2.0 * self.precision.main_weights
        state = self.optimizer_state or StateBytes(moments, moments, moments, moments)
        others = 0.0 if shape.adapters else (shape.embedding + shape.head + shape.experts) / shape.parameters
        return (
            others * state.others + (1 - others) * state.matrices,
            others * state.step_others + (1 - others) * state.step_matrices,
        )
