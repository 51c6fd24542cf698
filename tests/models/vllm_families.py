"""Which families a vLLM engine serves with weights that a trainer sends it, each in a process of its own.

``python tests/models/vllm_families.py FOLDER NAME ...`` prints a JSON line for each family: ``score`` and ``sampled``,
the largest differences in nats between the engine's log-probs and plain Transformers' over two weight updates, or
``error``. Importing vLLM takes ten seconds of processor time and a fork of it none, so all families start from one
import. What Ray would host is called directly; engine, transfer and sender are those of a pool. Written for vLLM 0.32.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rlhfkit.rollout.vllm.arguments import engine_arguments, engine_environment

# Read when torch and vLLM are imported.
os.environ.update(engine_environment(device="cpu", cpus_per_engine=1, in_process=True, backend="rlhfkit"))

import torch
from torch import nn

from models.families import FAMILIES, Family
from rlhfkit.models import load_causal_lm
from rlhfkit.rollout.engine import WeightSource
from rlhfkit.rollout.vllm.actor import EngineLoad
from rlhfkit.rollout.vllm.in_process import InProcessLLM
from rlhfkit.rollout.vllm.parallelism import Parallelism
from rlhfkit.rollout.weight_sync.process_group.transfer import ProcessGroupSender
from rlhfkit.rollout.weight_sync.source import ModuleWeights

PROMPT = [5, 17, 40, 63, 22, 9, 31, 77, 50, 12, 88, 41]
NEW_TOKENS = 12
LIMIT = 200.0
"""Seconds a step may take; three times that, and the family counts as failed."""


class Called:
    """A remote call in progress, a :class:`rlhfkit.rollout.weight_sync.sender.Pending`."""

    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    def poll(self) -> None:
        if self._future.done():
            self._future.result()

    def result(self) -> list[Any]:
        return [self._future.result(LIMIT)]


class Engine:
    """One vLLM engine in this process, as :class:`rlhfkit.rollout.weight_sync.sender.Receivers` sees it."""

    num_workers = 1
    worker_numbers = (0,)
    address = "127.0.0.1"

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        arguments = engine_arguments(
            str(folder),
            dtype=torch.float32,
            trust_remote_code=False,
            parallelism=Parallelism(1, 1, 1),
            max_model_len=64,
            gpu_memory_utilization=0.9,
            kv_cache_gib=1 / 16,
            device="cpu",
            backend="rlhfkit",
            load_weights=False,
            sleeps=False,
            logprobs_mode="processed_logprobs",
        )
        # vLLM caches prefixes of recurrent layers only with chunked prefill, which it cannot do on a CPU.
        arguments["enable_prefix_caching"] = False
        self._engine = self._wait(InProcessLLM.start(arguments, EngineLoad().factory))

    def _start(self, call: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self._start(call).result(LIMIT)

    def worker(self, rank: int) -> str:
        return "the engine"

    def connect(self, rendezvous: dict[str, Any]) -> Called:
        rendezvous = {**rendezvous, "rank_offset": 1}
        return Called(
            self._start(self._engine.collective_rpc("init_weight_transfer_engine", {"init_info": rendezvous}))
        )

    def update(self, update: dict[str, Any]) -> Called:
        return Called(self._start(self._engine.collective_rpc("update_weights", {"update_info": update})))

    def load(self, sender: ProcessGroupSender, weights: WeightSource) -> None:
        """One weight update, in the order of a pool's."""
        self._wait(self._engine.pause_generation(mode="keep", clear_cache=True))
        self._wait(self._engine.collective_rpc("start_weight_update", {}))
        sender.send(self, weights.metadata(), iter(weights))
        self._wait(self._engine.collective_rpc("finish_weight_update", {}))
        self._wait(self._engine.resume_generation())

    def run(self, name: str, tokens: list[int], **arguments: Any) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**arguments, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = self._engine.generate({"prompt_token_ids": tokens}, params, name, lora_request=None, priority=0)
        return self._wait(anext(outputs))


