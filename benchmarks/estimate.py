"""Estimated memory of a run beside what real runs on CPUs allocate, part by part.

    python benchmarks/estimate.py              # about five minutes on two cores
    python benchmarks/estimate.py --quick      # one rank, two strategies
    python benchmarks/estimate.py --time       # also phases of a calibrated "cpu" machine beside measured ones

Small random Llamas (12 million parameters, fp32 and bf16) are trained by real modules under real Trainers: supervised
fine-tuning, GRPO and PPO; Lightning's own strategy and ZeRO 0, 2 and 3; one and two ranks; with and without gradient
checkpointing; with the fused output layer and with dense logits. Measured are, in bytes,

- ``weights``: storages of the trained and frozen children, or ZeRO 3's shards of them;
- ``optimizer``: the optimizer's states and main weights;
- ``gradients``: all that backward passes have left when the optimizer steps;
- ``peak``: the most that one forward and backward pass adds for a moment, from the profiler's allocations: activations,
  output layer, buffers.

Prints one line of JSON: the largest relative error of any part above 5 % of its run's total (asked: 0.15), and the
estimated and measured bytes of each run.
"""

import argparse
import dataclasses
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import rlhfkit.models.forward
from rlhfkit import Experience, GRPOModule, Optimization, PPOModule, RLHFDeepSpeedStrategy, SFTModule
from rlhfkit.costs import GPU
from rlhfkit.costs.estimation import forward_flops, train_flops
from rlhfkit.costs.memory import TRAINING, memory_parts
from rlhfkit.costs.model_shape import model_shape
from rlhfkit.costs.run import Precision, Run, Sharding
from rlhfkit.data.batch import TokenBatch
from rlhfkit.models import ModelLoading
from rlhfkit.modules import optimizers
from rlhfkit.modules.optimizers.factories import state_bytes
from rlhfkit.strategies.deepspeed import rendezvous

