"""Events of ranks reach the driver completely and in order, in whatever order Ray runs the calls of the mailbox.

Covers strategies/ray/actor.py.
"""

import asyncio
import random

import pytest

from rlhfkit.strategies.ray.actor import Mailbox


@pytest.mark.parametrize("seed", range(5))
def test_events_of_a_rank_are_delivered_in_its_order(seed: int) -> None:
    async def run() -> list[tuple[str, int, int]]:
        mailbox, sent = Mailbox(), [(rank, number) for rank in range(3) for number in range(20)]
        random.Random(seed).shuffle(sent)  # allow_out_of_order_execution
        posts = [mailbox.post(rank, number, "line", rank, number) for rank, number in sent]
        ends = [asyncio.create_task(mailbox.delivered(rank, 20)) for rank in range(3)]
        collecting = asyncio.create_task(mailbox.collect())
        for post in posts:
            assert not all(end.done() for end in ends)
            await post
            await asyncio.sleep(0)
        await asyncio.gather(*ends)
        await mailbox.close()
        return await collecting + await mailbox.collect()

    events = asyncio.run(run())
    for rank in range(3):
        assert [number for _, sender, number in events if sender == rank] == list(range(20))
    assert len(events) == 60


def test_a_closed_mailbox_keeps_nobody_waiting() -> None:
    async def run() -> list[object]:
        mailbox = Mailbox()
        waiting = asyncio.create_task(mailbox.collect())
        await asyncio.sleep(0)
        assert not waiting.done()
        await mailbox.close()
        return await asyncio.wait_for(waiting, 1)

    assert asyncio.run(run()) == []
