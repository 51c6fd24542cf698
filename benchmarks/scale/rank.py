"""One real iteration on one or several gloo ranks with a :class:`FakeEngine`, measured on every rank.

The Trainer, ``RolloutCallback``, ``GRPOModule``, ``PromptDataModule``, the exchange between ranks and the micro-batches
are the real ones. The model is tiny; ``learn=False`` leaves the forward passes out, which GPUs would do.
"""

import ctypes
import dataclasses
import gc
import json
import multiprocessing
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.scale.fake_engine import FakeEngine, Lengths
from benchmarks.scale.stopwatch import Stopwatch, Traffic, status_bytes
from rlhfkit import GRPOModule, PromptDataModule, RolloutCallback, Sample, SamplingSpec

PARTS = {
    "collect": ["rlhfkit.callbacks.rollout.callback:RolloutCallback.collect"],
    "engine": ["benchmarks.scale.fake_engine:FakeEngine.generate"],
    "sync": ["rlhfkit.callbacks.rollout.callback:RolloutCallback.sync_weights"],
    "score": ["rlhfkit.callbacks.rollout.group_collector:GroupCollector._score"],
    "log": ["rlhfkit.rank_store:RankLog.run"],
    "stack": ["rlhfkit.data.types:Experience.from_samples"],
    "summary": ["rlhfkit.callbacks.rollout.sharing:share_iteration", "torch.distributed:all_gather_object"],
    "plan": ["rlhfkit.callbacks.rollout.micro_batching:IterationPlanner.plan"],
    "move": ["rlhfkit.callbacks.rollout.sharing:exchange_rows"],
    "prepare": ["rlhfkit.modules.on_policy.base:OnPolicyModule.prepare"],
    "metrics": ["rlhfkit.callbacks.rollout.callback:RolloutCallback._iteration_metrics"],
    "select": [
        "rlhfkit.callbacks.rollout.micro_batching:MicroBatches.__init__",
        "rlhfkit.callbacks.rollout.micro_batching:MicroBatches.__getitem__",
    ],
}
"""The parts of an iteration and the functions that do them; ``collect`` is what is in none of the others."""


@dataclass(frozen=True)
class RunSize:
    """What one measured run does."""

    prompts: int
    """Of an iteration, all ranks together."""
    group_size: int
    prompt_tokens: int
    tokens: int
    """Of a completion: the median."""
    sigma: float = 0.0
    micro_batch_size: int = 4
    learn: bool = False
    shared: bool = False
    iterations: int = 2
    """The first warms up, and only the last is measured."""

    @property
    def sequences(self) -> int:
        """Of one iteration."""
        return self.prompts * self.group_size


class FakeLearner(GRPOModule):
    """GRPO without forward passes: the loss touches every parameter and every field of the batch, nothing more."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """A loss with a gradient of 0."""
        assert batch.advantages is not None
        total = sum(parameter.sum() for parameter in self.policy.parameters())
        return 0.0 * (total + (batch.advantages * batch.action_mask).sum())


def text_length(samples: Sequence[Sample]) -> list[float]:
    """A reward that reads the text, as rewards do."""
    return [len(sample.text) % 97 / 97 for sample in samples]


def make_model(folder: Path) -> None:
    """A Llama of one layer and a byte-level tokenizer of 4,096 tokens."""
    import random

    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(6000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((" ".join(words[i : i + 50]) for i in range(0, len(words), 50)), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=131072,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_prompts(folder: Path, size: RunSize) -> Path:
    """Prompts of one length, twice as many as an iteration has."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    letter = tokenizer.convert_ids_to_tokens(tokenizer.encode("z")[-1])
    assert letter == "z"
    path = folder / "prompts.jsonl"
    text = "z" * size.prompt_tokens
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for _ in range(size.iterations * size.prompts)))
    return path


def trimmed_bytes() -> int:
    """The resident set, without memory that is free and that glibc has not returned."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return status_bytes("VmRSS")


class Recorder(L.Callback):
    """Measures the last iteration of a run on one rank."""

    def __init__(self, engine: FakeEngine, stopwatch: Stopwatch, traffic: Traffic) -> None:
        self.engine = engine
        self.stopwatch = stopwatch
        self.traffic = traffic
        self.result: dict[str, Any] = {}

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """The measured iteration begins, with what is left of the one before it."""
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again
        self.stopwatch.parts.clear()
        self.traffic.clear()
        self.processor, self.clock = time.process_time(), time.perf_counter()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The iteration is collected when the first micro-batch is there."""
        if batch_idx == 0:
            self.result["collect_processor"] = time.process_time() - self.processor
            self.result["collect_clock"] = time.perf_counter() - self.clock
            self.result["resident"] = trimmed_bytes()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """The iteration is over."""
        self.result |= {
            "processor": time.process_time() - self.processor,
            "clock": time.perf_counter() - self.clock,
            "peak": status_bytes("VmHWM"),
            "tokens": self.engine.tokens,
            "longest": self.engine.longest,
            "traffic": vars(self.traffic).copy(),
            "parts": {name: dataclasses.asdict(part) for name, part in self.stopwatch.parts.items()},
        }


def run_rank(rank: int, ranks: int, port: int, folder: Path, size: RunSize) -> None:
    """Train on one rank and write what was measured."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    stopwatch = Stopwatch()
    stopwatch.install(PARTS)
    traffic = Traffic()
    traffic.install()
    lengths = Lengths(size.tokens, size.sigma, longest=8 * size.tokens)
    engine = FakeEngine(4096, lengths, shared=size.shared)
    recorder = Recorder(engine, stopwatch, traffic)
    rollouts = RolloutCallback(
        text_length,
        engine=engine,
        sampling=SamplingSpec(group_size=size.group_size, max_new_tokens=lengths.longest),
    )
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=DDPStrategy(process_group_backend="gloo") if ranks > 1 else SingleDeviceStrategy("cpu"),
        devices=ranks,
        max_epochs=size.iterations,
        accumulate_grad_batches=size.sequences // (size.micro_batch_size * ranks),  # one update
        callbacks=[recorder, rollouts],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=str(folder),
    )
    data = PromptDataModule(
        str(folder / "prompts.jsonl"),
        rollout_batch_size=size.prompts,
        micro_batch_size=size.micro_batch_size,
        shuffle=False,
    )
    trainer.fit((GRPOModule if size.learn else FakeLearner)(str(folder / "model")), data)
    result = recorder.result
    rollouts.samples, rollouts._micro_batches = [], None
    trainer.train_dataloader._batches = []
    idle = trimmed_bytes()  # of a process that has run iterations and holds none
    result |= {"peak": result["peak"] - idle, "resident": result["resident"] - idle}
    (folder / f"rank_{rank}.json").write_text(json.dumps(result))


def run(size: RunSize, ranks: int, *, timeout: float = 570.0) -> list[dict[str, Any]]:
    """Train on ranks that are processes of their own and return what each measured; RuntimeError if one fails."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = multiprocessing.get_context("forkserver")  # imports once; ranks are forked from it
    context.set_forkserver_preload(["benchmarks.scale.rank"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        make_prompts(folder, size)
        processes = [context.Process(target=run_rank, args=(rank, ranks, port, folder, size)) for rank in range(ranks)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        try:
            while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
                if any(process.exitcode not in (None, 0) for process in processes):
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"ranks ended with {[process.exitcode for process in processes]}")
        return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
