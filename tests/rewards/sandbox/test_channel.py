"""Each call gets its own answer or none, whatever it or other calls do."""

import struct
from collections.abc import Iterator

import pytest

from rewards.samples import sampled
from rewards.sandbox.misbehaving import ATTACKS_ON_THE_CHANNEL
from rlhfkit.rewards import SandboxedReward
from rlhfkit.rewards.sandbox.channel import ProtocolError, Response

NUMBER = bytes(range(1, 17))


@pytest.fixture(scope="module")
def reward() -> Iterator[SandboxedReward]:
    made = SandboxedReward("rewards.sandbox.misbehaving.reward", timeout=60.0, workers=2)
    yield made
    made.close()


def test_a_fresh_process_for_each_call_has_nothing_of_the_calls_before() -> None:
    name, batch = "rewards.sandbox.misbehaving.reward", [sampled("take over|0"), sampled("1")]
    kept, fresh = SandboxedReward(name, workers=1), SandboxedReward(name, workers=1, fresh_process=True)
    assert kept(batch) == [1000.0, 1000.0]  # as docs/security.md says of code that a reward runs in its own interpreter
    assert fresh(batch) == [1000.0, 1.0]
    kept.close()


@pytest.mark.parametrize("act", ATTACKS_ON_THE_CHANNEL)
def test_what_comes_after_each_hostile_call_is_right_or_none(reward: SandboxedReward, act: str) -> None:
    given = reward([sampled(f"{act}|5"), *(sampled(str(value)) for value in range(6, 10))])
    assert all(got in (value, None) for value, got in enumerate(given, 5))
    assert given.count(None) <= 3  # its own, and one for what it and the act before have left in each worker


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([b"\0"], "a request that was not made"),
        ([NUMBER[:8], b"\0"], "a request that was not made"),
        ([NUMBER + struct.pack(">Q", 2) + b"{}" + b"\n"], "more than its answer"),
        ([NUMBER + struct.pack(">Q", 0), b"{}"], "more than its answer"),
    ],
)
def test_wrong_numbers_and_surplus_bytes_are_noticed(pieces: list[bytes], message: str) -> None:
    answer = Response(NUMBER, 100)
    for piece in pieces[:-1]:
        answer.add(piece)
    with pytest.raises(ProtocolError, match=message):
        answer.add(pieces[-1])


def test_answers_arrive_in_pieces_and_are_bounded() -> None:
    answer = Response(NUMBER, 100)
    whole = NUMBER + struct.pack(">Q", 2) + b"[]"
    assert [answer.add(whole[i : i + 1]) for i in range(len(whole))] == [None] * (len(whole) - 1) + [b"[]"]
    with pytest.raises(OverflowError, match="answered with more than"):
        Response(NUMBER, 100).add(NUMBER + struct.pack(">Q", 101))
