"""``Ranks``: gathers and sums over the rows of an iteration, of which each rank has some; :func:`local_rows`."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.distributed import all_reduce, gather_objects, get_rank, get_world_size
from rlhfkit.losses import masked_mean, whiten
from rlhfkit.losses.advantages.rewards import RewardMoments
from rlhfkit.losses.aggregation import masked_moments

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


# ---------------------------------------------------------------------- which functions know of ranks


def local_rows(function: F) -> F:
    """Mark a function of an :class:`~rlhfkit.data.Experience` that needs no rows of other ranks.

    For functions of rows among ``parts``, an ``advantages=`` function of the experience, and overrides of
    ``advantages``. With several ranks a marked function is given this rank's rows only, so that nothing is gathered;
    other samples of their groups may be on other ranks. What it needs of those is in ``experience.summary`` (rewards,
    groups and lengths of all N rows), in ``module.ranks.gather_rows(experience, values)``, or in sums over
    ranks (``module.ranks.whiten``).

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


class Ranks:
    """What a module asks of the other ranks about an iteration; every method but :meth:`visible` is a collective.

    An :class:`~rlhfkit.data.Experience` with a summary (``experience.iteration``) has this rank's rows. Without one, or
    in one process, its rows are all there are, and nothing is exchanged.

    Args:
        module: Says on which device values are exchanged.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._warned: set[str] = set()

    def _sum(self, values: Tensor) -> Tensor:
        return all_reduce(values.to(self._module.device)).to(values.device)

    # ------------------------------------------------------------------ rows of all ranks

    def gather_rows(self, experience: Experience, values: Tensor) -> Tensor:
        """Gather values of own rows, (B, ...), to those of all rows of the iteration, (N, ...), on every rank.

        They are in the order of the iteration, that of ``experience.summary``; ``[experience.own_rows]`` selects own
        rows again. Each row is on exactly one rank; NaN stay. In one process they are ``values``.

        Raises:
            ValueError: Unless there is a value for each own row.
        """
        if experience.iteration is None:
            return values
        if len(values) != len(experience):
            raise ValueError(f"gather_rows takes one value for each of {len(experience)} own rows, got {len(values)}")
        is_bool = values.dtype == torch.bool  # NCCL does not add these
        rows, shape = experience.own_rows.to(values.device), (len(experience.iteration), *values.shape[1:])
        everyone = values.new_zeros(shape, dtype=torch.uint8 if is_bool else None)
        everyone[rows] = values.to(everyone.dtype)
        if get_world_size() > 1:
            everyone = self._sum(everyone)
        return everyone.bool() if is_bool else everyone

    def gather_experience(self, experience: Experience) -> Experience:
        """Gather all rows of an iteration, in its order, on every rank; the experience itself if they are all here.

        Takes memory for the whole iteration on every rank. A field that only some ranks have is 0 for the rows of
        others, a part of the reward that only some ranks have is NaN.
        """
        if not is_spread(experience):
            return experience
        forms = {name: (value.dtype, value.shape[1:], on["axis"]) for name, (value, on) in experience.tensors().items()}
        images = dict(zip(experience.own_rows.tolist(), experience.attachments or (), strict=False))
        ranks = gather_objects((experience.input_ids.shape[1], forms, images))
        own = experience.pad(max(length for length, _, _ in ranks))
        known, lengths = own.tensors(), {"token": own.input_ids.shape[1:], "step": own.action_mask.shape[1:], "row": ()}
        gathered: dict[str, Tensor] = {}
        everywhere = {name: form for _, forms, _ in reversed(ranks) for name, form in forms.items() if name != "rows"}
        for name, (dtype, shape, axis) in sorted(everywhere.items()):
            if name in known:
                values = known[name][0]
            else:
                fill = torch.nan if name.startswith("reward_parts.") else 0
                values = torch.full((len(own), *lengths[axis], *shape[1:]), fill, dtype=dtype)
            gathered[name] = self.gather_rows(experience, values)
        seen = {row: each for _, _, rows in ranks for row, each in rows.items()}
        attachments = tuple(seen.get(row, ()) for row in range(len(experience.summary))) if seen else None
        return dataclasses.replace(own.with_tensors(gathered), rows=None, iteration=None, attachments=attachments)

    # ------------------------------------------------------------------ functions of rows

    def visible(self, function: Callable[..., Any], experience: Experience) -> Experience:
        """What a function of rows is given: own ones if it is marked so, else the gathered iteration. A collective."""
        if takes_local_rows(function) or not is_spread(experience):
            return experience
        gathered, name = self.gather_experience(experience), function_label(function)
        if name not in self._warned:
            warn_of_gathering(name, gathered)
        self._warned.add(name)
        return gathered

    def changed_by(
        self, function: Callable[[Experience], Experience], experience: Experience, *, mark: Callable[..., Any]
    ) -> Experience:
        """Own rows of the result of a function of rows, which is given those that ``mark`` asks for."""
        given = self.visible(mark, experience)
        found = function(given)
        return found if given is experience else own_part(found, experience)

    def advantages_by(self, function: Callable[[Experience], Tensor], experience: Experience) -> Tensor:
        """(B,) or (B, T-1) advantages by a function of own rows or, unless it is marked so, of the whole iteration."""
        if experience.iteration is not None:  # so that its rewards are the processed ones too
            rewards = self.gather_rows(experience, experience.rewards)
            summary = dataclasses.replace(experience.iteration, rewards=rewards)
            experience = dataclasses.replace(experience, iteration=summary)
        given = self.visible(function, experience)
        advantages = function(given)
        if len(advantages) != len(given):
            raise ValueError(
                f"{function_label(function)} returned advantages of {len(advantages)} sequences and was given "
                f"{len(given)}; results for all ranks' sequences are indexed with experience.own_rows"
            )
        if given is not experience:
            advantages = advantages[experience.own_rows]
            advantages = advantages if advantages.dim() == 1 else advantages[:, : experience.action_mask.shape[1]]
        return advantages

    def over_iteration(
        self, estimate: Callable[[Tensor, Tensor, Tensor], Tensor], experience: Experience, rewards: Tensor
    ) -> Tensor:
        """Estimate advantages (B,) of own rows by comparing those of all ranks.

        ``estimate`` is called with rewards, group ids and lengths in tokens, (N,) each, of the whole iteration in its
        order, and returns (N,). ``rewards`` are those of own rows, (B,).
        """
        columns = (rewards, experience.group, experience.action_mask.sum(-1))
        advantages = estimate(*(self.gather_rows(experience, column) for column in columns))
        return advantages if experience.iteration is None else advantages[experience.own_rows]

    # ------------------------------------------------------------------ sums over ranks

    def whiten(self, experience: Experience, values: Tensor) -> Tensor:
        """:func:`~rlhfkit.losses.whiten` of (B, T-1) values of trained tokens, by the moments of all ranks."""
        mask = experience.action_mask
        if not is_spread(experience):
            return whiten(values, mask)
        return whiten(values, mask, moments=self._sum(masked_moments(values, mask)))

    def mean(self, experience: Experience, values: Tensor) -> float:
        """Mean of (B, T-1) values over the trained tokens of all ranks; 0 without any."""
        mask = experience.action_mask
        if not is_spread(experience):
            return float(masked_mean(values, mask))
        count, total, _ = self._sum(masked_moments(values, mask)).tolist()
        return float(total / max(count, 1.0))

    def updated_moments(self, moments: RewardMoments, experience: Experience, values: Tensor) -> RewardMoments:
        """Add the values of all ranks, of any shape on each, to running moments."""
        if not is_spread(experience):
            return moments.update(values)
        ranks = torch.zeros(get_world_size(), 3, dtype=torch.float64)
        ranks[get_rank()] = torch.stack([*RewardMoments.zero().update(values)])
        for each in self._sum(ranks):
            moments = moments.merge(RewardMoments(*each))
        return moments


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
