"""Samples in files and checkpoints, and ``ReplayEngine``, which returns them instead of generating."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec, WeightSource


def samples_file(folder: str | Path, iteration: int, *, rank: int = 0, world_size: int = 1) -> Path:
    """Path of the samples of an iteration, counted from 0, in the folder of a run; with several ranks, of one rank."""
    part = "" if world_size == 1 else f".rank_{rank}_of_{world_size}"
    return Path(folder) / f"iteration_{iteration:06d}{part}.jsonl"


def samples_files(folder: str | Path, iteration: int) -> list[Path]:
    """Paths of the samples of an iteration, of all ranks that wrote some.

    Raises:
        FileNotFoundError: If there is none, or not that of every rank.
    """
    whole = samples_file(folder, iteration)
    if whole.exists():
        return [whole]
    parts = sorted(Path(folder).glob(f"{whole.stem}.rank_*_of_*.jsonl"))
    if not parts:
        raise FileNotFoundError(f"{folder} has no samples of iteration {iteration}: {whole.name} is missing")
    world_size = int(parts[0].stem.rpartition("_")[2])
    expected = [samples_file(folder, iteration, rank=rank, world_size=world_size) for rank in range(world_size)]
    if missing := [path.name for path in expected if not path.exists()]:
        raise FileNotFoundError(
            f"{folder} has the samples of {len(parts)} of {world_size} ranks of iteration {iteration}: missing are "
            f"{', '.join(missing)}; each rank writes its own, so copy those of all machines into one folder"
        )
    return expected


def save_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples as JSON lines, atomically; creates the folder, and stores metadata unknown to JSON as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    with partial.open("w") as file:
        for sample in samples:
            file.write(json.dumps(sample.plain(), default=str) + "\n")
    partial.replace(path)


def load_samples(path: Path) -> list[Sample]:
    """Read a file of :func:`save_samples`; raises FileNotFoundError if there is none."""
    samples: list[Sample] = []
    prompts: dict[tuple[Any, ...], Prompt] = {}
    for line in path.read_text().splitlines():
        plain = json.loads(line)
        # Episodes of one prompt may start with different tokens, and have seen different images.
        own = plain["prompt"]
        key = own["index"], tuple(own["token_ids"]), tuple(own.get("attachments", ()))
        prompt = prompts.setdefault(key, Prompt(**plain["prompt"]))
        samples.append(Sample(**{**plain, "prompt": prompt}))
    return samples


_ARRAYS = ("token_ids", "logprobs", "versions", "action_mask", "token_rewards")


def sample_state(sample: Sample) -> dict[str, Any]:
    """A sample for checkpoints, loadable with ``torch.load(weights_only=True)``: arrays as tensors, all else as JSON.

    Answers and metadata of the prompt that JSON does not know become text.
    """
    arrays = {name: getattr(sample, name) for name in _ARRAYS} | {"prompt_ids": sample.prompt.token_ids}
    bare: dict[str, Any] = dict.fromkeys(_ARRAYS[:3], ()) | dict.fromkeys(_ARRAYS[3:])
    rest = dataclasses.replace(sample, prompt=dataclasses.replace(sample.prompt, token_ids=()), **bare).plain()
    return {name: None if values is None else torch.from_numpy(np.array(values)) for name, values in arrays.items()} | {
        "rest": json.dumps(rest, default=lambda value: value.item() if isinstance(value, np.generic) else str(value))
    }


def sample_from_state(state: Mapping[str, Any]) -> Sample:
    """Inverse of :func:`sample_state`."""
    rest = json.loads(state["rest"])
    prompt = Prompt(**{**rest["prompt"], "token_ids": state["prompt_ids"]})
    return Sample(**{**rest, **{name: state[name] for name in _ARRAYS}, "prompt": prompt})


class ReplayEngine(RolloutEngine):
    """An engine that returns recorded samples, to debug training without generating.

    With the same prompts, sampling and seeds the run repeats the recorded one; rewards are computed again, so that a
    changed reward can be tried. There is no model, so weight syncs are not probed. Groups are returned as they were
    made, without calling group functions, environments or agents.

    Example::

        RolloutCallback(reward, engine=ReplayEngine("dump"), sampling=sampling)

    Args:
        folder: Written by ``RolloutDump``.

    Raises:
        FileNotFoundError: If there is no such folder.
    """

    can_score = False
    recorded = True

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.version: int | None = None
        if not self.folder.is_dir():
            raise FileNotFoundError(f"there is no folder {str(folder)!r}: record a run with RolloutDump first")

    def start(
        self, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False, load_weights: bool = False
    ) -> None:
        """Do nothing, as there is no model; with ``load_weights`` the version becomes 0."""
        self.version = 0 if load_weights else self.version

    def load(self, weights: WeightSource, version: int) -> None:
        """Set the version; the weights are not read."""
        self.version = version

    def configure_logprobs(self, sampling: SamplingSpec) -> bool:
        """Return true, as the recorded run has checked its log-probs."""
        return True

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """Return the recorded samples; raises KeyError if a prompt, as it is now, has too few in this iteration."""
        recorded: dict[int, list[Sample]] = {}
        wanted = {prompt.index for prompt in prompts}
        for path in samples_files(self.folder, iteration):
            for sample in load_samples(path):
                if sample.prompt.index in wanted and not sample.replayed:
                    recorded.setdefault(sample.prompt.index, []).append(sample)
        found = []
        for prompt in prompts:
            group = recorded.get(prompt.index, [])[: sampling.group_size]
            changed = any(not _begins_with(sample, prompt) for sample in group)
            if len(group) < sampling.group_size or changed:
                raise KeyError(
                    f"iteration {iteration} in {self.folder} has {len(group)} samples of prompt {prompt.index} as it "
                    f"is now, and {sampling.group_size} are asked for: replay with the data, seed and sizes of the "
                    "recorded run"
                )
            found += [self._recorded(sample, prompt) for sample in group]
        return found

    @staticmethod
    def _recorded(sample: Sample, prompt: Prompt) -> Sample:
        """Copy a sample without what scoring added; rewards of an environment are kept."""
        earned = sample.token_rewards if _is_episode(sample) else None
        own = sample.prompt
        begun = dataclasses.replace(prompt, token_ids=own.token_ids, attachments=own.attachments)
        return dataclasses.replace(sample, prompt=begun, text="", reward=None, reward_parts={}, token_rewards=earned)

    def score(self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Any, ...]] = ()) -> list[list[float]]:
        """Raise RuntimeError, as there is no model."""
        raise RuntimeError("a ReplayEngine has no model that could score")


def _begins_with(sample: Sample, prompt: Prompt) -> bool:
    """Whether a sample is of this prompt, perhaps with a hint behind it, or an environment wrote its beginning."""
    begins = np.array_equal(sample.prompt.token_ids[: prompt.num_tokens], prompt.token_ids)
    return begins or _is_episode(sample)


def _is_episode(sample: Sample) -> bool:
    """Whether an environment or agent gave the reward and may have written the prompt."""
    return "reward" in sample.info
