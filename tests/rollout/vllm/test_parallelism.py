"""How many processes an engine has, what vLLM may not be told about it, and which models can be divided.

``test_plugin.py`` compares the processes and their ranks with vLLM's own count.
"""

import ast
import asyncio
import contextlib
import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model
from transformers import LlamaConfig, MixtralConfig

from rlhfkit import VLLMPool
from rlhfkit.models import load_causal_lm
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.vllm.actor import VLLMActor
from rlhfkit.rollout.vllm.arguments import CPU_HEAD_SIZES, check_head_size, has_cpu_build
from rlhfkit.rollout.vllm.parallelism import Parallelism

LLAMA = LlamaConfig(num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=4)
MIXTRAL = MixtralConfig(num_attention_heads=8, num_key_value_heads=8, num_hidden_layers=4, num_local_experts=4)


@pytest.mark.parametrize(
    ("sizes", "config", "says"),
    [
        (Parallelism(), LLAMA, ""),
        (Parallelism(tensor=8), LLAMA, ""),  # four copies of each key-value head
        (Parallelism(tensor=2, pipeline=4), LLAMA, ""),
        (Parallelism(pipeline=3), LLAMA, ""),
        (Parallelism(tensor=2, data=2), MIXTRAL, ""),
        (Parallelism(tensor=2, data=2, experts=True), MIXTRAL, ""),
        (Parallelism(tensor=3), LLAMA, "tensor_parallel_size=3 must divide its 8 attention heads"),
        (
            Parallelism(tensor=4),
            LlamaConfig(hidden_size=48, num_attention_heads=12, num_key_value_heads=6),
            "tensor_parallel_size=4 must be a divisor or a multiple of its 6 key-value heads",
        ),
        (Parallelism(pipeline=5), LLAMA, "pipeline_parallel_size=5 must not exceed its 4 layers"),
        (Parallelism(data=2), LLAMA, "this model has none: give VLLMPool(num_engines=...) 2 times as many"),
        (Parallelism(tensor=2, experts=True), LLAMA, "data_parallel_size = 2 processes, and this model has 0"),
        (Parallelism(tensor=8, experts=True), MIXTRAL, "data_parallel_size = 8 processes, and this model has 4"),
        (Parallelism(tensor=3, pipeline=5), MIXTRAL, "heads; pipeline_parallel_size=5"),
    ],
)
def test_only_models_without_the_parts_are_refused(sizes: Parallelism, config: Any, says: str) -> None:
    with pytest.raises(EngineError, match=re.escape(says)) if says else contextlib.nullcontext():
        sizes.check_model(config)


def test_a_model_is_refused_before_ray_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LLAMA.save_pretrained(tmp_path)
    monkeypatch.setattr("rlhfkit.rollout.vllm.pool.start_ray_for_engines", lambda **_: pytest.fail("Ray is started"))
    with pytest.raises(EngineError, match="vLLM cannot divide LlamaConfig as asked"):
        VLLMPool(tensor_parallel_size=3).prepare_requests(str(tmp_path), trust_remote_code=False)


def test_cpus_cannot_exchange_tokens_of_experts() -> None:
    Parallelism(tensor=2, pipeline=2).check_device("cpu")
    Parallelism(data=2).check_device("cuda")
    with pytest.raises(EngineError, match="fails at the first request: leave it out"):
        Parallelism(data=2).check_device("cpu")
    dealt = Parallelism(tensor=2, experts=True)
    assert dealt.arguments()["enable_expert_parallel"] is True
    dealt.check_device("cuda")
    with pytest.raises(EngineError, match="expert_parallel=True and crashes at the first request"):
        dealt.check_device("cpu")


def test_only_engines_without_replicas_and_with_devices_of_their_own_may_span_machines() -> None:
    assert VLLMPool(1, 16).spans_machines
    assert not VLLMPool(1, 8, data_parallel_size=2).spans_machines
    assert not VLLMPool(1, 8, colocate=True).spans_machines


def test_sizes_in_engine_arguments_may_say_the_same() -> None:
    Parallelism(2, 3).check_engine_arguments({"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "seed": 1})


def test_weights_are_counted_per_process_and_compared_with_its_gpu(tmp_path: Path) -> None:
    folder = str(tiny_model(tmp_path))
    count = sum(parameter.numel() for parameter in load_causal_lm(folder).parameters())
    given = {"model": folder, "dtype": "float32"}
    assert Parallelism().weight_bytes(given) == 4 * count
    assert Parallelism(2, 2).weight_bytes(given | {"dtype": "bfloat16"}) == 2 * count / 4
    assert Parallelism().weight_bytes(given | {"quantization": "fp8"}) == count / 2
    assert Parallelism().weight_bytes(given | {"cpu_offload_gb": 10}) == 0
    assert Parallelism().weight_bytes(given | {"model": str(tmp_path / "none")}) == 0
    engine = VLLMActor({"gpu_memory_utilization": 0.5}, True, weight_bytes=15.0 * 2**30)
    engine._check_memory([("A100", 80 * 2**30)])
    with pytest.raises(RuntimeError, match=r"engine 15\.0 GiB do not fit into 50% of A10 \(12\.0 GiB\).*tensor"):
        engine._check_memory([("A100", 80 * 2**30), ("A10", 24 * 2**30)])


def test_head_sizes_are_those_of_vllms_attention_on_cpus() -> None:
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    source = (Path(vllm.origin).parent / "v1/attention/backends/cpu_attn.py").read_text()  # importing it takes seconds
    returned = re.search(r"def get_supported_head_sizes\(.*?return (\[[^]]*\])", source, re.DOTALL)
    assert returned is not None
    assert ast.literal_eval(returned[1]) == list(CPU_HEAD_SIZES)
    assert has_cpu_build()  # with which the tests run


def test_heads_of_other_sizes_are_refused_on_cpus_only(tmp_path: Path) -> None:
    check_head_size(LLAMA)  # 4096 / 8
    check_head_size(LlamaConfig(hidden_size=64, num_attention_heads=8, head_dim=64))
    small = LlamaConfig(hidden_size=64, num_attention_heads=8)
    small.save_pretrained(tmp_path)
    for pool in (VLLMPool(), VLLMPool(2, device="cpu")):
        with pytest.raises(EngineError, match="have 8: use LocalEngine"):
            pool.check_model(str(tmp_path))
    VLLMPool(device="cuda").check_model(str(tmp_path))


@pytest.mark.parametrize("in_process", [False, True])
def test_an_engine_that_cannot_start_says_what_its_processes_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: bool
) -> None:
    """VLLM's own exception only refers to it."""

    async def build() -> None:
        subprocess.run(["sh", "-c", "echo ValueError: no kernel for these heads >&2"], check=True)
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    actor = VLLMActor({}, in_process)
    monkeypatch.setattr(actor, "_build", build)
    monkeypatch.setattr(actor, "_check_gpus", list)
    kept = os.dup(2)
    with (tmp_path / "worker.err").open("wb") as log:  # as Ray does in an actor
        os.dup2(log.fileno(), 2)
        try:
            with pytest.raises(RuntimeError, match="See root cause above") as caught:
                asyncio.run(actor.start(has_weights=True))
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    told = str(caught.value).partition("the last lines of its errors:\n")[2]
    assert told == ("" if in_process else "ValueError: no kernel for these heads")
