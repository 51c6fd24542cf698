"""Exchange the rows of an iteration between ranks, as tensors: scalars of all rows to all, tokens to one rank each."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfkit.data.iteration import IterationSummary
from rlhfkit.data.types import Experience
from rlhfkit.distributed import get_rank, get_world_size


def gather_columns(
    columns: Mapping[str, Tensor], rows: Tensor, total: int, *, names: Sequence[str] | None = None, group: Any = None
) -> dict[str, Tensor]:
    """Return columns of all rows of the iteration, from those of every rank's own rows. A collective.

    Args:
        columns: (B,) numbers by name. A name that a rank does not have is NaN in its rows.
        rows: (B,) int64, which row of the iteration each one is; every row is on one rank.
        total: Rows of the iteration, N.
        names: Names of all ranks' columns, the same on every rank; ``None``: all ranks have the same columns.
        group: Process group for tensors on the CPU; ``None``: the default one.

    Returns:
        (N,) float64 columns, by name, the same on every rank.
    """
    names = list(columns) if names is None else names
    own = [columns[name].double() if name in columns else torch.full((len(rows),), torch.nan) for name in names]
    table = torch.zeros(total, len(names), dtype=torch.float64)
    if names:
        table[rows] = torch.stack(own, -1).double()
    if get_world_size() > 1:
        dist.all_reduce(table, group=group)  # every row is 0 on all ranks but one
    return dict(zip(names, table.unbind(-1), strict=True))


def exchange_rows(
    experience: Experience,
    summary: IterationSummary,
    source: Tensor,
    wanted: Sequence[Tensor],
    *,
    token_rewards: bool,
    group: Any = None,
) -> Experience:
    """Send rows to the ranks that train on them and return this rank's rows, in iteration order. A collective.

    What there is per token is sent once, without padding, from rank to rank; all other columns are in the summary. A
    rank that gets no rows has an experience of none, two tokens wide.

    Args:
        experience: This rank's rows, with :attr:`~rlhfkit.data.Experience.rows` in ascending order; every rank has the
            same fields, except for ``token_rewards``.
        summary: All N rows.
        source: (N,) int64, the rank that has each row.
        wanted: ``wanted[rank]``: (n,) int64, the rows that a rank shall have, ascending. Several may have the same.
        token_rewards: Whether any rank has rewards of tokens.
        group: Process group for tensors on the CPU; ``None``: the default one.
    """
    rank, world_size = get_rank(), get_world_size()
    leaving = [rows[source[rows] == rank] for rows in wanted]
    coming = _by_rank(wanted[rank], source, world_size)
    place = torch.full((len(summary),), -1)
    place[experience.own_rows] = torch.arange(len(experience))
    order = place[torch.cat(leaving)]
    arriving = torch.cat(coming)
    rows = arriving.sort().values
    chosen = summary.select(rows)
    longest = max(int(chosen.lengths.max()), 1) if len(rows) else 2  # two tokens: what a model can run
    attention = torch.arange(longest) < chosen.lengths[:, None]
    places = torch.searchsorted(rows, arriving).tolist()  # rows arrive by the rank that sent them

    def moved(values: Tensor, *, axis: int, fill: int = 0, sent_as: torch.dtype | None = None) -> Tensor:
        """Values of the rows that arrive, from those of the rows that this rank had: (B, T), (B, T-1) or with a third
        axis of several numbers for each token.
        """
        sizes = [[int((summary.lengths[each] - axis).sum()) for each in side] for side in (leaving, coming)]
        numbers = values.shape[2:]
        sent = torch.empty(0, *numbers, dtype=sent_as or values.dtype)
        if len(order):  # row by row: an index would copy the padding too
            ends = (experience.lengths[order] - axis).tolist()
            pieces = [values[row, :end].to(sent.dtype) for row, end in zip(order.tolist(), ends, strict=True)]
            sent = torch.cat(pieces)
            del pieces
        received = torch.empty(sum(sizes[1]), *numbers, dtype=sent.dtype)
        dist.all_to_all_single(received, sent, sizes[1], sizes[0], group=group)
        del sent
        table = torch.full((len(rows), attention.shape[1] - axis, *numbers), fill, dtype=values.dtype)
        ends = (summary.lengths[arriving] - axis).tolist()
        for place, piece in zip(places, torch.split(received, ends), strict=True):
            table[place, : len(piece)] = piece
        return table

    if token_rewards and experience.token_rewards is None:
        experience = dataclasses.replace(experience, token_rewards=torch.zeros_like(experience.rollout_logprobs))
    received = {"attention_mask": attention}
    for name, (values, metadata) in experience.tensors().items():
        axis = metadata["axis"]
        if axis != "row" and name not in received:
            # Token ids fit; and gloo sends no int16.
            sent_as = torch.int32 if axis == "token" or values.dtype == torch.int16 else None
            received[name] = moved(values, axis=int(axis == "step"), fill=metadata.get("fill", 0), sent_as=sent_as)
    names = ("rewards", "group", "sample_index", "truncated", "update", "replayed", "reward_parts")
    of_rows: dict[str, Any] = {name: getattr(chosen, name) for name in names}
    return dataclasses.replace(experience.with_tensors(received), **of_rows, rows=rows, iteration=summary)


def _by_rank(rows: Tensor, ranks: Tensor, world_size: int) -> list[Tensor]:
    """Divide rows by the rank that another column has for each."""
    return [rows[ranks[rows] == rank] for rank in range(world_size)]