MODULES: dict[str, type[L.LightningModule]] = {"sft": SFTModule, "grpo": GRPOModule, "ppo": PPOModule}
BUCKET = 1_000_000
"""Numbers in a reduction bucket; the default of 200 million would be all that is measured of a small model."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run to measure."""

    module: str = "sft"
    stage: int | None = None
    """ZeRO stage; ``None``: Lightning's own strategy."""
    ranks: int = 1
    sequence: int = 1
    """Ranks that divide the tokens of the first rank's rows; the others bring two tokens."""
    gradient_checkpointing: bool = False
    tiled_mlp: bool | int = False
    fused_head: bool = True
    precision: str = "32-true"
    optimizer: str = "adamw"
    hidden: int = 384
    layers: int = 6
    vocabulary: int = 4096
    sequences: int = 4
    length: int = 256

    @property
    def config(self) -> LlamaConfig:
        """The model's configuration."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 8 // 3,
            num_hidden_layers=self.layers,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=self.length,
            tie_word_embeddings=False,
            eos_token_id=1,
        )

    @property
    def name(self) -> str:
        """A short name of what is special about the case."""
        parts = [self.module, "lightning" if self.stage is None else f"zero{self.stage}", f"{self.ranks} ranks"]
        parts += [f"{self.sequence} sequence ranks"] if self.sequence > 1 else []
        parts += ["checkpointing"] if self.gradient_checkpointing else []
        parts += ["tiled MLP"] if self.tiled_mlp else []
        parts += [] if self.fused_head else ["dense head"]
        parts += [] if self.precision == "32-true" else [self.precision]
        parts += [] if self.optimizer == "adamw" else [self.optimizer]
        return " ".join(parts)


CASES = [
    Case(),
    Case(gradient_checkpointing=True),
    Case(tiled_mlp=128),
    Case(gradient_checkpointing=True, tiled_mlp=128),
    Case(fused_head=False),
    Case(precision="bf16-true"),
    *(Case(optimizer=name) for name in ("sgd", "muon", "adafactor")),
    Case(stage=0),
    Case(stage=2),
    Case(stage=2, precision="bf16-true"),
    Case(stage=3, gradient_checkpointing=True),
    Case(module="grpo"),
    Case(module="grpo", stage=2, gradient_checkpointing=True),
    Case(module="ppo"),
    Case(module="ppo", stage=3),
    Case(stage=0, ranks=2),
    Case(stage=1, ranks=2),
    Case(stage=2, ranks=2),
    Case(stage=3, ranks=2),
    Case(module="ppo", stage=2, ranks=2, precision="bf16-true"),
    Case(stage=2, ranks=2, sequence=2),
    Case(stage=3, ranks=2, sequence=2, gradient_checkpointing=True),
    Case(module="ppo", stage=2, ranks=2, sequence=2, precision="bf16-true"),
    Case(module="grpo", stage=3, ranks=2, gradient_checkpointing=True, precision="bf16-true"),
]


# ------------------------------------------------------------------------------------------------ estimating


def estimated(case: Case) -> dict[str, float]:
    """The same parts by :mod:`rlhfkit.costs`."""
    shape = dataclasses.replace(model_shape(case.config), fused_head=case.fused_head)
    precision = Precision.of(case.precision, deepspeed=case.stage is not None)
    run = Run(
        policy=shape,
        critic=shape if case.module == "ppo" else None,
        frozen={"reference": shape} if case.module == "ppo" else {},
        gpu=GPU(name="cpu", memory=2**40, flops=1e12, bandwidth=1e11),
        sharding=Sharding(
            ranks=case.ranks,
            sequence=case.sequence,
            stage=case.stage,
            bucket=BUCKET,
            live_parameters=BUCKET,
        ),
        precision=precision,
        optimizer_state=state_bytes(getattr(optimizers, case.optimizer), {}, itemsize=precision.main_weights),
        gradient_checkpointing=case.gradient_checkpointing,
        tiled_mlp=case.tiled_mlp,
        micro_batch_tokens=case.sequences * case.length,
        trained_share=(case.length - 1) / case.length,
    )
    totals = {"weights": 0.0, "optimizer": 0.0, "gradients": 0.0, "peak": 0.0}
    for part in memory_parts(run):
        if part.place == TRAINING and "train" in part.phases:
            totals[part.part if part.part in totals else "peak"] += part.bytes
    return totals


# ------------------------------------------------------------------------------------------------ measuring


def storage_bytes(tensors: Iterable[Tensor | None]) -> dict[int, int]:
    """Bytes of each storage by its address."""
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor is not None and tensor.device.type == "cpu" and tensor.untyped_storage().nbytes()
    }


def flattened(value: Any) -> list[Tensor]:
    """All tensors in nested lists and dictionaries."""
    if isinstance(value, dict | list | tuple):
        return [tensor for one in (value.values() if isinstance(value, dict) else value) for tensor in flattened(one)]
    return [value] if torch.is_tensor(value) else []


class Measure(L.Callback):
    """Bytes of each part in the second optimizer step, which has two micro-batches."""

    def __init__(self) -> None:
        self.bytes: dict[str, float] = {}
        self._profile: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Before the first micro-batch of the second step: what stays; before its second: allocations from here on."""
        if batch_idx == 2:
            weights = storage_bytes(self._weights(pl_module))
            states = storage_bytes(self._states(trainer))
            self.bytes["weights"] = sum(weights.values())
            self.bytes["optimizer"] = sum(size for place, size in states.items() if place not in weights)
        if batch_idx == 3:
            gc.collect()  # what earlier work left would be freed in the profile, and hide as many bytes
            self._profile = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            )
            self._profile.__enter__()

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The largest sum of allocations so far."""
        if self._profile is None:
            return
        self._profile.__exit__(None, None, None)
        sizes = [
            event.nbytes() for event in self._profile.profiler.kineto_results.events() if event.name() == "[memory]"
        ]
        self._profile = None
        held = peak = 0
        for size in sizes:
            held += size
            peak = max(peak, held)
        self.bytes["peak"] = peak + self._kept_buckets(trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Gradients of parameters, and where DeepSpeed collects them."""
        if "weights" not in self.bytes or "gradients" in self.bytes:
            return
        found = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        for engine in getattr(trainer.strategy, "engines", {}).values():
            for name in ("averaged_gradients", "all_grad_tensors", "grads_in_partition", "grad_partitions_flat_buffer"):
                found += flattened(getattr(engine.optimizer, name, None))
        self.bytes["gradients"] = sum(storage_bytes(found).values())

    @staticmethod
    def _kept_buckets(trainer: L.Trainer) -> int:
        """Bytes of reduction buckets that exist between steps, at ZeRO 3."""
        total = 0
        for engine in getattr(trainer.strategy, "engines", {}).values():
            for bucket in getattr(engine.optimizer, "ipg_buckets", {}).values():
                total += bucket.buffer.untyped_storage().nbytes() if torch.is_tensor(bucket.buffer) else 0
        return total

    @staticmethod
    def _weights(module: nn.Module) -> list[Tensor]:
        return [getattr(parameter, "ds_tensor", parameter.data) for parameter in module.parameters()]

    @staticmethod
    def _states(trainer: L.Trainer) -> list[Tensor]:
        found: list[Tensor] = []
        engines = list(getattr(trainer.strategy, "engines", {}).values())
        for optimizer in [engine.basic_optimizer for engine in engines] or trainer.optimizers:
            found += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
            found += [one for group in optimizer.param_groups for one in group["params"]]
        for engine in engines:  # ZeRO 3 gives them to the optimizer for the step only
            found += getattr(engine.optimizer, "fp32_partitioned_groups_flat", [])
        return found


