"""Bytes of a weight sync: everything, what has changed, or a LoRA adapter; one JSON line.

    python benchmarks/sync_bytes.py                     # 20M random weights, learning rates 1e-6 and 1e-5

Float32 weights of a normal distribution (deviation 0.02, as models are initialised and roughly stay), AdamW on random
gradients, engines in bfloat16. The first step of Adam moves every weight by the learning rate, later steps less: of one
update ``changed`` is an upper bound for real gradients of the same learning rate. ``at_7b`` scales the bytes to
7.6e9 weights; an adapter's are computed from the shapes of Qwen2.5-7B.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.weight_sync.delta import DeltaSender

_WEIGHTS_7B = 7.6e9
_LAYERS, _WIDTH, _KEYS, _INNER = 28, 3584, 512, 18944  # of Qwen2.5-7B


class Nowhere:
    """A sender that reads what it is given."""

    backend, recoverable = "gloo", True

    def connect(self, receivers: Any) -> None:
        """Do nothing."""

    def send(self, receivers: Any, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Read everything."""
        for _ in weights:
            pass

    def close(self) -> None:
        """Do nothing."""


def delta_bytes(lr: float, updates: int, size: int) -> dict[str, float]:
    """Share of entries that ``updates`` change, and of bytes that are sent, at the fourth sync."""
    generator = torch.Generator().manual_seed(0)
    master = [torch.nn.Parameter(0.02 * torch.randn(size // 1024, 1024, generator=generator))]
    optimizer = torch.optim.AdamW(master, lr=lr, weight_decay=0.0)
    sender, before, changed = DeltaSender(Nowhere()), master[0].detach().bfloat16(), 0.0
    for sync in range(4):
        for _ in range(updates if sync else 0):
            master[0].grad = torch.randn(master[0].shape, generator=generator)
            optimizer.step()
        weight = master[0].detach().bfloat16()
        changed, before = float((weight != before).float().mean()), weight
        info = WeightInfo("layers.0.weight", tuple(weight.shape), weight.dtype)
        sender.send(None, [info], iter([(info.name, weight)]))  # type: ignore[arg-type]  # nobody receives
    return {
        "changed": changed,
        "sent_share": sender.sent_bytes / before.nbytes,
        "at_7b": sender.sent_bytes / before.nbytes * 2 * _WEIGHTS_7B,
    }


def adapter_bytes(rank: int) -> int:
    """Bytes in bfloat16 of an adapter on all linear layers of Qwen2.5-7B."""
    shapes = [(_WIDTH, _WIDTH)] * 2 + [(_WIDTH, _KEYS)] * 2 + [(_WIDTH, _INNER)] * 3
    return 2 * _LAYERS * rank * sum(map(sum, shapes))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=20 * 2**20, help="number of weights")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"everything_at_7b": 2 * _WEIGHTS_7B}
    for lr in (1e-6, 1e-5):
        for updates in (1, 8):
            figures[f"lr {lr:g}, {updates} updates"] = delta_bytes(lr, updates, arguments.size)
    figures["adapter of rank 16 at_7b"] = adapter_bytes(16)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
