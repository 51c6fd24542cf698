"""Samples as tensors and plain values, for checkpoints."""

import json
from array import array
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlhfkit.data.token_arrays import as_tensor, stored
from rlhfkit.data.types import Prompt, Sample


def sample_state(sample: Sample) -> dict[str, Any]:
    """A sample as tensors and plain values, loadable with ``torch.load(weights_only=True)``.

    Answers and metadata of the prompt that JSON does not know become text.
    """
    prompt = sample.prompt
    loose = {"answer": prompt.answer, "metadata": prompt.metadata, "info": sample.info}
    runs = stored(sample, "versions")
    tensors = {name: stored(sample, name) for name in ("token_ids", "logprobs", "action_mask", "token_rewards")}
    tensors |= {"prompt_ids": stored(prompt, "token_ids"), "versions": runs.values, "version_lengths": runs.lengths}
    return {
        **{name: None if values is None else _copied(values) for name, values in tensors.items()},
        "index": prompt.index,
        "prompt_text": prompt.text,
        "sample_index": sample.sample_index,
        "finish_reason": sample.finish_reason,
        "text": sample.text,
        "reward": None if sample.reward is None else float(sample.reward),
        "reward_parts": {name: float(value) for name, value in sample.reward_parts.items()},
        "loose": json.dumps(loose, default=str),
    }


def sample_from_state(state: Mapping[str, Any]) -> Sample:
    """Inverse of :func:`sample_state`."""
    loose = json.loads(state["loose"])
    ids = state["prompt_ids"].tolist()
    prompt = Prompt(state["index"], ids, state["prompt_text"], answer=loose["answer"], metadata=loose["metadata"])
    return Sample.from_arrays(
        prompt,
        state["sample_index"],
        token_ids=state["token_ids"],
        logprobs=state["logprobs"],
        finish_reason=state["finish_reason"],
        version_runs=zip(state["versions"].tolist(), state["version_lengths"].tolist(), strict=True),
        action_mask=state["action_mask"],
        token_rewards=state["token_rewards"],
        text=state["text"],
        reward=state["reward"],
        reward_parts=dict(state["reward_parts"]),
        info=loose["info"],
    )


def _copied(values: "array[Any]") -> Tensor:
    return as_tensor(values).clone()
