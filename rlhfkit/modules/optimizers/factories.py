"""Functions that make optimizers of parameter groups; their names are values of a module's ``optimizer`` argument.

A function of your own is given the parameter groups and ``lr``, and ``weight_decay``, ``betas`` and ``trainer`` if it
has such arguments; torch's classes are such functions. :mod:`rlhfkit.modules.optim` calls them.
"""

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from rlhfkit.modules.optimizers.muon_adamw import Muon

if TYPE_CHECKING:
    import lightning as L

OptimizerFactory = Callable[..., Optimizer]
Groups = list[dict[str, Any]]
GIVEN = ("lr", "weight_decay", "betas", "trainer")
"""What a module gives to a function that has such an argument; all others are ``optimizer_arguments``."""


def adamw(
    groups: Groups,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    trainer: "L.Trainer | None" = None,
    eps: float = 1e-8,
    amsgrad: bool = False,
    fused: bool | None = None,
) -> torch.optim.AdamW:
    """Make torch's AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101), with fused kernels on GPUs.

    They need no temporaries of the size of the parameters, which cost 4 bytes a parameter otherwise, and serve states
    that DeepSpeed has offloaded to the CPU too: there a step took 0.07 of the time of torch's default on two cores, and
    0.75 of that of DeepSpeedCPUAdam, which needs a compiler and rounds differently after a resume. On CPUs the default
    stays, and its numbers; so it does where Lightning's gradient scaler clips (``16-mixed``), which refuses fused ones.

    Args:
        groups: Parameter groups.
        lr: Learning rate.
        betas: Averaging factors.
        weight_decay: Decoupled weight decay.
        trainer: Where it trains.
        eps: Added to the denominator.
        amsgrad: Divide by the largest second moment so far.
        fused: Whether to take torch's fused kernels; ``None``: see above.
    """
    fused = _fused(trainer) if fused is None else fused
    # None, not False: False also switches torch's own choice of kernels for lists of tensors off.
    return torch.optim.AdamW(
        groups, lr=lr, betas=betas, weight_decay=weight_decay, eps=eps, amsgrad=amsgrad, fused=fused or None
    )


def _fused(trainer: "L.Trainer | None") -> bool:
    if trainer is None or trainer.strategy.root_device.type != "cuda":
        return False
    if isinstance(trainer.precision_plugin, MixedPrecision) and trainer.precision_plugin.scaler is not None:
        fused, why = False, "Lightning's gradient scaler cannot clip the gradients of fused optimizers"
    else:
        fused, why = True, "on a GPU"
    rank_zero_info(f"AdamW: {'fused' if fused else 'default'} kernels of torch, {why}")
    return fused