@torch.no_grad()
def change(model: nn.Module, version: int) -> None:
    """Change every weight, the same way in every copy."""
    generator = torch.Generator().manual_seed(version)
    for parameter in model.parameters():
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def engine_says(path: Path) -> dict[str, Any]:
    """What an engine says after each of two weight updates: texts of tokens and the log-probs of their last ones."""
    policy = load_causal_lm(str(path)).eval()
    engine = Engine(path)
    sender = ProcessGroupSender("gloo", timeout=LIMIT, bucket_bytes=2**15)
    sender.connect(engine)
    texts: list[dict[str, Any]] = []
    for version in (1, 2):
        change(policy, version)
        engine.load(sender, ModuleWeights(policy).in_checkpoint_format())
        out = engine.run(f"{version}-score", PROMPT, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        scored = [entry[token].logprob for token, entry in zip(PROMPT[1:], out.prompt_logprobs[1:], strict=True)]
        how = {"max_tokens": NEW_TOKENS, "temperature": 1.0, "seed": 1, "logprobs": 0, "ignore_eos": True}
        (made,) = engine.run(f"{version}-sample", PROMPT, **how).outputs
        tokens = list(made.token_ids)
        sampled = [entry[token].logprob for token, entry in zip(tokens, made.logprobs, strict=True)]
        texts.append({"score": (PROMPT, scored), "sampled": (PROMPT + tokens, sampled)})
    return {"texts": texts}


@torch.no_grad()
def differences(family: Family, path: Path, texts: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest differences from plain Transformers."""
    from transformers import AutoModelForCausalLM

    how = {"dtype": torch.float32, "attn_implementation": family.reference}
    model = AutoModelForCausalLM.from_pretrained(path, **how).eval()
    worst = {"score": 0.0, "sampled": 0.0}
    for version, said in enumerate(texts, 1):
        change(model, version)
        for name, (tokens, logprobs) in said.items():
            log_p = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float().log_softmax(-1)
            exact = log_p.gather(-1, torch.tensor(tokens[1:])[:, None])[-len(logprobs) :, 0]
            worst[name] = max(worst[name], float((torch.tensor(logprobs) - exact).abs().max()))
    return worst


def check(family: Family, folder: Path) -> dict[str, Any]:
    """Start an engine without weights, send it two versions, and compare.

    Each step has a process of its own: one that has made a model has threads and must not be forked, and vLLM's general
    backend changes Transformers' classes for itself.
    """
    path, log = folder / family.name.replace(" ", "-"), folder / f"{family.model_type}.log"
    found = forked(log, lambda: {"saved": str(family.save(path))})
    found = found if "error" in found else forked(log, lambda: engine_says(path))
    return found if "error" in found else forked(log, lambda: differences(family, path, found["texts"]))


def forked(log: Path, step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a step returns in a process of its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.setsid()
        signal.alarm(int(3 * LIMIT))
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        try:
            found = step()
        except BaseException as error:
            traceback.print_exc()
            line = next((line for line in str(error).splitlines() if line.strip()), "")
            found = {"error": f"{type(error).__name__}: {line[:200]}"}
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):  # what it has started and left behind
        os.killpg(pid, signal.SIGKILL)
    with open(reading, "rb") as answer:  # a short text, which the pipe holds
        text = answer.read()
    return json.loads(text) if text else {"error": "its process died"}


def main(folder: Path, names: list[str]) -> None:
    """Try the families of these names; all of them without names."""
    import transformers  # noqa: F401
    import vllm.model_executor.models.registry as registry
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import rlhfkit.rollout.vllm.plugin  # noqa: F401

    # vLLM imports each architecture in a process of its own first, to keep CUDA out of this one; there is none.
    registry._run_in_subprocess = lambda function: function()
    for family in FAMILIES:
        if not names or family.name in names:
            started = time.monotonic()
            found = check(family, folder)
            print(
                json.dumps({"family": family.name, **found, "seconds": round(time.monotonic() - started, 1)}),
                flush=True,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
