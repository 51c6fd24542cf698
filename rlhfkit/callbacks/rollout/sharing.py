"""Share an iteration among ranks: numbers of all samples with all ranks, tokens with the rank that trains on them.

What is logged of an iteration is made of these numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhfkit.callbacks.rollout.micro_batching import IterationPlan
from rlhfkit.data.exchange import exchange_rows, gather_columns
from rlhfkit.data.types import Experience, IterationSummary, Sample
from rlhfkit.distributed import gather_objects
from rlhfkit.rollout.collector import CollectedGroups, flatten

_PART, _INFO, _RANK = "part/", "info/", "rank"


@dataclass(eq=False)
class SharedIteration:
    """An iteration after its samples were scored.

    The same on every rank but for ``experience``, ``samples``, ``rows`` and the groups of ``collected``.
    """

    experience: Experience
    """The rows that this rank trains on."""
    summary: IterationSummary
    """All rows of the iteration."""
    plan: IterationPlan
    """Who trains on which row, and when."""
    averaged: int
    """Micro-batches of all ranks whose losses an optimizer step averages."""
    samples: list[Sample]
    """What this rank has generated, in the order of the iteration."""
    rows: list[int]
    """Which row of the iteration each of these samples is."""
    numbers: dict[str, Tensor]
    """(N,) float64 columns of all samples: ``reward``, ``completion_length``, ``part/...`` and ``info/...``; NaN where
    a sample has none."""
    sources: dict[str, list[int]]
    """Rows by the ``source`` in their prompt's metadata; empty unless there are several sources."""
    other_sizes: dict[int, int]
    """Number of samples by prompt, of the groups that have others than the run's ``group_size``."""
    collected: CollectedGroups
    """What it was made of, with this rank's groups."""


def share_iteration(
    collected: CollectedGroups,
    make_plan: Callable[[IterationSummary], tuple[IterationPlan, int]],
    *,
    group_size: int,
    temperature: float,
    rank: int,
    world_size: int,
    group: Any = None,
) -> SharedIteration:
    """Plan an iteration and exchange its rows. A collective.

    Args:
        collected: This rank's groups, and the order of all.
        make_plan: From the summary to the plan and the number of micro-batches that a step averages.
        group_size: Samples of each group, unless a group function returned others.
        temperature: Sampling temperature.
        rank: This rank.
        world_size: Number of ranks.
        group: Process group for tensors on the CPU.
    """
    sizes = {made[0].prompt.index: len(made) for made in collected.groups if len(made) != group_size}
    samples = sorted(flatten(collected.groups), key=_place_in(collected.prompts))
    experience = Experience.from_samples(samples, temperature=temperature) if samples else no_rows(temperature)
    columns = _columns(samples, experience) | {_RANK: torch.full((len(samples),), rank)}
    attached = experience.attachments is not None
    own = _Described(
        sorted(columns), experience.token_rewards is not None, _prompts_by_source(samples), sizes, attached
    )
    # The only exchange of objects, which takes time with the number of ranks, but for references to images.
    ranks = gather_objects(own, group=group)
    sizes = {prompt: size for each in ranks for prompt, size in each.sizes.items()}
    places, total = dict[int, int](), 0  # first row of each group
    for prompt in collected.prompts:
        places[prompt], total = total, total + sizes.get(prompt, group_size)
    rows = torch.tensor([places[one.prompt.index] + one.sample_index for one in samples], dtype=torch.int64)
    names = sorted({name for each in ranks for name in each.columns})
    numbers = gather_columns(columns, rows, total, names=names, group=group)
    summary = _summary(numbers)
    plan, averaged = make_plan(summary)
    summary.update = plan.update
    if world_size == 1:
        experience.update = plan.update
    else:
        experience.rows = rows
        earned = any(each.token_rewards for each in ranks)
        experience = exchange_rows(
            experience,
            summary,
            numbers[_RANK].long(),
            plan.own_rows,
            token_rewards=earned,
            attachments=any(each.attachments for each in ranks),
            group=group,
        )
    sources = {
        name: sorted(places[prompt] + number for prompt in prompts for number in range(sizes.get(prompt, group_size)))
        for name, prompts in _all_sources([each.sources for each in ranks]).items()
    }
    own_rows = rows.tolist()
    return SharedIteration(experience, summary, plan, averaged, samples, own_rows, numbers, sources, sizes, collected)


