"""``rlhfkit generate``: sample completions of many prompts and write them as JSON lines."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rlhfkit.cli.export import resolve_dtype
from rlhfkit.cli.jsonl import JSONLWriter, progress_bar, weights_stamp
from rlhfkit.data.types import Sample
from rlhfkit.datamodules.prompts.rows import PromptColumns, PromptRows
from rlhfkit.datamodules.tokenization.chat import PromptFormatter
from rlhfkit.datamodules.tokenization.sources import IMAGES, Source, describe, read_rows
from rlhfkit.models.attention.families import sees_images
from rlhfkit.models.load import (
    ModelLoading,
    base_model_name,
    load_causal_lm,
    load_config,
    load_tokenizer,
    precision_dtype,
)
from rlhfkit.rollout import LocalEngine, ModuleWeights, RolloutEngine, SamplingSpec
from rlhfkit.validation import check_integer

OUTPUT_COLUMNS = ("completion", "index", "sample_index", "finish_reason", "logprob", "prompt_ids", "completion_ids")
"""Columns that ``generate`` adds to those of the data."""


def generate(
    model: str,
    data: Source,
    output: str | os.PathLike[str],
    *,
    sampling: SamplingSpec | None = None,
    engine: RolloutEngine | None = None,
    prompt: str = "prompt",
    columns: list[str] | None = None,
    split: str = "train",
    subset: str | None = None,
    max_prompt_length: int | None = None,
    overlong_prompts: Literal["error", "drop"] = "error",
    apply_chat_template: bool | None = None,
    system: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    token_ids: bool = True,
    batch_size: int = 256,
    precision: str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> Path:
    """Sample completions of prompts and write them as JSON lines, ``group_size`` lines per prompt, in the data's order.

    A line has the columns of the row and ``completion`` (text), ``index`` (row of the prompt), ``sample_index``,
    ``finish_reason`` (``stop`` or ``length``), ``logprob`` (of the whole completion, under the distribution it was
    sampled from) and the token ids of both. Images are written as paths or ``data:`` URLs. An
    interrupted run is continued when started again, and gives the same file, since every sample has its own seed.

    Example::

        rlhfkit generate Qwen/Qwen3-0.6B gsm8k.jsonl samples.jsonl --prompt question --sampling.group_size 8
            --engine rlhfkit.VLLMPool --engine.num_engines 2

    Args:
        model: Folder or hub name; the folder of a LoRA adapter is merged with its base model.
        data: Prompts: a file (JSON lines, JSON, CSV, Parquet), ``datasets`` folder, hub name, or rows.
        output: File to write or to continue.
        sampling: Sampling parameters.
        engine: Engine to use; ``None``: a ``LocalEngine`` in this process.
        prompt: Column of the prompts: text or chat messages.
        columns: Other columns to copy; ``None``: all.
        split: Split of the data, where it has several; slices such as ``train[:90%]`` work.
        subset: Configuration of a hub data set.
        max_prompt_length: Tokens, template included; ``None``: no limit but the model's context.
        overlong_prompts: What happens to longer prompts; dropped ones are counted in the log.
        apply_chat_template: Wrap text prompts as a user message; ``None``: when the tokenizer has a template.
        system: System message in front of the prompt; needs the chat template.
        chat_template_kwargs: Passed to the template.
        token_ids: Write ``prompt_ids`` and ``completion_ids``, which rewards that count or read tokens need.
        batch_size: Prompts per batch; an interruption loses at most one batch.
        precision: Of the weights, as the Trainer's: ``32-true``, ``bf16-true`` or ``16-true``; ``None``: the type that
            the model is saved in.
        trust_remote_code: Run Python code that comes with the model.
        overwrite: Start anew when the output exists.
        progress: Show a progress bar.

    Returns:
        The output file.

    Raises:
        ValueError: If a column is missing or would be overwritten, a prompt is too long, or the output was written with
            other settings.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    sampling = sampling or SamplingSpec()
    engine = engine or LocalEngine()
    check_integer("max_prompt_length", max_prompt_length, minimum=1, optional=True)
    if overlong_prompts not in ("error", "drop"):
        raise ValueError(f"overlong_prompts must be 'error' or 'drop', got {overlong_prompts!r}")
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    formatter = _formatter(
        model,
        tokenizer,
        trust_remote_code,
        apply_chat_template=apply_chat_template,
        system=system,
        chat_template_kwargs=chat_template_kwargs,
    )
    rows = PromptRows(
        read_rows(data, split=split, subset=subset),
        data,
        PromptColumns(formatter, prompt),
        max_length=max_prompt_length,
        overlong=overlong_prompts,
    )
    carried = _carried_columns(rows, prompt, columns)
    settings = {
        "model": model,
        "weights": weights_stamp(model),
        "precision": precision,
        "data": [describe(data), rows.fingerprint()],
        "template": [apply_chat_template, system, dict(chat_template_kwargs or {})],
        "columns": carried,
        "token_ids": token_ids,
    } | {f"sampling.{name}": value for name, value in asdict(sampling).items()}
    size = sampling.group_size
    with JSONLWriter(output, settings, group=size, overwrite=overwrite) as writer:
        starts = range(writer.done // size, len(rows), batch_size)
        try:
            if starts:
                base = base_model_name(model)
                own = resolve_dtype(None, base, trust_remote_code=trust_remote_code)
                dtype = own if precision is None else precision_dtype(precision)
                engine.configure_logprobs(sampling)
                engine.start(base, dtype=dtype, trust_remote_code=trust_remote_code, load_weights=base == model)
                if base != model:  # the model and its adapter, merged
                    trusted = ModelLoading(trust_remote_code=trust_remote_code)
                    adapted = load_causal_lm(model, dtype=dtype, loading=trusted)
                    engine.load(ModuleWeights(adapted), version=0)
            with progress_bar(
                "generate", len(rows), done=writer.done // size, unit="prompts", shown=progress
            ) as advance:
                for start in starts:
                    prompts = [rows[position] for position in range(start, min(start + batch_size, len(rows)))]
                    samples = engine.generate(prompts, sampling, iteration=0)
                    texts = tokenizer.batch_decode([one.token_ids for one in samples], skip_special_tokens=True)
                    writer.write(
                        {name: row[name] for name in carried}
                        | _image_columns(row, sample, carried)
                        | _sample_line(sample, text, token_ids)
                        for sample, text in zip(samples, texts, strict=True)
                        for row in [rows.rows[sample.prompt.index]]
                    )
                    advance(len(prompts))
        finally:
            engine.close()
    return Path(output)


def _formatter(model: str, tokenizer: Any, trust_remote_code: bool, **style: Any) -> PromptFormatter:
    """What writes the prompts, with images for a model that sees."""
    config = load_config(model, trust_remote_code=trust_remote_code)
    if not sees_images(config):
        return PromptFormatter(tokenizer, **style)
    from rlhfkit.datamodules.tokenization.images import VisionFormatter
    from rlhfkit.models.vision import vision_processor

    processor = vision_processor(base_model_name(model), config, trust_remote_code=trust_remote_code)
    return VisionFormatter(tokenizer, processor, **style)


def _image_columns(row: Mapping[str, Any], sample: Sample, carried: Sequence[str]) -> dict[str, Any]:
    """The columns of images as text: paths, or bytes in ``data:`` URLs."""
    plain = [image.plain() for image in sample.prompt.attachments]
    values = {"images": plain, "image": plain[0] if plain else None}
    return {name: values[name] for name in IMAGES if name in carried and row[name]}


def _carried_columns(rows: PromptRows, prompt: str, columns: Sequence[str] | None) -> list[str]:
    """Return the columns of the data to copy, the prompt first."""
    found = rows.rows.column_names
    for name in columns or ():
        if name not in found:
            raise ValueError(f"columns: {name!r} is not a column of {describe(rows.source)}; it has {', '.join(found)}")
    carried = [prompt, *(name for name in (found if columns is None else columns) if name != prompt)]
    taken = [name for name in carried if name in OUTPUT_COLUMNS]
    if taken:
        raise ValueError(
            f"{describe(rows.source)} has columns that generate writes itself: {', '.join(taken)}; rename them, or "
            "name the columns to carry over (columns=...)"
        )
    return carried


def _sample_line(sample: Sample, text: str, token_ids: bool) -> dict[str, Any]:
    """Return the columns to add for one completion."""
    logprob = sum(sample.logprobs.tolist())
    line: dict[str, Any] = {
        "completion": text,
        "index": sample.prompt.index,
        "sample_index": sample.sample_index,
        "finish_reason": sample.finish_reason,
        "logprob": None if math.isnan(logprob) else logprob,
    }
    if token_ids:
        line |= {"prompt_ids": sample.prompt.token_ids.tolist(), "completion_ids": sample.token_ids.tolist()}
    return line
