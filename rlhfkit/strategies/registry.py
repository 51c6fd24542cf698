"""Names for ``Trainer(strategy=...)``: ``rlhf_zero0`` to ``rlhf_zero3`` and their offloading variants."""

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from rlhfkit.strategies.strategy import RLHFDeepSpeedStrategy

_NAMES: dict[str, dict[str, Any]] = {
    "rlhf_zero0": {"stage": 0},
    "rlhf_zero1": {"stage": 1},
    "rlhf_zero2": {"stage": 2},
    "rlhf_zero3": {"stage": 3},
    "rlhf_zero1_offload": {"stage": 1, "offload_optimizer": True},
    "rlhf_zero2_offload": {"stage": 2, "offload_optimizer": True},
    "rlhf_zero3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
}


def register() -> None:
    """Add the names to Lightning's strategy registry; DeepSpeed is imported only when a Trainer uses one of them."""
    for name, arguments in _NAMES.items():
        where = " with the optimizer" if "offload_optimizer" in arguments else ""
        where += " and the parameters" if "offload_parameters" in arguments else ""
        StrategyRegistry.register(
            name,
            RLHFDeepSpeedStrategy,
            description=f"One DeepSpeed engine per child module, ZeRO stage {arguments['stage']}"
            + (f"{where} in CPU memory" if where else ""),
            override=True,
            **arguments,
        )
