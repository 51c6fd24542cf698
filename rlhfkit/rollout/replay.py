"""Samples on disk, and ``ReplayEngine``, which gives them back: a training run again without generating anything."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

import torch

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec, WeightSource


def samples_file(folder: str | Path, iteration: int) -> Path:
    """Where the samples of an iteration lie.

    Args:
        folder: Of the run.
        iteration: From 0.
    """
    return Path(folder) / f"iteration_{iteration:06d}.jsonl"


def save_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples as JSON lines, complete or not at all.

    Args:
        path: The file; its folder is made when missing.
        samples: With whatever they have by now. Metadata that JSON does not know is written as text.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    with partial.open("w") as file:
        for sample in samples:
            plain = {field.name: getattr(sample, field.name) for field in fields(sample)}
            plain["prompt"] = {field.name: getattr(sample.prompt, field.name) for field in fields(sample.prompt)}
            file.write(json.dumps(plain, default=str) + "\n")
    partial.replace(path)


def load_samples(path: Path) -> list[Sample]:
    """Read what :func:`save_samples` wrote.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If it is not there.
    """
    samples: list[Sample] = []
    prompts: dict[tuple[int, tuple[int, ...]], Prompt] = {}
    for line in path.read_text().splitlines():
        plain = json.loads(line)
        # Episodes of one prompt may begin with different tokens.
        key = plain["prompt"]["index"], tuple(plain["prompt"]["token_ids"])
        prompt = prompts.setdefault(key, Prompt(**plain["prompt"]))
        samples.append(Sample(**{**plain, "prompt": prompt}))
    return samples


class ReplayEngine(RolloutEngine):
    """An engine that returns recorded samples, for finding out what training does with them.

    With the same prompts, sampling and seeds a run with it is the run that was recorded; rewards are computed anew, so
    that a changed reward can be tried on old samples. It has no model, so nothing is probed after a weight sync.
    In place of the engine inside an ``EpisodeEngine`` or ``AgentEngine`` it gives the recorded episodes, and neither
    environments nor agents are asked.

    Example::

        RolloutCallback(reward, engine=ReplayEngine("dump"), sampling=sampling)

    Args:
        folder: That ``RolloutDump`` wrote.

    Raises:
        FileNotFoundError: If the folder is not there.
    """

    shared = False
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
        """Nothing to do; see :meth:`RolloutEngine.start`."""
        self.version = 0 if load_weights else self.version

    def load(self, weights: WeightSource, version: int) -> None:
        """Take note of the version alone; see :meth:`RolloutEngine.load`."""
        self.version = version

    def arrange_logprobs(self, sampling: SamplingSpec) -> bool:
        """Log-probs are as they were recorded; see :class:`~rlhfkit.rollout.engine.UntruncatedLogprobs`."""
        return True

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """The recorded samples of these prompts; see :meth:`RolloutEngine.generate`.

        Raises:
            KeyError: If one was not recorded in this iteration.
        """
        recorded: dict[int, list[Sample]] = {}
        for sample in load_samples(samples_file(self.folder, iteration)):
            recorded.setdefault(sample.prompt.index, []).append(sample)
        found = []
        for prompt in prompts:
            group = recorded.get(prompt.index, [])[: sampling.group_size]
            changed = any(sample.prompt.token_ids != prompt.token_ids and not _is_episode(sample) for sample in group)
            if len(group) < sampling.group_size or changed:
                raise KeyError(
                    f"{samples_file(self.folder, iteration)} has {len(group)} samples of prompt {prompt.index} as it "
                    f"is now, and {sampling.group_size} are asked for: replay with the data, seed and sizes of the "
                    "recorded run"
                )
            found += [self._recorded(sample, prompt) for sample in group]
        return found

    @staticmethod
    def _recorded(sample: Sample, prompt: Prompt) -> Sample:
        """The same without what scoring added, but with what an environment gave."""
        earned = sample.token_rewards if _is_episode(sample) else None
        begun = dataclasses.replace(prompt, token_ids=sample.prompt.token_ids) if _is_episode(sample) else prompt
        return dataclasses.replace(sample, prompt=begun, text="", reward=None, reward_parts={}, token_rewards=earned)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Not possible: there is no model."""
        raise RuntimeError("a ReplayEngine has no model that could score")

    def sleep(self) -> None:
        """Nothing to give up."""

    def wake(self) -> None:
        """Nothing to take back."""

    def close(self) -> None:
        """Nothing to free."""


def _is_episode(sample: Sample) -> bool:
    """Whether an environment or agent had a part in it: it may have chosen the prompt, and has judged it."""
    return "reward" in sample.info
