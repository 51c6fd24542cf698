"""The JSON format of samples and rewards between :class:`RemoteReward` and a server. Never pickle."""

import json
import math
from collections.abc import Sequence
from typing import Any, Protocol

from rlhfkit.data.types import Sample


class WireFormat(Protocol):
    """The format of a server's requests and responses."""

    path: str
    """Appended to the server's URL."""

    def request(self, samples: Sequence[Sample], /) -> Any:
        """Return the body of a request as plain JSON values."""
        ...

    def rewards(self, answer: Any, /) -> Any:
        """Return the list of rewards in a response, unchecked; if it has none, raise ``ValueError`` with the reason."""
        ...


class SampleFormat:
    """The format of ``rlhfkit serve-reward``: all of a sample but log-probs, policy versions and rewards.

    ``POST /score`` takes ``{"samples": [...]}``, written by :func:`sample_to_json`, and returns ``{"rewards": [0.5,
    null, ...]}``, a number or null per sample, in order.
    """

    path = "/score"

    def __init__(self, *, columns: Sequence[str] | None = None) -> None:
        """Set the columns of the prompts' metadata to send; ``None``: all."""
        self.columns = None if columns is None else tuple(columns)

    def request(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return ``{"samples": [...]}``."""
        return {"samples": [sample_to_json(sample, columns=self.columns) for sample in samples]}

    def rewards(self, answer: Any) -> Any:
        """Return ``answer["rewards"]``."""
        return _rewards_field(answer)


class OpenRLHFFormat:
    """The format of OpenRLHF's ``--remote_rm_url``.

    Posts ``{"query": [prompt + completion, ...], "prompts": [...], "labels": [...]}`` to the URL itself, which returns
    ``{"rewards": [...]}``; other fields are ignored.
    """

    path = ""

    def request(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return texts, without the special tokens that OpenRLHF keeps in completions."""
        return {
            "query": [sample.prompt.text + sample.text for sample in samples],
            "prompts": [sample.prompt.text for sample in samples],
            "labels": [sample.prompt.answer for sample in samples],
        }

    def rewards(self, answer: Any) -> Any:
        """Return ``answer["rewards"]``."""
        return _rewards_field(answer)


def sample_to_json(sample: Sample, *, columns: Sequence[str] | None = None) -> dict[str, Any]:
    """Return a sample as plain JSON values, with these columns of the prompt's metadata (``None``: all).

    Images are not sent: they are files of this machine, which a server must not be told to read.
    """
    plain = sample.plain()
    metadata = {name: value for name, value in sample.prompt.metadata.items() if columns is None or name in columns}
    names = ("prompt", "sample_index", "token_ids", "action_mask", "finish_reason", "text")
    prompt = {name: value for name, value in plain["prompt"].items() if name != "attachments"}
    return {name: plain[name] for name in names} | {"prompt": prompt | {"metadata": metadata}}


def encode_request(wire_format: WireFormat, samples: Sequence[Sample]) -> bytes:
    """Return a request's body as JSON; raises ``TypeError`` for other values, ``ValueError`` for NaN and infinity."""
    return json.dumps(wire_format.request(samples), allow_nan=False, separators=(",", ":")).encode()


def decode_rewards(wire_format: WireFormat, body: bytes, count: int) -> list[float | str | None]:
    """Parse a response: for each sample its reward, ``None``, or a text that says what is wrong with it.

    Raises ``ValueError`` unless there are ``count`` values.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{body[:200].decode(errors='replace')!r}, which is not JSON ({error})") from error
    values = wire_format.rewards(answer)
    if not isinstance(values, list):
        raise ValueError(f"rewards that are not a list: {str(values)[:200]}")
    if len(values) != count:
        raise ValueError(f"{len(values)} rewards for {count} samples")
    return [_checked(value) for value in values]


def _checked(value: Any) -> float | str | None:
    """Return a reward, or a text that says what is wrong with it."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    return f"the reward {str(value)[:80]!r}, which is not a finite number"


def _rewards_field(answer: Any) -> Any:
    if not isinstance(answer, dict) or "rewards" not in answer:
        raise ValueError(f'no {{"rewards": [...]}}, but {str(answer)[:200]}')
    return answer["rewards"]
