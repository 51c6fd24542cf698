"""Rows that move between three ranks over gloo; and streams that differ between ranks are refused."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strategies import ranks

from data.examples import assert_same, random_samples, with_columns
from rlhfkit.callbacks.rollout.sharing import no_rows
from rlhfkit.data import Experience
from rlhfkit.data.exchange import exchange_rows, gather_columns
from rlhfkit.datamodules.streaming import MixedStream, RowReader, SourceStream


@pytest.mark.distributed
def test_any_rows_on_any_ranks_arrive_as_they_were_in_the_whole_iteration(tmp_path: Path) -> None:
    ranks.run("data.test_exchange:on_rank", ranks=3, folder=tmp_path)


def on_rank(**_: Any) -> None:
    """Random iterations, random owners before and after, some fields that a module adds."""
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    for seed in range(25):
        exchanged(seed)
    assert len(fingerprint("b")) == 32
    with pytest.raises(ValueError, match="the ranks read different rows from the given rows"):
        fingerprint(str(dist.get_rank()))


def exchanged(seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    total = int(torch.randint(world_size, 14, (1,), generator=generator))
    samples = random_samples(total, generator)
    whole = Experience.from_samples(samples, temperature=0.7)
    source = torch.randint(world_size, (total,), generator=generator)
    here = torch.rand(world_size, total, generator=generator) < 0.5  # rows may be copied to several ranks
    if seed % 3:
        here = torch.randint(world_size, (total,), generator=generator) == torch.arange(world_size)[:, None]
    if not seed % 5:
        here[seed % world_size] = False  # a rank gets none
    wanted = [each.nonzero()[:, 0] for each in here]
    rows = (source == rank).nonzero()[:, 0]
    own = [samples[row] for row in rows.tolist()]
    experience = Experience.from_samples(own, temperature=0.7) if own else no_rows(0.7)
    if seed % 2:
        whole = with_columns(whole, generator)
        width = experience.action_mask.shape[1]
        experience.columns = {name: column[rows, :width] for name, column in whole.columns.items()}
    columns = {"row": rows.double(), **({"first": rows.double()} if rank == 0 else {})}
    found = gather_columns(columns, rows, total, names=["first", "row"])
    assert torch.equal(found["row"], torch.arange(total).double())
    first = torch.where(source == 0, torch.arange(total), torch.nan).double()
    torch.testing.assert_close(found["first"], first, rtol=0, atol=0, equal_nan=True)
    summary = whole.summarize()
    summary.update = torch.arange(total)
    experience.rows = rows
    earned = any(one.token_rewards is not None for one in samples)
    seen = whole.attachments is not None
    arrived = exchange_rows(experience, summary, source, wanted, token_rewards=earned, attachments=seen)
    mine = wanted[rank]
    expected = dataclasses.replace(whole, update=summary.update).select(mine)
    expected = expected if len(mine) else expected.pad(2)
    expected.rows = mine
    assert_same(arrived, expected)
    assert arrived.iteration is summary


def fingerprint(last: str) -> str:
    """Of a stream of two rows whose order must be the same on all ranks."""
    reader = RowReader(lambda: iter([{"text": "a", "note": dist.get_rank()}, {"text": last}]))
    return MixedStream(reader, [SourceStream(reader, iter, columns=["text"], block=9, seed=0)]).fingerprint