def share_copies(experience: Experience, plan: IterationPlan, *, group: Any = None) -> Experience:
    """Add the rows that this rank trains on in later epochs only, from the ranks that have them. A collective.

    Args:
        experience: This rank's rows, as the module has prepared them.
        plan: Who trains on which row, and when.
        group: Process group for tensors on the CPU.
    """
    summary, own, trained = experience.iteration, plan.own_rows, plan.trained_rows
    if summary is None or all(map(torch.equal, own, trained)):
        return experience
    earned = experience.token_rewards is not None  # on all ranks, since the rows were exchanged
    attached = experience.attachments is not None  # the same
    return exchange_rows(
        experience, summary, plan.owner, trained, token_rewards=earned, attachments=attached, group=group
    )


class _Described(NamedTuple):
    """What ranks must know of each other's samples before they exchange numbers."""

    columns: list[str]
    token_rewards: bool
    sources: dict[str, set[int]]
    """Prompts of this rank by source."""
    sizes: dict[int, int]
    """Number of samples by prompt, of the groups of another size than the run's."""
    attachments: bool
    """Whether a sample has images."""


def _place_in(prompts: Sequence[int]) -> Callable[[Sample], tuple[int, int]]:
    """The order of an iteration; samples of a group need not be in order."""
    place = {prompt: number for number, prompt in enumerate(prompts)}
    return lambda sample: (place[sample.prompt.index], sample.sample_index)


def no_rows(temperature: float) -> Experience:
    """The experience of a rank that has no samples."""
    steps, rows = torch.zeros(1, 0), torch.zeros(1, dtype=torch.int64)
    one = Experience(
        input_ids=torch.zeros(1, 1, dtype=torch.int64),
        attention_mask=torch.ones(1, 1, dtype=torch.bool),
        action_mask=steps.bool(),
        rollout_logprobs=steps,
        versions=steps.long(),
        rewards=rows.float(),
        group=rows,
        sample_index=rows,
        truncated=rows.bool(),
        update=rows,
        replayed=rows.bool(),
        temperature=temperature,
    )
    return one.select([])


def _columns(samples: Sequence[Sample], experience: Experience) -> dict[str, Tensor]:
    """Numbers of each sample by name: what the summary needs, and what is logged."""
    if not samples:
        return {}
    columns = {f"summary/{name}": values for name, values in experience.summarize().columns().items()}
    rewards = [torch.nan if sample.reward is None else float(sample.reward) for sample in samples]
    columns["reward"] = torch.tensor(rewards, dtype=torch.float64)
    columns["completion_length"] = torch.tensor([float(sample.num_tokens) for sample in samples])
    columns |= {_PART + name: values for name, values in experience.reward_parts.items()}
    for name in {name for sample in samples for name, value in sample.info.items() if isinstance(value, int | float)}:
        values = [sample.info.get(name) for sample in samples]
        column = [float(value) if isinstance(value, int | float) else torch.nan for value in values]
        columns[_INFO + name] = torch.tensor(column, dtype=torch.float64)
    runs = [sample.version_runs for sample in samples]
    known = [[(version, count) for version, count in each if version >= 0] for each in runs]
    columns["version_tokens"] = torch.tensor([sum(count for _, count in each) for each in known])
    columns["version_sum"] = torch.tensor([sum(version * count for version, count in each) for each in known])
    columns["mixed"] = torch.tensor([len({version for version, _ in each}) > 1 for each in runs])
    return columns


