"""What ranks do with ``rlhfkit.data.exchange``; each rank is a process (``strategies/ranks.py``)."""

import dataclasses
import os
from typing import Any

import torch
import torch.distributed as dist

from rlhfkit.callbacks.rollout.sharing import no_rows
from rlhfkit.data import Experience, Prompt, Sample
from rlhfkit.data.exchange import exchange_rows, gather_columns
from rlhfkit.data.images import Image
from rlhfkit.datamodules.streaming import MixedStream, RowReader, SourceStream

PARTS = ("format", "right")


def sample(row: int, generator: torch.Generator) -> Sample:
    """A sample of any length, with or without a reward, parts and rewards of tokens."""
    tokens = int(torch.randint(1, 9, (1,), generator=generator))
    images = (Image(bytes([row]), f"image {row}"),) if row % 4 == 3 else ()
    prompt = Prompt(row // 2, list(range(1, 2 + row % 4)), attachments=images)
    record = Sample(
        prompt, row % 2, [row + 10] * tokens, [-0.125 * row] * tokens, [row] * tokens, "stop",
        action_mask=[bool((place + row) % 3) for place in range(tokens)] if row % 3 else None,
    )  # fmt: skip
    if row % 5:
        record.reward = row / 7
        record.reward_parts = {PARTS[row % 2]: row / 3}
    if row == 4:
        record.token_rewards = [0.5] * tokens
    return record


def equal(one: Experience, other: Experience) -> list[str]:
    """Names of the fields that differ."""
    wrong = []
    for each in dataclasses.fields(one):
        left, right = getattr(one, each.name), getattr(other, each.name)
        if each.name == "iteration":
            continue
        if isinstance(left, dict):
            same = left.keys() == right.keys() and all(
                torch.allclose(left[name], right[name], rtol=0, atol=0, equal_nan=True) for name in left
            )
        elif isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            same = left.dtype == right.dtype and left.shape == right.shape
            same = same and torch.allclose(left.double(), right.double(), rtol=0, atol=0, equal_nan=True)
        else:
            same = left == right
        if not same:
            wrong.append(each.name)
    return wrong


def everything(**_: Any) -> dict[str, Any]:
    """Random iterations, random owners before and after, some fields that a module adds."""
    rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    wrong: list[Any] = []
    for seed in range(25):
        generator = torch.Generator().manual_seed(seed)
        total = int(torch.randint(world_size, 14, (1,), generator=generator))
        samples = [sample(row, generator) for row in range(total)]
        whole = Experience.from_samples(samples, temperature=0.7)
        source = torch.randint(world_size, (total,), generator=generator)
        here = torch.rand(world_size, total, generator=generator) < 0.5  # rows may be copied to several ranks
        if seed % 3:
            destination = torch.randint(world_size, (total,), generator=generator)
            here = destination == torch.arange(world_size)[:, None]
        if not seed % 5:
            here[seed % world_size] = False  # a rank gets none
        wanted = [each.nonzero()[:, 0] for each in here]
        rows = (source == rank).nonzero()[:, 0]
        experience = no_rows(0.7)
        if len(rows):
            experience = Experience.from_samples([samples[row] for row in rows.tolist()], temperature=0.7)
        if seed % 2:  # as a module has prepared it
            whole.columns["values"] = torch.where(
                whole.action_mask, torch.rand(whole.action_mask.shape, generator=generator), 0.0
            )
            experience.columns["values"] = whole.columns["values"][rows, : experience.action_mask.shape[1]]
        if seed % 4 == 1:  # several numbers of each token: experts, the teacher's likeliest tokens
            steps = whole.action_mask[..., None]
            choices = torch.randint(9, (*whole.action_mask.shape, 3), generator=generator)
            whole.columns["routing"] = torch.where(steps, choices, 0).to(torch.int16)
            whole.columns["teacher_top_logprobs"] = torch.where(steps, -choices / 7, 0.0)
            whole.columns["teacher_top_ids"] = torch.where(steps, choices, 0).int()
            for name in ("routing", "teacher_top_logprobs", "teacher_top_ids"):
                experience.columns[name] = whole.columns[name][rows, : experience.action_mask.shape[1]]
        columns = {"row": rows.double(), **({"first": rows.double()} if rank == 0 else {})}
        found = gather_columns(columns, rows, total, names=["first", "row"])
        first = torch.where(source == 0, torch.arange(total), torch.nan).double()
        if not torch.equal(found["row"], torch.arange(total).double()):
            wrong.append((seed, "row"))
        if not torch.allclose(found["first"], first, rtol=0, atol=0, equal_nan=True):
            wrong.append((seed, "first"))
        summary = whole.summarize()
        summary.update = torch.arange(total)
        experience.rows = rows
        earned = any(one.token_rewards is not None for one in samples)
        seen = whole.attachments is not None
        own = exchange_rows(experience, summary, source, wanted, token_rewards=earned, attachments=seen)
        mine = wanted[rank]
        expected = dataclasses.replace(whole, update=summary.update).select(mine)
        expected = expected if len(mine) else expected.pad(2)
        expected.rows = mine
        if names := equal(own, expected):
            wrong.append((seed, names))
        if own.iteration is not summary:
            wrong.append((seed, "summary"))
    return {"wrong": wrong, "streams": streams(rank)}


def streams(rank: int) -> list[str]:
    """What ranks say of a stream that is the same on all, and of one that a rank has in another order."""

    def said(last: str) -> str:
        reader = RowReader(lambda: iter([{"text": "a", "note": rank}, {"text": last}]))
        stream = SourceStream(reader, iter, columns=["text"], block=9, seed=0)
        try:
            return MixedStream(reader, [stream]).fingerprint
        except ValueError as error:
            return str(error)

    return [said("b"), said(f"{rank}")]
