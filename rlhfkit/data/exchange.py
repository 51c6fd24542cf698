"""Exchange the rows of an iteration between ranks, as tensors: scalars of all rows to all, tokens to one rank each."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfkit.data.jagged import JaggedColumn, real_tokens
from rlhfkit.data.types import Experience, IterationSummary
from rlhfkit.distributed import gather_objects, get_rank, get_world_size


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
    attachments: bool = False,
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
        attachments: Whether a row of any rank has images, whose references then go to all ranks.
        group: Process group for tensors on the CPU; ``None``: the default one.
    """
    rank, world_size = get_rank(), get_world_size()
    leaving = [rows[source[rows] == rank] for rows in wanted]
    coming = [wanted[rank][source[wanted[rank]] == other] for other in range(world_size)]
    place = torch.full((len(summary),), -1)
    place[experience.own_rows] = torch.arange(len(experience))
    order = place[torch.cat(leaving)].tolist()
    arriving = torch.cat(coming)  # by the rank that sends them
    rows, sorted_places = arriving.sort()
    chosen = summary.select(rows)
    longest = max(int(chosen.lengths.max()), 1) if len(rows) else 2  # two tokens: what a model can run

    def received(values: Tensor, metadata: Mapping[str, Any]) -> Tensor:
        """Send the rows of one field, and return those that arrive, padded."""
        column = JaggedColumn.of(values, metadata, experience.lengths)
        sent = torch.cat(
            [column.rows[row] for row in order] or [column.empty if column.shorter else column.empty.int()]
        )
        sent = sent.int() if sent.dtype == torch.int16 else sent  # which gloo does not send
        sizes = [
            [int((summary.lengths[each] - column.shorter).sum()) for each in divided] for divided in (leaving, coming)
        ]
        table = torch.empty(sum(sizes[1]), *sent.shape[1:], dtype=sent.dtype)
        dist.all_to_all_single(table, sent, sizes[1], sizes[0], group=group)
        pieces = torch.split(table, (summary.lengths[arriving] - column.shorter).tolist()) if len(arriving) else []
        return column.padded([pieces[place] for place in sorted_places.tolist()], longest)

    if token_rewards and experience.token_rewards is None:
        experience = dataclasses.replace(experience, token_rewards=torch.zeros_like(experience.rollout_logprobs))
    per_token = {
        name: received(values, metadata)
        for name, (values, metadata) in experience.tensors().items()
        if metadata["axis"] != "row" and name != "attention_mask"
    }
    per_token["attention_mask"] = real_tokens(chosen.lengths, longest)
    names = ("rewards", "group", "sample_index", "truncated", "update", "replayed", "reward_parts")
    of_rows: dict[str, Any] = {name: getattr(chosen, name) for name in names}
    if attachments:
        own = experience.attachments or ((),) * len(experience)
        shares = gather_objects(dict(zip(experience.own_rows.tolist(), own, strict=True)), group=group)
        every = {row: attached for share in shares for row, attached in share.items()}
        of_rows["attachments"] = tuple(every[row] for row in rows.tolist())
    return dataclasses.replace(experience.with_tensors(per_token), **of_rows, rows=rows, iteration=summary)