def _summary(numbers: Mapping[str, Tensor]) -> IterationSummary:
    def column(name: str, dtype: torch.dtype = torch.int64) -> Tensor:
        return numbers[f"summary/{name}"].to(dtype)

    return IterationSummary(
        rewards=column("rewards", torch.float32),
        group=column("group"),
        sample_index=column("sample_index"),
        truncated=column("truncated", torch.bool),
        lengths=column("lengths"),
        prompt_lengths=column("prompt_lengths"),
        trained_tokens=column("trained_tokens"),
        oldest_version=column("oldest_version"),
        newest_version=column("newest_version"),
        update=column("update"),
        replayed=column("replayed", torch.bool),
        reward_parts={
            name.removeprefix(_PART): values.float() for name, values in numbers.items() if name.startswith(_PART)
        },
    )


def _prompts_by_source(samples: Sequence[Sample]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for sample in samples:
        if "source" in sample.prompt.metadata:
            found.setdefault(str(sample.prompt.metadata["source"]), set()).add(sample.prompt.index)
    return found


def _all_sources(ranks: Sequence[dict[str, set[int]]]) -> dict[str, set[int]]:
    """Prompts of all ranks by source; empty unless there are several sources."""
    names = sorted({name for each in ranks for name in each})
    return {name: set().union(*(each.get(name, ()) for each in ranks)) for name in names} if names[1:] else {}


# ---------------------------------------------------------------------- metrics


def iteration_metrics(
    shared: SharedIteration, *, silent: Tensor | None = None, rewarded: bool = True
) -> dict[str, float]:
    """Metrics of one training iteration, over the samples of all ranks.

    Args:
        shared: The iteration.
        silent: (N,) whether the advantage of every token is 0; ``None``: there are no advantages.
        rewarded: Whether samples were scored.

    Returns:
        ``rollout/...``: means of rewards and their parts (if ``rewarded``), of lengths in tokens and of the numbers in
        ``Sample.info``; fractions of samples truncated at the length limit or not scored, and of scored samples with
        advantage 0.
    """
    summary, numbers = shared.summary, shared.numbers
    rewards = summary.rewards[~summary.rewards.isnan()]
    metrics = {
        f"rollout/{name.removeprefix('info/')}": fmean(_known(values))
        for name, values in numbers.items()
        if name.startswith("info/") and _known(values)
    }
    metrics |= {
        "rollout/reward": float(rewards.mean()) if len(rewards) else math.nan,
        "rollout/reward_std": float(rewards.std(unbiased=False)) if len(rewards) else math.nan,
        "rollout/length": float(numbers["completion_length"].float().mean()),
        "rollout/truncated_fraction": float(summary.truncated.float().mean()),
        "rollout/unscored_fraction": 1.0 - len(rewards) / len(summary),
    }
    for name, values in summary.reward_parts.items():
        metrics[f"rollout/reward_{name}"] = float(values[~values.isnan()].mean())
    for name, rows in shared.sources.items():
        scored = _known(numbers["reward"][rows])
        metrics[f"rollout/reward/{name}"] = fmean(scored) if scored else math.nan
    if not rewarded:
        metrics = {name: value for name, value in metrics.items() if not name.startswith("rollout/reward")}
    if silent is not None and rewarded:
        silent = silent[~summary.rewards.isnan()]  # those without a reward count in unscored_fraction
    if silent is not None and len(silent):
        metrics["rollout/zero_advantage_fraction"] = float(silent.float().mean())
    return metrics


def _known(values: Tensor) -> list[float]:
    return values[~values.isnan()].tolist()


def staleness_metrics(numbers: Mapping[str, Tensor], version: int) -> dict[str, float]:
    """Age of the tokens of an iteration when training on them begins at policy ``version`` (updates so far).

    Returns:
        ``rollout/staleness``: mean age of a token in updates; ``rollout/mixed_fraction``: fraction of samples with
        tokens of several policy versions.
    """
    tokens, versions = float(numbers["version_tokens"].sum()), float(numbers["version_sum"].sum())
    return {
        "rollout/staleness": (version * tokens - versions) / tokens if tokens else 0.0,
        "rollout/mixed_fraction": float(numbers["mixed"].mean()),
    }
