"""Gathers and sums over all rows of an iteration, of which each rank has some, and the :func:`local_rows` mark.

An :class:`~rlhfkit.data.Experience` with a summary (``experience.iteration``) has this rank's rows, and every function
here is a collective for it. Without one, or in one process, its rows are all there are, and nothing is exchanged.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.distributed import all_reduce, gather_objects, get_rank, get_world_size
from rlhfkit.losses import RewardMoments, masked_mean, masked_moments, whiten

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


# ---------------------------------------------------------------------- which functions know of ranks


def local_rows(function: F) -> F:
    """Mark a function of an :class:`~rlhfkit.data.Experience` that needs no rows of other ranks.

    For functions of rows among ``parts``, an ``advantages=`` function of the experience, and overrides of
    ``advantages``. With several ranks a marked function is given this rank's rows only, so that nothing is gathered;
    other samples of their groups may be on other ranks. What it needs of those is in ``experience.summary`` (rewards,
    groups and lengths of all N rows), in ``module.gather_rows(experience, values)``, or in sums over ranks
    (``module.whiten``).

    Example::

        @local_rows
        def median_advantages(experience):
            everyone = experience.summary
            advantages = everyone.rewards - everyone.rewards.nanmedian()
            return advantages.nan_to_num(0.0)[experience.own_rows]
    """
    function.takes_local_rows = True  # type: ignore[attr-defined]  # functions take attributes
    return function


def takes_local_rows(function: Callable[..., Any]) -> bool:
    """Whether a function, or the one inside a partial, is marked with :func:`local_rows`."""
    return bool(getattr(inner_function(function), "takes_local_rows", False))


def function_label(function: Callable[..., Any]) -> str:
    """A function's name for messages, with its class if it is a method."""
    return getattr(inner_function(function), "__qualname__", repr(function))


def inner_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside a partial, or the function itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_spread(experience: Experience) -> bool:
    """Whether other ranks have further rows of the iteration."""
    return experience.iteration is not None and get_world_size() > 1


# ---------------------------------------------------------------------- rows of all ranks


def gather_rows(experience: Experience, values: Tensor, device: torch.device) -> Tensor:
    """Gather values of rows, (B, ...) on each rank, to (N, ...) in the order of the iteration, the same on every rank.

    Each row of the iteration is on exactly one rank. ``device`` is where values are exchanged; the result is where
    ``values`` are, and NaN stay. ``values`` themselves if the experience has no summary. Raises ValueError unless there
    is one for each own row.
    """
    if experience.iteration is None:
        return values
    if len(values) != len(experience):
        raise ValueError(f"gather_rows takes one value for each of {len(experience)} own rows, got {len(values)}")
    is_bool = values.dtype == torch.bool  # NCCL does not add these
    rows = experience.own_rows.to(values.device)
    everyone = values.new_zeros((len(experience.iteration), *values.shape[1:]), dtype=torch.uint8 if is_bool else None)
    everyone[rows] = values.to(everyone.dtype)
    if get_world_size() > 1:
        everyone = all_reduce(everyone.to(device)).to(values.device)
    return everyone.bool() if is_bool else everyone


def gather_experience(experience: Experience, device: torch.device) -> Experience:
    """Gather all rows of an iteration, in its order, on every rank; the experience itself if they are all here.

    Takes memory for the whole iteration on every rank. A field that only some ranks have is 0 for the rows of others, a
    part of the reward that only some ranks have is NaN.
    """
    if not is_spread(experience):
        return experience
    forms = {name: (value.dtype, value.shape[1:], axis["axis"]) for name, (value, axis) in experience.tensors().items()}
    ranks = gather_objects((experience.input_ids.shape[1], forms))
    own = experience.pad(max(length for length, _ in ranks))
    known, lengths = own.tensors(), {"token": own.input_ids.shape[1:], "step": own.action_mask.shape[1:], "row": ()}
    gathered: dict[str, Tensor] = {}
    everywhere = {name: form for _, forms in reversed(ranks) for name, form in forms.items() if name != "rows"}
    for name, (dtype, shape, axis) in sorted(everywhere.items()):
        if name in known:
            values = known[name][0]
        else:
            fill = torch.nan if name.startswith("reward_parts.") else 0
            values = torch.full((len(own), *lengths[axis], *shape[1:]), fill, dtype=dtype)
        gathered[name] = gather_rows(experience, values, device)
    return dataclasses.replace(own.with_tensors(gathered), rows=None, iteration=None)


def own_part(everyone: Experience, experience: Experience) -> Experience:
    """The rows of a gathered iteration that this rank has, as long as ``experience``, which has the same rows."""
    own = everyone.select(experience.own_rows).pad(experience.input_ids.shape[1])
    return dataclasses.replace(own, rows=experience.rows, iteration=experience.iteration)


def warn_of_gathering(name: str, gathered: Experience) -> None:
    """Log, on rank 0, what it costs that a function is not marked with :func:`local_rows`."""
    if get_rank():
        return
    size = sum(tensor.numel() * tensor.element_size() for tensor, _ in gathered.tensors().values())
    log.warning(
        "%s is given the whole iteration, so that each of %d ranks holds %d sequences in %.1f MiB more. To keep rows "
        "where they are trained on, write it for this rank's rows and experience.summary and mark it with "
        "rlhfkit.local_rows, or give advantages= a function of (rewards, group)",
        name,
        get_world_size(),
        len(gathered),
        size / 2**20,
    )


# ---------------------------------------------------------------------- sums over ranks


def whiten_all(experience: Experience, values: Tensor, device: torch.device) -> Tensor:
    """:func:`~rlhfkit.losses.whiten` of (B, T-1) values of trained tokens, by the moments of all ranks."""
    mask = experience.action_mask
    if not is_spread(experience):
        return whiten(values, mask)
    return whiten(values, mask, moments=all_reduce(masked_moments(values, mask).to(device)).to(values.device))


def mean_of_all(experience: Experience, values: Tensor, device: torch.device) -> float:
    """Mean of (B, T-1) values over the trained tokens of all ranks; 0 without any."""
    mask = experience.action_mask
    if not is_spread(experience):
        return float(masked_mean(values, mask))
    count, total, _ = all_reduce(masked_moments(values, mask).to(device)).tolist()
    return float(total / max(count, 1.0))


def update_moments(
    moments: RewardMoments, experience: Experience, values: Tensor, device: torch.device
) -> RewardMoments:
    """Add the values of all ranks, of any shape on each, to running moments."""
    if not is_spread(experience):
        return moments.update(values)
    ranks = torch.zeros(get_world_size(), 3, dtype=torch.float64, device=device)
    ranks[get_rank()] = torch.stack([*RewardMoments.zero().update(values)]).to(device)
    for each in all_reduce(ranks).cpu():
        moments = moments.merge(RewardMoments(*each))
    return moments
