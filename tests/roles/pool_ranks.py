"""A rank of a run whose reference is a child of the module, then in a pool."""

import os
from pathlib import Path
from typing import Any

import torch
from rl_runs import PlainGRPO, fit_run, weights

from rlhfkit.modules.parts import Reference
from rlhfkit.roles import Placement


def train(folder: Path) -> dict[str, Any]:
    """The largest difference of the weights of both runs, and where the reference was."""
    os.environ.pop("RAY_ADDRESS", None)
    trained, held = [], []
    own = folder / f"rank{os.environ['LOCAL_RANK']}"  # ranks must not write the same model
    for elsewhere in (False, True):
        arguments: dict[str, Any] = {"lr": 0.05, "kl_coef": 0.1}
        if elsewhere:  # replicas read rank 0's folder
            placement = Placement(trainer=2, reference=2)  # rank 0 plans
            reference = placement.reference(str(own / "model"), start_timeout=600.0)
            arguments["parts"] = [Reference(reference)]
        _, module, _ = fit_run(
            own,
            module=PlainGRPO,
            module_arguments=arguments,
            data_arguments={"micro_batch_size": 4},
            strategy="ddp",
            devices=2,
            use_distributed_sampler=False,
        )
        trained.append(weights(module))
        held.append(hasattr(module, "reference"))
    moved = [float((trained[1][name] - tensor).abs().max()) for name, tensor in trained[0].items()]
    return {"difference": max(moved), "held": held, "finite": bool(torch.isfinite(torch.tensor(moved)).all())}
