"""The transfer of weights to another process, as engines get them, without vLLM: gloo and NCCL."""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.check import Figure, Setting, check

ROOT = Path(__file__).parents[4]


def receive() -> None:
    """The other process: join groups, receive weights and say their sums, as it is asked; its argument is a device."""
    from rlhfkit.rollout.engine import WeightInfo
    from rlhfkit.rollout.weight_sync.process_group.receiver import Invitation, WeightReceiver

    device, held = torch.device(sys.argv[1]), {}
    receiver = WeightReceiver(device)

    def answer(kind: str, given: Any) -> Any:
        if kind == "connect":
            receiver.join(Invitation(**given), 0)
        elif kind == "update":
            infos = [WeightInfo(*info) for info in given]
            for named, _ in receiver.receive(infos):
                for name, tensor in named:
                    held[name] = tensor.to(device, copy=True)
            if device.type == "cuda":
                torch.cuda.synchronize()
        return {name: float(tensor.double().sum()) for name, tensor in held.items()}

    for line in sys.stdin.buffer:
        try:
            found = answer(*pickle.loads(bytes.fromhex(line.decode().strip())))
        except Exception as error:
            found = error
        sys.stdout.buffer.write(pickle.dumps(found).hex().encode() + b"\n")
        sys.stdout.buffer.flush()


class Engine:
    """Another process with a :class:`WeightReceiver`; also the ``Receivers`` that a sender is given."""

    num_workers = 1
    worker_numbers = (0,)
    address = "127.0.0.1"

    def __init__(self, device: str) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from benchmarks.gpu_check.correctness.processes.transfer import receive; receive()",
                device,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ,
        )

    def worker(self, rank: int) -> str:
        """Its name in messages."""
        return "the other process"

    def connect(self, init_info: dict[str, Any], *, ranked: bool = True) -> "Answer":
        """Have it join the group."""
        return Answer(self, "connect", init_info | {"rank_offset": 1})

    def update(self, update_info: dict[str, Any]) -> "Answer":
        """Have it receive weights."""
        shapes, types = update_info["shapes"], update_info["dtype_names"]
        infos = [
            (name, tuple(shape), getattr(torch, kind))
            for name, shape, kind in zip(update_info["names"], shapes, types, strict=True)
        ]
        return Answer(self, "update", infos)

    def sums(self) -> dict[str, float]:
        """Sum of each of its weights."""
        found: dict[str, float] = self.ask("sums", None)
        return found

    def ask(self, kind: str, given: Any) -> Any:
        """Send a request and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(pickle.dumps((kind, given)).hex().encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the other process ended with status {self._process.wait()}")
        answer = pickle.loads(bytes.fromhex(line.decode().strip()))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


class Answer:
    """A request to the other process, in progress in a thread."""

    def __init__(self, engine: Engine, kind: str, given: Any) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(engine, kind, given), daemon=True)
        self._thread.start()

    def _run(self, engine: Engine, kind: str, given: Any) -> None:
        try:
            engine.ask(kind, given)
        except BaseException as error:
            self._error = error

    def poll(self) -> None:
        """Raise if it has failed."""
        if self._error is not None:
            raise self._error

    def result(self) -> list[Any]:
        """Wait for it."""
        self._thread.join(60)
        if self._thread.is_alive():
            raise TimeoutError("the other process has not answered within 60 s")
        self.poll()
        return [None]


class Weights:
    """Some tensors of several types, more than a bucket."""

    def __init__(self, device: str, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        kinds = (torch.float32, torch.bfloat16)
        self.tensors = [
            torch.randn(size + 7 * number, 64, generator=generator).to(device, kinds[number % 2]) for number in range(6)
        ]

    def infos(self) -> Sequence[Any]:
        """What is announced."""
        from rlhfkit.rollout.engine import WeightInfo

        return [WeightInfo(f"w{i}", tuple(one.shape), one.dtype) for i, one in enumerate(self.tensors)]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((f"w{i}", one) for i, one in enumerate(self.tensors))

    def wrong(self, sums: dict[str, float]) -> int:
        """How many tensors have another sum on the other side."""
        return sum(sums.get(name) != float(tensor.double().sum()) for name, tensor in self)


def transfer(setting: Setting, backend: str, target: str) -> Iterator[Figure]:
    """Two updates of all tensors, in buckets smaller than the largest of them."""
    from rlhfkit.rollout.weight_sync.process_group.sender import ProcessGroupSender

    weights = Weights(setting.device, setting.size(100_000, 300))
    largest = max(info.num_bytes for info in weights.infos())
    sender = ProcessGroupSender(backend, timeout=30, bucket_bytes=largest // 2)  # type: ignore[arg-type]
    engine = Engine(target)
    try:
        sender.connect(engine)
        for number in (1, 2):
            for tensor in weights.tensors:
                tensor.add_(number)
            sender.send(engine, weights.infos(), iter(weights))
            yield Figure(f"update {number}: tensors that differ", weights.wrong(engine.sums()), 0)
    finally:
        sender.close()
        engine.close()


@check("transfer/gloo", seconds=90, process="transfer", simulated=False)
def gloo(setting: Setting) -> Iterator[Figure]:
    """From this device over gloo to the same device in another process."""
    yield from transfer(setting, "gloo", setting.device)


@check("transfer/nccl", seconds=120, gpus=2, process="transfer")
def nccl(setting: Setting) -> Iterator[Figure]:
    """From GPU 0 to GPU 1."""
    yield from transfer(setting, "nccl", "cuda:1")
