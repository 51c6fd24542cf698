"""Samples of an iteration: their memory, the time to stack and score them; one JSON line.

    python benchmarks/samples.py                             # under a minute
    python benchmarks/samples.py --samples 512 --tokens 2048

``--samples`` completions of ``--tokens / 2`` to ``--tokens`` tokens in groups of 8, with log-probs, versions and a
mask, are kept as :class:`rlhfkit.Sample` (``arrays``) and, to compare, with a Python list for each (``lists``).

- ``bytes_per_token``: memory that the samples take, prompts excepted (``tracemalloc``).
- ``pickle_bytes_per_token`` and ``pickle_ns_per_token``: to write them with pickle and read them again.
- ``stack_ns_per_token``: ``Experience.from_samples``, next to a loop over rows that makes tensors of the lists. Both
  batches are equal, bit for bit.
- ``training_while_scoring``: how many times as long a loop of small tensor operations takes in the main thread while
  another thread scores texts with a reward in Python: in this process (``thread``), and by a ``SubprocessReward``
  (``worker``). It needs two idle cores.

Times are the fastest of ``--repeats``, on one thread of torch.
"""

import argparse
import gc
import json
import math
import pickle
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhfkit.data import Experience, Prompt, Sample
from rlhfkit.rewards import ExactMatch, SubprocessReward


@dataclass(slots=True)
class ListSample:
    """A completion whose numbers per token are Python lists."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    action_mask: list[bool]


def drawn(count: int, longest: int) -> list[dict[str, Any]]:
    """Columns of random completions."""
    torch.manual_seed(0)
    rows = []
    for _ in range(count):
        length = int(torch.randint(longest // 2, longest + 1, ()))
        rows.append(
            {
                "token_ids": torch.randint(1, 20_000, (length,)),
                "logprobs": torch.rand(length).log(),
                "versions": torch.arange(length) // (length // 2 + 1) + 3,  # new weights arrived once
                "action_mask": torch.arange(length) % 100 < 90,
            }
        )
    return rows


def stack_lists(samples: Sequence[ListSample]) -> dict[str, Tensor]:
    """Make tensors row by row."""
    count = len(samples)
    length = max(len(sample.prompt) + len(sample.token_ids) for sample in samples)
    input_ids = torch.zeros(count, length, dtype=torch.int64)
    attention_mask = torch.zeros(count, length, dtype=torch.bool)
    action_mask = torch.zeros(count, length - 1, dtype=torch.bool)
    logprobs = torch.zeros(count, length - 1)
    versions = torch.full((count, length - 1), -1, dtype=torch.int64)
    for row, sample in enumerate(samples):
        tokens = sample.prompt + sample.token_ids
        steps = slice(len(sample.prompt) - 1, len(tokens) - 1)
        chosen = torch.tensor(sample.action_mask)
        input_ids[row, : len(tokens)] = torch.tensor(tokens)
        attention_mask[row, : len(tokens)] = True
        action_mask[row, steps] = chosen
        logprobs[row, steps] = torch.where(chosen, torch.tensor(sample.logprobs), 0.0)
        versions[row, steps] = torch.where(chosen, torch.tensor(sample.versions), -1)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "action_mask": action_mask,
        "rollout_logprobs": logprobs,
        "versions": versions,
    }


def kept_bytes(make: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns, and the memory that it takes."""
    gc.collect()
    tracemalloc.start()
    made = make()
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return made, kept


def fastest(function: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """What a function returns, and its least time in seconds."""
    least, result = math.inf, None
    for _ in range(repeats):
        began = time.perf_counter()
        result = function()
        least = min(least, time.perf_counter() - began)
    return result, least


def seconds_of_training() -> float:
    """Time of a loop of small tensor operations."""
    weights, began = torch.ones(64, 64), time.perf_counter()
    for _ in range(20_000):
        weights = (weights @ weights).clamp(max=1.0)
    return time.perf_counter() - began


def slowdown(reward: Any, samples: Sequence[Sample]) -> float:
    """How many times as long a loop takes while another thread scores samples."""
    alone, ended = seconds_of_training(), threading.Event()

    def score() -> None:
        while not ended.is_set():
            reward(samples)

    reward(samples[:8])  # starts what it needs
    scorer = threading.Thread(target=score)
    scorer.start()
    beside = seconds_of_training()
    ended.set()
    scorer.join()
    return beside / alone


def make_tokenizer() -> Any:
    """A byte-level BPE, trained on random words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnop", k=chance.randint(2, 9))) for _ in range(5000)]
    lines = [" ".join(chance.choices(words, k=200)) for _ in range(500)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=20_000, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = drawn(given.samples, given.tokens)
    count = sum(len(row["token_ids"]) for row in rows)
    opening = list(range(1, given.prompt_tokens + 1))
    prompts = [Prompt(index, opening) for index in range(0, given.samples, 8)]

    def arrays() -> list[Sample]:
        return [
            Sample(prompts[row // 8], row % 8, finish_reason="stop", reward=1.0, **columns)
            for row, columns in enumerate(rows)
        ]

    def lists() -> list[ListSample]:
        return [ListSample(opening, **{name: column.tolist() for name, column in row.items()}) for row in rows]

    samples, array_bytes = kept_bytes(arrays)
    listed, list_bytes = kept_bytes(lists)
    stacked, stacking = fastest(lambda: Experience.from_samples(samples), given.repeats)
    by_row, stacking_lists = fastest(lambda: stack_lists(listed), given.repeats)
    for name, expected in by_row.items():
        assert torch.equal(getattr(stacked, name), expected), name
    pickled, pickling = fastest(lambda: pickle.dumps(pickle.loads(pickle.dumps(samples))), given.repeats)
    pickled_lists, pickling_lists = fastest(lambda: pickle.dumps(pickle.loads(pickle.dumps(listed))), given.repeats)

    texts = make_tokenizer().batch_decode([sample.token_ids for sample in listed], skip_special_tokens=True)
    judged = [
        Sample(Prompt(row // 8, [1], answer="42"), row % 8, [2], [0.0], [0], "stop", text=text[:8000])
        for row, text in enumerate(texts)
    ]
    reward = ExactMatch(ignore_case=True, ignore_punctuation=True)
    elsewhere = SubprocessReward(reward)
    nanoseconds = 1e9 / count
    line = {
        "tokens": count,
        "bytes_per_token": {"lists": list_bytes / count, "arrays": array_bytes / count},
        "pickle_bytes_per_token": {"lists": len(pickled_lists) / count, "arrays": len(pickled) / count},
        "pickle_ns_per_token": {"lists": pickling_lists * nanoseconds, "arrays": pickling * nanoseconds},
        "stack_ns_per_token": {"lists": stacking_lists * nanoseconds, "arrays": stacking * nanoseconds},
        "training_while_scoring": {"thread": slowdown(reward, judged), "worker": slowdown(elsewhere, judged)},
    }
    elsewhere.close()
    rounded = {
        name: {side: round(value, 2) for side, value in values.items()} if isinstance(values, dict) else values
        for name, values in line.items()
    }
    print(json.dumps(rounded))


if __name__ == "__main__":
    main()
