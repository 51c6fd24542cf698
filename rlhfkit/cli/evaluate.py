"""``rlhfkit evaluate``: sample answers to a benchmark, grade them, and write the metrics as JSON lines and a table."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhfkit.cli.generate import generate
from rlhfkit.cli.jsonl import read_lines
from rlhfkit.cli.score import score
from rlhfkit.data.types import Sample
from rlhfkit.datamodules.prompts.datamodule import final_answer
from rlhfkit.datamodules.tokenization.sources import Source, check_columns, read_rows
from rlhfkit.rewards.base import TIMEOUT, Reward
from rlhfkit.rewards.benchmarks import GradedSample, metrics_by_source, metrics_table, voted_answer
from rlhfkit.rollout import RolloutEngine, SamplingSpec
from rlhfkit.validation import check_number


def evaluate(
    data: Source,
    output: str | os.PathLike[str],
    *,
    grader: Reward | Callable[[Sequence[Sample]], Any],  # the second: functions without annotations
    model: str | None = None,
    prompt: str = "prompt",
    answer: str | None = "answer",
    answer_extractor: Callable[[Any], Any] = final_answer,
    completion: str = "completion",
    source: str | None = None,
    vote: Callable[[str], str | None] | None = voted_answer,
    success_threshold: float = 1.0,
    sampling: SamplingSpec | None = None,
    engine: RolloutEngine | None = None,
    split: str = "train",
    subset: str | None = None,
    apply_chat_template: bool | None = None,
    system: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    batch_size: int = 256,
    precision: str | None = None,
    timeout: float = TIMEOUT,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> Path:
    """Sample answers to the questions of a benchmark file, grade them, and write metrics.

    The folder ``output`` gets ``samples.jsonl`` (see ``rlhfkit generate``), ``graded.jsonl`` (the same lines with
    ``reward``), ``metrics.jsonl`` (a line for all questions, and one for each source if there are several) and
    ``metrics.md``, a table, which is printed too. Of n samples of a question: ``avg@n`` with its standard error over
    questions, ``pass@k``, ``best@k`` and ``maj@k``. An interrupted run is continued when started again.

    Example::

        rlhfkit evaluate aime.jsonl runs/aime --model Qwen/Qwen3-0.6B --grader rlhfkit.rewards.math_match
            --prompt problem --sampling.group_size 16 --engine rlhfkit.VLLMPool

    Args:
        data: Questions: a file (JSON lines, JSON, CSV, Parquet), ``datasets`` folder, hub name, or rows.
        output: Folder to write or to continue.
        grader: Dotted path of a reward function, or a reward class with its arguments.
        model: Folder or hub name; ``None``: the data holds completions already.
        prompt: Column of the questions: text or chat messages.
        answer: Column of the reference answers; ``None``: there are none.
        answer_extractor: Applied to each reference answer.
        completion: Column of the completions if there is no ``model``.
        source: Column with the part of the benchmark that a question belongs to; ``None``: one part.
        vote: Function from a completion to the answer that majority votes count; ``None``: no ``maj@k``.
        success_threshold: A sample with at least this reward is correct in ``pass@k``.
        sampling: Sampling parameters; ``group_size`` is n.
        engine: Engine to use; ``None``: a ``LocalEngine`` in this process.
        split: Split of the data, where it has several; slices such as ``train[:90%]`` work.
        subset: Configuration of a hub data set.
        apply_chat_template: Wrap text prompts as a user message; ``None``: when the tokenizer has a template.
        system: System message in front of the question; needs the chat template.
        chat_template_kwargs: Passed to the template.
        batch_size: Questions per batch; an interruption loses at most one batch.
        precision: Of the weights, as the Trainer's: ``32-true``, ``bf16-true`` or ``16-true``; ``None``: the type that
            the model is saved in.
        timeout: Time limit in seconds of an async grader per batch.
        trust_remote_code: Run Python code that comes with the model.
        overwrite: Start anew when the output exists.
        progress: Show progress bars.

    Returns:
        The folder.

    Raises:
        ValueError: If a column is missing, the grader does not return one number or ``None`` per line, or the output
            was written with other settings.
    """
    check_number("success_threshold", success_threshold)
    rows = read_rows(data, split=split, subset=subset)
    columns = {"prompt": prompt, "answer": answer, "source": source}
    check_columns(rows, data, **columns, completion=completion if model is None else None)
    folder = Path(output)
    samples: Source = data
    if model is not None:
        samples = generate(
            model,
            data,
            folder / "samples.jsonl",
            sampling=sampling,
            engine=engine,
            prompt=prompt,
            split=split,
            subset=subset,
            apply_chat_template=apply_chat_template,
            system=system,
            chat_template_kwargs=chat_template_kwargs,
            batch_size=batch_size,
            precision=precision,
            trust_remote_code=trust_remote_code,
            overwrite=overwrite,
            progress=progress,
        )
        split, subset, completion = "train", None, "completion"
    graded = score(
        samples,
        folder / "graded.jsonl",
        reward=grader,
        prompt=prompt,
        completion=completion,
        answer=answer,
        answer_extractor=answer_extractor,
        split=split,
        subset=subset,
        batch_size=batch_size,
        timeout=timeout,
        overwrite=overwrite,
        progress=progress,
    )
    found = [
        GradedSample(
            line["index"] if "index" in line else json.dumps(line[prompt], sort_keys=True),
            line["reward"],
            None if vote is None else vote(line[completion]),
            None if source is None else str(line[source]),
        )
        for line in read_lines(graded)
    ]
    metrics = metrics_by_source(found, success_threshold=success_threshold)
    lines = (json.dumps({"source": name, **values}) + "\n" for name, values in metrics.items())
    (folder / "metrics.jsonl").write_text("".join(lines))
    table = metrics_table(metrics)
    (folder / "metrics.md").write_text(table)
    print(table, end="")
    return folder
