"""How samples and rewards are written in JSON between :class:`RemoteReward` and a server. Never with pickle."""

import json
import math
from collections.abc import Sequence
from typing import Any, Protocol

from rlhfkit.data.types import Sample


class WireFormat(Protocol):
    """What is posted to a reward server and where the rewards are in its answer."""

    path: str
    """Appended to the server's URL."""

    def request(self, samples: Sequence[Sample], /) -> Any:
        """Samples as plain JSON values."""
        ...

    def rewards(self, answer: Any, /) -> Any:
        """The list of rewards in an answer; what it holds is checked by the caller.

        Raises:
            ValueError: If there is none, with what was expected.
        """
        ...


class SampleFormat:
    """The format of ``rlhfkit serve-reward``: all of a sample but log-probs, policy versions and rewards.

    Posted to ``/score`` is ``{"samples": [...]}``, each as :func:`sample_to_json` writes it; the answer is
    ``{"rewards": [0.5, null, ...]}``, a number or null for each sample, in order.
    """

    path = "/score"

    def __init__(self, *, columns: Sequence[str] | None = None) -> None:
        """Choose what is sent.

        Args:
            columns: Columns of the prompts' metadata that are sent; ``None``: all.
        """
        self.columns = None if columns is None else tuple(columns)

    def request(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """``{"samples": [...]}``."""
        return {"samples": [sample_to_json(sample, columns=self.columns) for sample in samples]}

    def rewards(self, answer: Any) -> Any:
        """``answer["rewards"]``."""
        return _rewards_field(answer)


class OpenRLHFFormat:
    """The format of OpenRLHF's ``--remote_rm_url``, for reward servers that were written for it.

    Posted to the URL itself is ``{"query": [prompt + completion, ...], "prompts": [...], "labels": [...]}``; the answer
    is ``{"rewards": [...]}``, what else it has is not read.
    """

    path = ""

    def request(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Texts, without the special tokens that OpenRLHF keeps in completions."""
        return {
            "query": [sample.prompt.text + sample.text for sample in samples],
            "prompts": [sample.prompt.text for sample in samples],
            "labels": [sample.prompt.answer for sample in samples],
        }

    def rewards(self, answer: Any) -> Any:
        """``answer["rewards"]``."""
        return _rewards_field(answer)


def sample_to_json(sample: Sample, *, columns: Sequence[str] | None = None) -> dict[str, Any]:
    """A sample as plain JSON values, which ``rlhfkit.rewards.remote.server`` reads.

    Args:
        sample: What is to be scored.
        columns: Columns of the prompt's metadata to keep; ``None``: all.
    """
    prompt = sample.prompt
    return {
        "prompt": {
            "index": prompt.index,
            "token_ids": prompt.token_ids,
            "text": prompt.text,
            "answer": prompt.answer,
            "metadata": {name: value for name, value in prompt.metadata.items() if columns is None or name in columns},
        },
        "sample_index": sample.sample_index,
        "token_ids": sample.token_ids,
        "action_mask": sample.action_mask,
        "finish_reason": sample.finish_reason,
        "text": sample.text,
    }


def written_request(wire: WireFormat, samples: Sequence[Sample]) -> bytes:
    """The body of a request.

    Raises:
        TypeError: If a sample holds what JSON cannot.
        ValueError: The same, of numbers that are not finite.
    """
    return json.dumps(wire.request(samples), allow_nan=False, separators=(",", ":")).encode()


def read_rewards(wire: WireFormat, body: bytes, count: int) -> list[float | str | None]:
    """What an answer says of each sample: its reward, ``None``, or in words what is wrong with the reward.

    Args:
        wire: Its format.
        body: As received, from anybody.
        count: Samples that were sent.

    Raises:
        ValueError: If it is not one value for each sample.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{body[:200].decode(errors='replace')!r}, which is no JSON ({error})") from error
    values = wire.rewards(answer)
    if not isinstance(values, list):
        raise ValueError(f"rewards that are no list: {str(values)[:200]}")
    if len(values) != count:
        raise ValueError(f"{len(values)} rewards for {count} samples")
    return [_checked(value) for value in values]


def _checked(value: Any) -> float | str | None:
    """A reward, or what is wrong with it."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    return f"the reward {str(value)[:80]!r}, which is no finite number"


def _rewards_field(answer: Any) -> Any:
    if not isinstance(answer, dict) or "rewards" not in answer:
        raise ValueError(f'no {{"rewards": [...]}}, but {str(answer)[:200]}')
    return answer["rewards"]
