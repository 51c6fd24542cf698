"""``rlhfkit score``: add a reward to each line of completions."""

import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhfkit.cli.jsonl import JSONLWriter, progress_bar, weights_stamp
from rlhfkit.data.types import Prompt, Sample
from rlhfkit.datamodules.prompts.datamodule import final_answer
from rlhfkit.datamodules.tokenization.sources import IMAGES, Source, check_columns, describe, read_rows
from rlhfkit.rewards.base import TIMEOUT, Reward, reward_name, score_samples

log = logging.getLogger(__name__)


def score(
    data: Source,
    output: str | os.PathLike[str],
    *,
    reward: Reward | Callable[[Sequence[Sample]], Any] | None = None,  # the second: functions without annotations
    reward_model: str | None = None,
    prompt: str = "prompt",
    completion: str = "completion",
    answer: str | None = None,
    answer_extractor: Callable[[Any], Any] = final_answer,
    split: str = "train",
    subset: str | None = None,
    batch_size: int = 1024,
    timeout: float = TIMEOUT,
    overwrite: bool = False,
    progress: bool = True,
) -> Path:
    """Score completions and write their lines with ``reward`` added, in the data's order.

    A reward with several parts adds ``reward_parts`` too. A line that could not be scored gets null; the log counts
    these. An interrupted run is continued when started again.

    Example::

        rlhfkit score samples.jsonl scored.jsonl --reward rlhfkit.rewards.math_match --prompt question --answer answer

    Args:
        data: Completions, e.g. the output of ``rlhfkit generate``.
        output: File to write or to continue.
        reward: Dotted path of a reward function, or a reward class with its arguments.
        reward_model: Instead of ``reward``: folder or hub name of a reward model with the completions' tokenizer, which
            reads their token ids (for others use ``ModelReward`` with its arguments).
        prompt: Column of the prompts: text or chat messages.
        completion: Column of the completions.
        answer: Column of the reference answers; ``None``: there are none.
        answer_extractor: Applied to each reference answer.
        split: Split of the data, where it has several.
        subset: Configuration of a hub data set.
        batch_size: Lines per batch; an interruption loses at most one batch.
        timeout: Time limit in seconds of an async reward per batch.
        overwrite: Start anew when the output exists.
        progress: Show a progress bar.

    Returns:
        The output file.

    Raises:
        ValueError: If not exactly one of ``reward`` and ``reward_model`` is given, a column is missing, the reward does
            not return one number or ``None`` per line, or the output was written with other settings.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    scorer = _resolve_reward(reward, reward_model)
    rows = read_rows(data, split=split, subset=subset)
    check_columns(rows, data, prompt=prompt, completion=completion, answer=answer)
    settings = {
        "data": [describe(data), len(rows), *_stamp(data)],
        "reward": reward_model or reward_name(scorer),
        "reward_arguments": _plain_arguments(scorer),
        "weights": [] if reward_model is None else weights_stamp(reward_model),
        "columns": [prompt, completion, answer],
        "rows": [split, subset],
        "answer_extractor": reward_name(answer_extractor),
    }
    unscored = 0
    with (
        JSONLWriter(output, settings, overwrite=overwrite) as writer,
        progress_bar("score", len(rows), done=writer.done, unit="lines", shown=progress) as advance,
    ):
        for start in range(writer.done, len(rows), batch_size):
            lines = [rows[index] for index in range(start, min(start + batch_size, len(rows)))]
            samples = []
            for index, line in enumerate(lines, start=start):
                reference = None if answer is None else answer_extractor(line[answer])
                samples.append(as_sample(line, index, prompt, completion, reference))
            score_samples(scorer, samples, timeout=timeout)
            unscored += sum(sample.reward is None for sample in samples)
            writer.write(
                line | {"reward": sample.reward} | _parts(sample) for line, sample in zip(lines, samples, strict=True)
            )
            advance(len(lines))
    if unscored:
        log.warning("%d lines of %s could not be scored; their reward is null", unscored, describe(data))
    return Path(output)


def _resolve_reward(reward: Reward | None, reward_model: str | None) -> Reward:
    if reward_model is None and reward is not None:
        return reward
    if reward_model is None or reward is not None:
        raise ValueError(f"give either a reward or a reward_model, got {reward!r} and {reward_model!r}")
    from rlhfkit.rewards.models import ModelReward

    return ModelReward(reward_model)


_WITHOUT_EFFECT = ("timeout", "workers", "device", "max_tokens_per_forward")
"""Attributes of rewards that change how long scoring takes, and no score."""


def _plain_arguments(reward: Reward) -> dict[str, Any]:
    """What can be written down of a reward's public attributes, which mostly are its arguments; functions have none."""

    def plain(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return all(map(plain, value))
        return value is None or isinstance(value, str | int | float)

    public = {
        name: str(value) if isinstance(value, re.Pattern) else value
        for name, value in getattr(reward, "__dict__", {}).items()
        if not name.startswith("_") and name not in _WITHOUT_EFFECT
    }
    return {name: value for name, value in public.items() if plain(value)}


def as_sample(line: Mapping[str, Any], index: int, prompt: str, completion: str, answer: Any = None) -> Sample:
    """Return a line as a sample for rewards, with its ``prompt_ids`` and ``completion_ids`` if it has any.

    A line of token ids has the images of its column ``images`` or ``image``, too. ``index`` is used for a
    line without one. ``Prompt.text`` of chat messages has the contents, one per line.
    """
    content = line[prompt]
    text = content if isinstance(content, str) else "\n".join(str(message["content"]) for message in content)
    own = {prompt, completion, "prompt_ids", "completion_ids"}
    token_ids = list(line.get("completion_ids") or [])
    found: Any = next((line[name] for name in IMAGES if line.get(name)), []) if line.get("prompt_ids") else []
    images: tuple[Any, ...] = ()
    if found:
        from rlhfkit.data.images import Image

        values = found if isinstance(found, list | tuple) else [found]
        images = tuple(Image.of(value, f"image {number} of row {index}") for number, value in enumerate(values))
    return Sample(
        prompt=Prompt(
            index=line.get("index", index),
            token_ids=list(line.get("prompt_ids") or []),
            text=text,
            answer=answer,
            metadata={name: value for name, value in line.items() if name not in own},
            attachments=images,
        ),
        sample_index=line.get("sample_index", 0),
        token_ids=token_ids,
        logprobs=[math.nan] * len(token_ids),
        versions=[0] * len(token_ids),
        finish_reason=line.get("finish_reason", "stop"),
        text=line[completion],
    )


def _parts(sample: Sample) -> dict[str, Any]:
    """Return the column ``reward_parts``, if there are several."""
    return {"reward_parts": sample.reward_parts} if len(sample.reward_parts) > 1 else {}


def _stamp(data: Source) -> list[int]:
    """Size and modification time of a file, to notice changes; empty for other sources."""
    if not isinstance(data, str | os.PathLike) or not Path(data).is_file():
        return []
    return [Path(data).stat().st_size, Path(data).stat().st_mtime_ns]