def batch_of(case: Case) -> TokenBatch | Experience:
    """Random tokens, and for own samples what preparation would have added."""
    generator = torch.Generator().manual_seed(0)
    brings = int(os.environ.get("LOCAL_RANK", 0)) % case.sequence == 0
    rows, length = (case.sequences, case.length) if brings else (1, 2)
    ids = torch.randint(2, case.vocabulary, (rows, length), generator=generator)
    attention, mask = torch.ones_like(ids).bool(), torch.full((rows, length - 1), brings)
    if case.module == "sft":
        return TokenBatch(input_ids=ids, attention_mask=attention, loss_mask=mask)
    steps, rewards = torch.zeros(mask.shape), torch.zeros(rows)
    return Experience(
        input_ids=ids,
        attention_mask=attention,
        action_mask=mask,
        rollout_logprobs=steps,
        versions=torch.zeros(mask.shape, dtype=torch.int64),
        rewards=rewards,
        group=torch.arange(rows),
        sample_index=rewards.long(),
        truncated=rewards.bool(),
        update=rewards.long(),
        old_logprobs=steps - 8,
        columns={"ref_logprobs": steps - 8, "values": steps, "returns": steps},
        advantages=torch.randn(mask.shape, generator=generator),
    )


def strategy_of(case: Case) -> Strategy | str:
    """Lightning's own strategy, or ours with small buckets."""
    if case.stage is None:
        return "auto"
    live = {f"stage3_{key}": BUCKET for key in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")}
    children = ["policy", *(["critic"] if case.module == "ppo" else [])]
    return RLHFDeepSpeedStrategy(
        stage=case.stage,
        reduce_bucket_size=BUCKET,
        allgather_bucket_size=BUCKET,
        sequence_parallel_size=case.sequence,
        engine_configs={name: {"zero_optimization": live} for name in children} if case.stage == 3 else None,
    )


def measured(case: Case, folder: Path) -> dict[str, float]:
    """Train two optimizer steps of two micro-batches in this process."""
    known = rlhfkit.models.forward.output_logits
    if not case.fused_head:
        rlhfkit.models.forward.output_logits = lambda model: None  # as for families whose head is not known
    torch.manual_seed(0)
    LlamaForCausalLM(case.config).save_pretrained(folder)
    module: Any = MODULES[case.module](
        str(folder),
        loading=ModelLoading(gradient_checkpointing=case.gradient_checkpointing, tiled_mlp=case.tiled_mlp),
        optimization=Optimization(optimizer=case.optimizer),
    )
    module.row_problems = lambda batch: []  # a forward pass of its own, which the peak is not about
    measure = Measure()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=case.ranks,
        strategy=strategy_of(case),
        precision=case.precision,
        max_steps=2,
        accumulate_grad_batches=2,
        callbacks=[measure],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    try:
        trainer.fit(module, DataLoader([batch_of(case)] * 4, batch_size=None))
    finally:
        rlhfkit.models.forward.output_logits = known
    return measure.bytes


def errors(expected: dict[str, float], found: dict[str, float]) -> dict[str, float]:
    """Relative error of each part that is more than 5 % of the measured total."""
    total = sum(found.values())
    return {part: expected[part] / size - 1 for part, size in found.items() if size > 0.05 * total}


# ------------------------------------------------------------------------------------------------ running


def measured_on_ranks(case: Case) -> dict[str, float]:
    """The larger of the ranks' bytes, part by part, each rank a fresh process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"} if case.ranks > 1 else {}
    command = [sys.executable, __file__, "--case", json.dumps(dataclasses.asdict(case))]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | shared | ({"LOCAL_RANK": str(rank)} if case.ranks > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(case.ranks)
    ]
    found: dict[str, float] = {}
    for process in processes:
        output, complaint = process.communicate(timeout=300)
        if process.returncode:
            raise RuntimeError(f"{case.name}: {complaint[-2000:]}")
        for part, size in json.loads(output.splitlines()[-1]).items():
            found[part] = max(found.get(part, 0), size)
    return found


def phase_ratios() -> dict[str, Any]:
    """Training over scoring seconds of a case, by a "cpu" machine that is calibrated on one matrix product."""
    case = Case()
    left, right = torch.randn(1024, 384), torch.randn(384, 1024)
    best = min(_seconds(lambda: left @ right) for _ in range(20))
    flops = 2 * 1024 * 384 * 1024 / best
    model, ids = LlamaForCausalLM(case.config), batch_of(case).input_ids

    def forward() -> Tensor:
        logits = model(input_ids=ids).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def train() -> None:
        forward().backward()

    shape, tokens = model_shape(case.config), case.sequences * case.length
    train()  # the first call allocates
    forward_times, train_times = [], []
    for _ in range(5):  # in turn, so that the load of the machine is the same for both
        with torch.no_grad():
            forward_times.append(_seconds(forward))
        train_times.append(_seconds(train))
    forward_seconds, train_seconds = min(forward_times), min(train_times)
    train_operations = train_flops(shape, tokens, case.length, gradient_checkpointing=False)
    return {
        "measured_train_over_forward": round(train_seconds / forward_seconds, 2),
        "estimated_train_over_forward": round(train_operations / forward_flops(shape, tokens, case.length), 2),
        "share_of_matmul_rate_in_training": round(train_operations / train_seconds / flops, 2),
    }


def _seconds(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first eight cases only")
    parser.add_argument("--time", action="store_true", help="also the ratio of phases")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        rendezvous.prepare_cpu()
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measured(Case(**json.loads(options.case)), Path(folder))))
        return
    rows, worst = {}, 0.0
    for case in CASES[:8] if options.quick else CASES:
        expected, found = estimated(case), measured_on_ranks(case)
        off = errors(expected, found)
        worst = max([worst, *map(abs, off.values())])
        rows[case.name] = {
            part: {"estimated_mb": round(expected[part] / 1e6, 2), "measured_mb": round(size / 1e6, 2)}
            for part, size in found.items()
        } | {"errors": {part: round(value, 3) for part, value in off.items()}}
        print(case.name, rows[case.name]["errors"], file=sys.stderr)
    result = {"benchmark": "estimate", "largest_error": round(worst, 3), "runs": rows}
    if options.time:
        result["phases"] = phase_ratios()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
