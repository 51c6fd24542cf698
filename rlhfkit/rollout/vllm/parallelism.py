"""``Parallelism``: over how many processes a vLLM engine divides its model, and which models can be divided so.

An engine has ``tensor * pipeline * data`` processes, each with a device of its own. Placement, weight transfers and
health checks count them, so vLLM must not be given other numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhfkit.rollout.errors import EngineError
from rlhfkit.validation import check_integer

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
# Arguments of vLLM 0.32 that also change how many processes an engine has, or spread them over machines.
_OTHER_PROCESSES = frozenset(
    {
        "prefill_context_parallel_size",
        "data_parallel_size_local",
        "data_parallel_rank",
        "data_parallel_start_rank",
        "data_parallel_address",
        "data_parallel_rpc_port",
        "data_parallel_hybrid_lb",
        "data_parallel_external_lb",
        "data_parallel_multi_port_external_lb",
        "data_parallel_backend",
        "enable_expert_parallel",
        "distributed_executor_backend",
        "enable_elastic_ep",
        "elastic_ep_max_dp_size",
        "nnodes",
        "node_rank",
        "master_addr",
        "master_port",
        "device_ids",
    }
)
# How configurations of mixtures of experts call the number of experts, as vLLM 0.32 looks for it.
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True)
class Parallelism:
    """The sizes of one engine.

    Raises:
        ValueError: If a size is less than 1.
    """

    tensor: int = 1
    """Parts into which every layer is divided."""
    pipeline: int = 1
    """Stages of consecutive layers."""
    data: int = 1
    """Replicas of the attention layers, among which requests and experts are divided."""
    experts: bool = False
    """Whether whole experts are dealt to the processes of a stage; else each expert is divided over them."""

    def __post_init__(self) -> None:
        for name, size in zip(_SIZES, (self.tensor, self.pipeline, self.data), strict=True):
            check_integer(name, size, minimum=1)
        if self.experts and self.tensor * self.data == 1:
            raise ValueError(
                "VLLMPool(expert_parallel=True) deals experts to tensor_parallel_size * data_parallel_size processes, "
                "which is 1: raise one of them"
            )

    @property
    def processes(self) -> int:
        """Processes of an engine that hold weights; on GPUs each has one."""
        return self.tensor * self.pipeline * self.data

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``vllm.EngineArgs``."""
        arguments: dict[str, Any] = dict(zip(_SIZES, (self.tensor, self.pipeline, self.data), strict=True))
        if self.experts:
            arguments["enable_expert_parallel"] = True
        if self.processes > 1:
            # Processes of the engine's own actor. In an actor that Ray has placed vLLM would choose actors of Ray.
            arguments["distributed_executor_backend"] = "mp"
        return arguments

    def check_engine_arguments(self, given: Mapping[str, Any]) -> None:
        """Raise ValueError if ``VLLMPool(engine_arguments=...)`` has other sizes or spreads an engine over machines."""
        mine = dict(zip(_SIZES, (self.tensor, self.pipeline, self.data), strict=True))
        same = mine | {"enable_expert_parallel": self.experts}
        wrong = [
            name for name in given if name in mine.keys() | _OTHER_PROCESSES and given[name] != same.get(name, ...)
        ]
        if wrong:
            raise ValueError(
                f"VLLMPool(engine_arguments=...) must leave {', '.join(wrong)} out: devices and weight transfers are "
                f"laid out for VLLMPool({', '.join(f'{name}={size}' for name, size in mine.items())}), where sizes are "
                "given (expert_parallel too), and engines are divided over machines by rlhfkit"
            )

    def weight_bytes(self, arguments: Mapping[str, Any]) -> float:
        """Return the least bytes of weights in each process of an engine; 0: unknown.

        ``arguments`` are those of ``vllm.EngineArgs``. Quantized weights count with 4 bits, whatever their type.
        """
        import torch

        from rlhfkit.models.load import count_parameters, load_config

        if arguments.get("cpu_offload_gb"):  # they need not be on the GPU
            return 0.0
        trust = bool(arguments.get("trust_remote_code"))
        try:
            config = load_config(arguments["model"], trust_remote_code=trust)
            count = count_parameters(config, trust_remote_code=trust)
        except Exception:  # a model that vLLM knows and Transformers does not, or not as a language model
            return 0.0
        if arguments.get("quantization") or getattr(config, "quantization_config", None):
            return count * 0.5 / self.processes
        dtype = getattr(torch, str(arguments["dtype"]), torch.bfloat16)  # "auto" makes it 16 bits
        return float(count * dtype.itemsize / self.processes)

    def check_device(self, device: str) -> None:
        """Raise EngineError for what vLLM 0.32 divides on GPUs only.

        Tokens of experts: there is no ``all_gatherv`` on CPUs. Whole experts: the CPU kernel ignores ``expert_map``,
        and reads beyond the experts that its process has.
        """
        if device == "cpu" and self.experts:
            raise EngineError(
                "vLLM's CPU build starts with expert_parallel=True and crashes at the first request: leave it out, and "
                "every expert is divided over tensor_parallel_size processes"
            )
        if device == "cpu" and self.data > 1:
            raise EngineError(
                f"vLLM's CPU build starts data_parallel_size={self.data} and fails at the first request: leave it out, "
                "and raise num_engines or tensor_parallel_size"
            )

    def check_model(self, config: Any) -> None:
        """Raise EngineError if a model (Transformers' configuration) cannot be divided so, before engines start.

        vLLM would find out in the engine's processes, minutes later. It has further rules for some families.
        """
        text = config.get_text_config()
        problems = [*_tensor_problems(text, self.tensor), *_pipeline_problems(text, self.pipeline)]
        experts = next((count for name in _EXPERTS if isinstance(count := getattr(text, name, None), int)), 0)
        if self.experts and experts < self.tensor * self.data:
            problems.append(
                f"expert_parallel=True needs an expert for each of tensor_parallel_size * data_parallel_size = "
                f"{self.tensor * self.data} processes, and this model has {experts}"
            )
        if self.data > 1 and not experts:
            problems.append(
                f"data_parallel_size={self.data} divides the experts of a mixture, and this model has none: give "
                f"VLLMPool(num_engines=...) {self.data} times as many engines, which also fail and restart one by one"
            )
        if problems:
            raise EngineError(f"vLLM cannot divide {type(config).__name__} as asked: {'; '.join(problems)}")


def _tensor_problems(text: Any, size: int) -> list[str]:
    heads = getattr(text, "num_attention_heads", None)
    if size == 1 or not isinstance(heads, int):
        return []
    if heads % size:
        return [f"tensor_parallel_size={size} must divide its {heads} attention heads"]
    shared = getattr(text, "num_key_value_heads", None)
    if isinstance(shared, int) and shared and shared % size and size % shared:
        return [f"tensor_parallel_size={size} must be a divisor or a multiple of its {shared} key-value heads"]
    return []


def _pipeline_problems(text: Any, size: int) -> list[str]:
    layers = getattr(text, "num_hidden_layers", None)
    if size > 1 and isinstance(layers, int) and layers < size:
        return [f"pipeline_parallel_size={size} must not exceed its {layers} layers"]
    return []
