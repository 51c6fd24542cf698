"""vLLM engines: how fast weights reach them, what they generate, and how soon they recover; one JSON line.

    python benchmarks/engines.py                                      # some minutes on two cores
    python benchmarks/engines.py --millions 200 --engines 2 --only sync

Models are random Llamas of the asked sizes; nothing is downloaded. Run it on a quiet machine.

``sync``, for each size, all moving the same tensors:

- ``sync``: ``VLLMPool.load``, from the trainer's module until the engines serve the new weights;
- ``broadcast``: a gloo broadcast from this process to as many receivers as there are engines, in the same buckets;
- ``memcpy``: a copy inside this process.

``throughput``: tokens per second of one engine and of two, each with one thread, at the same requests.

``images``: seconds of one call of a tiny Idefics3, of 16 groups of 8 samples whose prompts have a picture each, new in
each call. The picture of a group is read once; beside it as many prompts of their own, whose pictures are read once for
each sample, and both without pictures.

``recovery``: one of two engines is killed while both generate. Seconds until all samples are there, next to an
undisturbed run; until a new engine has started; and of the load after which it serves.
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhfkit.data.types import Prompt
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.supervision.health import State
from rlhfkit.rollout.vllm.pool import VLLMPool
from rlhfkit.rollout.weight_sync.process_group.groups import GlooGroup
from rlhfkit.rollout.weight_sync.process_group.rendezvous import open_store
from rlhfkit.rollout.weight_sync.source import DEFAULT_BUCKET_BYTES, ModuleWeights

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Millions of parameters: hidden, intermediate, layers and key-value heads of Llamas, untied.
_SIZES = {1: (128, 352, 4, 2), 50: (512, 1408, 6, 4), 200: (1024, 2816, 11, 8), 500: (1280, 3456, 22, 10)}


def save_model(millions: int, dtype: torch.dtype, folder: Path) -> Any:
    """Write the model and a tokenizer for the engines; returns the trainer's copy."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    hidden, intermediate, layers, heads = _SIZES[millions]
    config = LlamaConfig(
        vocab_size=32_000 if millions > 1 else 128,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.config.save_pretrained(folder)
    vocabulary = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    return model


def receive(port: int, rank: int, size: int, sizes: list[int], repeats: int) -> None:
    """One receiver of the plain broadcast."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    group = GlooGroup(store, "benchmark", rank, size, 120, "127.0.0.1")
    group.connect()
    for _ in range(repeats):
        for num_bytes in sizes:
            group.broadcast(torch.empty(num_bytes, dtype=torch.uint8)).wait()
    group.broadcast(torch.empty(1)).wait()


def time_broadcast(num_bytes: int, receivers: int, repeats: int) -> list[float]:
    """Seconds of each broadcast of that many bytes."""
    full, rest = divmod(num_bytes, DEFAULT_BUCKET_BYTES)
    sizes = [DEFAULT_BUCKET_BYTES] * full + ([rest] if rest else [])
    store = open_store("127.0.0.1", 120)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=receive, args=(store.port, 1 + n, 1 + receivers, sizes, repeats))
        for n in range(receivers)
    ]
    for process in processes:
        process.start()
    group = GlooGroup(store, "benchmark", 0, 1 + receivers, 120, "127.0.0.1")
    group.connect()
    block = torch.ones(DEFAULT_BUCKET_BYTES, dtype=torch.uint8)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        for size in sizes:
            group.broadcast(block[:size]).wait()
        seconds.append(time.perf_counter() - start)
    group.broadcast(torch.zeros(1)).wait()
    group.close()
    for process in processes:
        process.join(timeout=60)
    return seconds


def time_memcpy(num_bytes: int, repeats: int) -> list[float]:
    """Seconds of each copy into memory that has been touched before."""
    source, target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return seconds


def measure(millions: int, engines: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """All three, for one size."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(millions, dtype, Path(folder))
        weights = ModuleWeights(model)
        num_bytes = sum(info.num_bytes for info in weights.metadata())
        parameters = num_bytes // dtype.itemsize
        pool = VLLMPool(num_engines=engines, kv_cache_gib=1 / 8)
        start = time.perf_counter()
        pool.start(folder, dtype=dtype)
        start_seconds = time.perf_counter() - start
        try:
            seconds = []
            for version in range(1 + repeats):  # the first one connects
                start = time.perf_counter()
                pool.load(weights, version)
                seconds.append(time.perf_counter() - start)
            sampling = SamplingSpec(group_size=1, max_new_tokens=8)
            (sample,) = pool.generate([Prompt(index=0, token_ids=[5, 6, 7])], sampling, iteration=0)
            ids = torch.tensor([sample.all_token_ids.tolist()])
            with torch.no_grad():
                logprobs = model(ids).logits[0, 2:-1].float().log_softmax(-1)
            expected = logprobs.gather(-1, torch.tensor(sample.token_ids.tolist())[:, None])[:, 0]
            difference = float((expected - torch.tensor(sample.logprobs)).abs().max())
        finally:
            pool.close()
        del model, weights
    times = {
        "sync": seconds[1:],
        "broadcast": time_broadcast(num_bytes, engines, repeats),
        "memcpy": time_memcpy(num_bytes, repeats),
    }
    result: dict[str, Any] = {
        "parameters": parameters,
        "engines": engines,
        "dtype": str(dtype).removeprefix("torch."),
        "gigabytes": round(num_bytes / 1e9, 3),
        "start_seconds": round(start_seconds, 1),
        "first_sync_seconds": round(seconds[0], 3),
        "max_logprob_difference": difference,
    }
    for name, values in times.items():
        median = statistics.median(values)
        result[f"{name}_seconds"] = round(median, 4)
        result[f"{name}_gigabytes_per_second"] = round(num_bytes / 1e9 / median, 3)
    result["sync_over_broadcast"] = round(result["broadcast_seconds"] / result["sync_seconds"], 3)
    return result


def generating(pool: VLLMPool, prompts: int, iteration: int) -> tuple[float, int]:
    """Seconds and tokens of one batch of requests, each of 64 tokens."""
    asked = [Prompt(index=number, token_ids=[2 + number % 90, 5, 7]) for number in range(prompts)]
    spec = SamplingSpec(group_size=4, max_new_tokens=64, min_new_tokens=64)
    start = time.perf_counter()
    samples = pool.generate(asked, spec, iteration=iteration)
    return time.perf_counter() - start, sum(len(sample.token_ids) for sample in samples)


def serve_and_recover(millions: int, prompts: int, repeats: int) -> dict[str, Any]:
    """Throughput of one and two engines, and what a death costs."""
    result: dict[str, Any] = {"prompts": prompts, "samples": 4 * prompts}
    with tempfile.TemporaryDirectory() as folder:
        weights = ModuleWeights(save_model(millions, torch.float32, Path(folder)))
        for engines in (1, 2):
            pool = VLLMPool(num_engines=engines, kv_cache_gib=1 / 4)
            try:
                pool.start(folder, dtype=torch.float32)
                pool.load(weights, 0)
                generating(pool, prompts, 0)
                runs = [generating(pool, prompts, number) for number in range(1, 1 + repeats)]
                result[f"tokens_per_second_{engines}"] = round(statistics.median(n / s for s, n in runs), 1)
                if engines == 2:
                    undisturbed = statistics.median(seconds for seconds, _ in runs)
                    result |= {"undisturbed_seconds": round(undisturbed, 2)} | recover(pool, weights, prompts)
            finally:
                pool.close()
    result["two_over_one"] = round(result["tokens_per_second_2"] / result["tokens_per_second_1"], 2)
    return result


def seeing_prompts(groups: int, size: int, call: int, folder: Path) -> dict[str, tuple[int, list[Prompt]]]:
    """What is asked for by name, as the size of groups and the prompts."""
    import numpy as np
    import PIL.Image

    from rlhfkit.data.images import Image
    from rlhfkit.models.load import load_config, load_tokenizer
    from rlhfkit.models.vision import vision_processor

    tokenizer = load_tokenizer(str(folder))
    processor = vision_processor(str(folder), load_config(str(folder)))
    chance = np.random.default_rng(call)
    pictures = [
        Image.of(PIL.Image.fromarray(chance.integers(0, 255, (448, 448, 3), dtype=np.uint8)), f"picture {number}")
        for number in range(groups)
    ]
    asked: dict[str, tuple[int, list[Prompt]]] = {}
    for name, shown in (("images", True), ("texts", False)):
        written = [tokenizer(processor.read(one).text if shown else "." * 7).input_ids for one in pictures]
        texts = [tokenizer(f"{number:03d}").input_ids for number in range(groups * size)]
        seen = [(one,) if shown else () for one in pictures]
        asked[f"{name}_in_groups"] = (
            size,
            [Prompt(number, [*texts[number], *written[number]], attachments=seen[number]) for number in range(groups)],
        )
        asked[f"{name}_alone"] = (
            1,
            [
                Prompt(number, [*texts[number], *written[number % groups]], attachments=seen[number % groups])
                for number in range(groups * size)
            ],
        )
    return asked


def see(repeats: int, groups: int = 16, size: int = 8) -> dict[str, Any]:
    """What reading the picture of a group once saves."""
    from transformers import AutoModelForImageTextToText

    sys.path.insert(0, str(Path(__file__).parents[1] / "tutorials"))
    from vlm_grpo_squares import save_model as save_seeing_model

    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_seeing_model(Path(folder), 0)
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        pool = VLLMPool(num_engines=1, kv_cache_gib=1 / 8, engine_arguments={"block_size": 32})
        try:
            pool.start(folder, dtype=torch.float32)
            pool.load(ModuleWeights(model), 0)
            for call in range(1 + repeats):  # the first one compiles
                for name, (each, prompts) in seeing_prompts(groups, size, call, Path(folder)).items():
                    spec = SamplingSpec(group_size=each, max_new_tokens=8, min_new_tokens=8)
                    start = time.perf_counter()
                    pool.generate(prompts, spec, iteration=call)
                    seconds.setdefault(name, []).append(time.perf_counter() - start)
        finally:
            pool.close()
    return {f"{name}_seconds": round(statistics.median(values[1:]), 3) for name, values in seconds.items()}


def recover(pool: VLLMPool, weights: ModuleWeights, prompts: int) -> dict[str, Any]:
    """Kill one of two engines at work."""
    engines = pool.engines
    assert engines is not None
    victim = engines.handles[0]
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(generating, pool, prompts, 100)
        while victim.num_requests == 0:
            time.sleep(0.01)
        time.sleep(0.5)
        os.kill(victim.info["pid"], signal.SIGKILL)
        killed = time.perf_counter()
        seconds, _ = run.result()
    while engines.handles[0] is victim or engines.handles[0].state is State.STARTING:
        engines.wait(0.1)
    restarted = time.perf_counter() - killed
    start = time.perf_counter()
    pool.load(weights, 1)
    loaded = time.perf_counter() - start
    assert [handle.state for handle in engines.handles] == [State.SERVING] * 2
    times = {"disturbed_seconds": seconds, "restart_seconds": restarted, "load_seconds": loaded}
    return {name: round(value, 2) for name, value in times.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = sorted(_SIZES)
    parser.add_argument("--millions", type=int, nargs="+", default=[50, 200, 500], choices=sizes, help="for sync")
    parser.add_argument("--engines", type=int, default=1, help="for sync")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="float32", help="for sync")
    parser.add_argument("--serving-millions", type=int, default=50, choices=sizes, help="for the rest")
    parser.add_argument("--prompts", type=int, default=32, help="for the rest; four samples of each")
    parser.add_argument("--repeats", type=int, default=5, help="medians are over that many")
    parser.add_argument("--only", choices=("sync", "serving", "images"))
    arguments = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "engines", "torch_threads": torch.get_num_threads()}
    if arguments.only in (None, "sync"):
        dtype = _DTYPES[arguments.dtype]
        result["sync"] = [measure(size, arguments.engines, dtype, arguments.repeats) for size in arguments.millions]
    if arguments.only in (None, "serving"):
        result["serving"] = serve_and_recover(arguments.serving_millions, arguments.prompts, arguments.repeats)
    if arguments.only in (None, "images"):
        result["images"] = see(arguments.repeats)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