def adamw_8bit(
    groups: Groups,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float = 1e-8,
    min_8bit_size: int = 4096,
    paged: bool = False,
) -> Optimizer:
    """Make bitsandbytes' AdamW with moments of 8 bits (Dettmers et al., 2022, arXiv:2110.02861): 2 bytes a parameter.

    Moments are quantised in blocks of 256 numbers, which ZeRO's partitions and DeepSpeed's flat buffers cut elsewhere:
    results then agree with those of one rank to the error of the quantisation, not bit for bit.

    Args:
        groups: Parameter groups.
        lr: Learning rate.
        betas: Averaging factors.
        weight_decay: Decoupled weight decay.
        eps: Added to the denominator.
        min_8bit_size: Tensors of fewer numbers have moments of 32 bits.
        paged: Let moments move to CPU memory when a GPU's is full.

    Raises:
        ModuleNotFoundError: If bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModuleNotFoundError(
            "optimizer='adamw_8bit' needs bitsandbytes, which is not installed: pip install 'rlhfkit[qlora]', or take "
            "optimizer='adamw'"
        )
    from bitsandbytes.optim import AdamW8bit

    made: Optimizer = AdamW8bit(
        groups,
        lr=lr,
        betas=tuple(betas),
        weight_decay=weight_decay,
        eps=eps,
        min_8bit_size=min_8bit_size,
        is_paged=paged,
    )
    return made


def muon(
    groups: Groups,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    trainer: "L.Trainer | None" = None,
    eps: float = 1e-8,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    adjust_lr: str = "match_rms_adamw",
) -> Muon:
    """Make :class:`~rlhfkit.modules.optimizers.Muon`: torch's Muon for matrices, AdamW for embeddings, heads, the rest.

    Args:
        groups: Parameter groups, of one ``"kind"`` each.
        lr: Learning rate of both.
        betas: AdamW's averaging factors.
        weight_decay: Decoupled weight decay of both.
        trainer: Where it trains.
        eps: AdamW's.
        momentum: Muon's (0.95: torch's default and that of Muon's authors).
        nesterov: Whether Muon's momentum is Nesterov's.
        ns_steps: Muon's Newton-Schulz iterations.
        adjust_lr: ``"match_rms_adamw"`` (Moonlight's) or ``"original"``, see the class.
    """
    return Muon(
        groups,
        lr=lr,
        betas=(betas[0], betas[1]),
        weight_decay=weight_decay,
        eps=eps,
        momentum=momentum,
        nesterov=nesterov,
        ns_steps=ns_steps,
        adjust_lr=adjust_lr,
        fused=_fused(trainer) or None,
    )


sgd = torch.optim.SGD
"""Its weight decay is added to the gradient, not decoupled; without ``momentum`` it keeps no state."""
adafactor = torch.optim.Adafactor
"""Second moments by row and column only (Shazeer and Stern, 2018, arXiv:1804.04235). ``lr`` (0.01: torch's
default) bounds its relative step: a step is at most ``lr`` times the root mean square of the parameter."""

FLAT_PARAMETERS: tuple[OptimizerFactory, ...] = (muon, Muon)
"""Functions whose optimizers compute with whole parameters, and find them in flat tensors if they know the layout."""
WHOLE_PARAMETERS: tuple[OptimizerFactory, ...] = (*FLAT_PARAMETERS, adafactor, torch.optim.Muon)
"""Functions whose optimizers compute with whole parameters, not number by number."""


class StateBytes(NamedTuple):
    """What an optimizer needs per parameter, in bytes."""

    matrices: float
    """State of :data:`~rlhfkit.modules.optimizers.groups.Kind` ``matrices``."""
    others: float
    step_matrices: float = 0.0
    """Temporary tensors of a step that takes all matrices at once, as one flat tensor."""
    step_others: float = 0.0
    orthogonal_steps: int = 0
    """Newton-Schulz iterations over each matrix."""


def state_bytes(
    function: OptimizerFactory, arguments: Mapping[str, Any], *, itemsize: int = 4, fused: bool = False
) -> StateBytes | None:
    """What an optimizer of ours needs per parameter of ``itemsize`` bytes; ``None``: it is none of ours.

    Left out is what does not grow with the number of parameters, and what Adafactor keeps of rows, columns and vectors.
    ``fused``: AdamW would take its fused kernels, see :func:`adamw`.
    """
    # AdamW's default kernels make the root of the second moments, and their quotient with the bias correction.
    adam = 0.0 if arguments.get("fused", fused) else 2.0 * itemsize
    if function is adamw:
        state = itemsize * (3.0 if arguments.get("amsgrad") else 2.0)
        return StateBytes(state, state, adam, adam)
    if function is adamw_8bit:  # a float32 per block of 256 numbers beside them
        state = 2 * (1 + 4 / 256)
        return StateBytes(state, state)
    if function in (muon, Muon):  # an update, and its bfloat16 copy
        return StateBytes(itemsize, 2.0 * itemsize, itemsize + 2.0, adam, int(arguments.get("ns_steps", 5)))
    if function is sgd:  # the decayed gradient, and Nesterov's
        step = itemsize * (2.0 if arguments.get("nesterov") else 1.0)
        state = float(itemsize) if arguments.get("momentum") else 0.0
        return StateBytes(state, state, step, step)
    return StateBytes(0.0, 0.0, itemsize, itemsize) if function is adafactor else None


def check_optimizer_arguments(function: OptimizerFactory, name: str, arguments: Mapping[str, Any]) -> None:
    """Raise unless a function takes the given ``optimizer_arguments``; those for us and torch are tried.

    Raises:
        ValueError: If a name is unknown or a value out of range.
    """
    if "lr" not in taken_names(function):
        raise ValueError(
            f"optimizer={name!r} takes no lr, so that of the module would have no effect: give the function an "
            "argument lr, and make the optimizer with it"
        )
    taken = sorted({*arguments} & {*GIVEN})
    if taken:
        raise ValueError(
            f"optimizer_arguments has {', '.join(taken)}: lr is an argument of the module, betas and weight_decay are "
            "those of Optimization"
        )
    parameters = inspect.signature(function).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        allowed = [one for one in list(parameters)[1:] if one not in GIVEN]
        unknown = sorted({*arguments} - {*allowed})
        if unknown:
            raise ValueError(
                f"optimizer_arguments has {', '.join(unknown)}, which optimizer={name!r} does not take: it takes "
                f"{', '.join(allowed) or 'none'}; lr is an argument of the module, decay and betas of Optimization"
            )
    if arguments and function.__module__.startswith(("rlhfkit.", "torch.")):
        placeholder = {"params": [torch.nn.Parameter(torch.zeros(2, 2))], "kind": "matrices"}
        try:
            make_optimizer(function, [placeholder], arguments, lr=1.0, weight_decay=0.0, betas=(0.9, 0.95))
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"optimizer={name!r} refuses optimizer_arguments={dict(arguments)}: {error}") from error


def make_optimizer(function: OptimizerFactory, groups: Groups, arguments: Mapping[str, Any], **given: Any) -> Optimizer:
    """Make an optimizer: what is ``given`` is for functions with such an argument.

    One that passes ``**kwargs`` on is given the rate and the decay, which every optimizer takes.
    """
    names = taken_names(function)
    return function(groups, **{name: value for name, value in given.items() if name in names}, **arguments)


def taken_names(function: OptimizerFactory) -> set[str]:
    """Names of the arguments that a function takes; with ``**kwargs`` also the rate and the decay."""
    parameters = inspect.signature(function).parameters
    passes_on = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {*parameters} | ({"lr", "weight_decay"} if passes_on else set())
