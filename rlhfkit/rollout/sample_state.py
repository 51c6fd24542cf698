"""Samples as tensors and plain values, for checkpoints."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rlhfkit.data.types import Prompt, Sample


def sample_state(sample: Sample) -> dict[str, Any]:
    """A sample as tensors and plain values, loadable with ``torch.load(weights_only=True)``.

    Answers and metadata of the prompt that JSON does not know become text.
    """
    prompt = sample.prompt
    loose = {"answer": prompt.answer, "metadata": prompt.metadata, "info": sample.info}
    names = ("token_ids", "logprobs", "versions", "action_mask", "token_rewards")
    arrays = {name: getattr(sample, name) for name in names} | {"prompt_ids": prompt.token_ids}
    return {
        **{name: None if values is None else torch.from_numpy(np.array(values)) for name, values in arrays.items()},
        "index": prompt.index,
        "prompt_text": prompt.text,
        "attachments": [one.plain() for one in prompt.attachments],
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
    ids = state["prompt_ids"]
    prompt = Prompt(
        state["index"],
        ids,
        state["prompt_text"],
        answer=loose["answer"],
        metadata=loose["metadata"],
        attachments=state["attachments"],
    )
    return Sample(
        prompt,
        state["sample_index"],
        token_ids=state["token_ids"],
        logprobs=state["logprobs"],
        versions=state["versions"],
        finish_reason=state["finish_reason"],
        action_mask=state["action_mask"],
        token_rewards=state["token_rewards"],
        text=state["text"],
        reward=state["reward"],
        reward_parts=dict(state["reward_parts"]),
        info=loose["info"],
    )
