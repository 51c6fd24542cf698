"""A script that users start themselves. Rank 0 writes ``result.json`` where it was started."""

import json
import sys
from pathlib import Path

import rlhfkit.strategies  # noqa: F401  (registers the names)
from strategies import toys


def main(model: str) -> None:
    """Two ranks; the Trainer finds or starts them."""
    module = toys.Toy(model)
    trainer = toys.trainer("rlhf_zero2", 2, enable_model_summary=False)
    rank = trainer.global_rank
    trainer.fit(module, toys.ShareLoader(toys.global_batches(3), rank, 2))
    if trainer.is_global_zero:
        Path("result.json").write_text(json.dumps({"losses": module.losses, "world_size": trainer.world_size}))


if __name__ == "__main__":
    main(sys.argv[1])
