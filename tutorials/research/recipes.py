"""Build training data from scored completions: best of n, best and worst pairs, reward-conditioned prompts.

Pure functions on lines, the dictionaries that ``rlhfkit generate`` and ``rlhfkit score`` write. Lines that cannot be
used are dropped with a logged count. The resulting rows can be given to a DataModule as a list.
"""

import logging
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from string import Formatter
from typing import Any

log = logging.getLogger(__name__)

Line = Mapping[str, Any]
"""One scored completion."""

REWARD_TEMPLATE = "{prompt} <rm_score>: {reward:.2f} "
"""OpenRLHF's prompt of conditional SFT."""


def _groups(lines: Iterable[Line], group: str, reward: str) -> list[list[Line]]:
    """Scored lines by prompt, in the order in which the prompts first appear."""
    groups: dict[Any, list[Line]] = {}
    unscored = 0
    for line in lines:
        members = groups.setdefault(line[group], [])
        if line[reward] is None:
            unscored += 1
        else:
            members.append(line)
    if unscored:
        log.warning("%d lines have no reward and are left out", unscored)
    return list(groups.values())


def best_of_n(
    lines: Iterable[Line], *, minimum: float | None = None, group: str = "index", reward: str = "reward"
) -> list[dict[str, Any]]:
    """The completion of highest reward of each prompt, for rejection-sampling fine-tuning.

    RAFT (Dong et al., 2023, arXiv:2304.06767) trains on these; of equal rewards the first is kept, as in OpenRLHF. With
    ``minimum`` prompts without a good completion are dropped (Yuan et al., 2023, arXiv:2308.01825).

    Args:
        lines: Scored completions.
        minimum: Lowest reward to keep; ``None``: no limit.
        group: Column that is equal for completions of one prompt.
        reward: Column of the rewards; lines where it is ``None`` are dropped.

    Returns:
        At most one line per prompt, unchanged, in the order of the prompts.
    """
    groups = _groups(lines, group, reward)
    best = [dict(max(members, key=lambda line: line[reward])) for members in groups if members]
    kept = [line for line in best if minimum is None or line[reward] >= minimum]
    if len(kept) < len(groups):
        log.info("best_of_n: %d of %d prompts have no completion to keep", len(groups) - len(kept), len(groups))
    return kept


def best_and_worst_pairs(
    lines: Iterable[Line],
    *,
    minimum_margin: float = 0.0,
    prompt: str = "prompt",
    completion: str = "completion",
    group: str = "index",
    reward: str = "reward",
) -> list[dict[str, Any]]:
    """The best and the worst completion of each prompt, as a preference pair; for iterative DPO.

    Ties go to the completion that comes first, as in OpenRLHF. Prompts with equal rewards give no pair; in OpenRLHF
    they give a pair of a text and itself.

    Args:
        lines: Scored completions.
        minimum_margin: The rewards must differ by more than this.
        prompt: Column of the prompts.
        completion: Column of the completions.
        group: Column that is equal for completions of one prompt.
        reward: Column of the rewards; lines where it is ``None`` are dropped.

    Returns:
        Rows with the prompt column, ``chosen``, ``rejected``, ``chosen_reward`` and ``rejected_reward``.

    Raises:
        ValueError: If ``minimum_margin`` is negative.
    """
    if minimum_margin < 0:
        raise ValueError(f"minimum_margin must be 0 or more, got {minimum_margin}")
    groups = _groups(lines, group, reward)
    pairs = []
    for members in filter(None, groups):
        best = max(members, key=lambda line: line[reward])
        worst = min(members, key=lambda line: line[reward])
        if best[reward] - worst[reward] > minimum_margin:
            texts = {"chosen": best[completion], "rejected": worst[completion]}
            rewards = {"chosen_reward": best[reward], "rejected_reward": worst[reward]}
            pairs.append({prompt: best[prompt]} | texts | rewards)
    if len(pairs) < len(groups):
        log.info("best_and_worst_pairs: %d of %d prompts give no pair", len(groups) - len(pairs), len(groups))
    return pairs


def normalize_rewards(lines: Sequence[Line], *, reward: str = "reward") -> list[dict[str, Any]]:
    """Normalise the rewards to mean 0 and standard deviation 1 over all lines (unbiased, as in OpenRLHF).

    Args:
        lines: At least two with a reward; ``None`` stays ``None``.
        reward: Column of the rewards.

    Raises:
        ValueError: If fewer than two lines have a reward, or all rewards are equal.
    """
    rewards = [line[reward] for line in lines if line[reward] is not None]
    if len(set(rewards)) < 2:
        raise ValueError(f"normalising takes at least two different rewards, got {sorted(set(rewards))}")
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    return [{**line, reward: None if line[reward] is None else (line[reward] - mean) / deviation} for line in lines]


def bin_rewards(
    lines: Iterable[Line], edges: Sequence[float], *, reward: str = "reward", level: str = "level"
) -> list[dict[str, Any]]:
    """Add the level of the reward to each line: how many of the edges it reaches, 0 (lowest) to ``len(edges)``.

    SteerLM (Dong et al., 2023, arXiv:2310.05344) conditions on attributes in five levels, 0 to 4. For levels of equally
    many lines use ``statistics.quantiles(rewards, n=5)``.

    Args:
        lines: Scored completions.
        edges: Rising; a reward equal to an edge reaches it.
        reward: Column of the rewards, or one of ``reward_parts``; lines where it is ``None`` are dropped.
        level: Column to write.

    Raises:
        ValueError: If the edges do not rise, or there is none.
    """
    if not edges or list(edges) != sorted(edges):
        raise ValueError(f"edges must be at least one number, in rising order, got {list(edges)}")
    scored = [{**line, level: _values(line)[reward]} for line in lines]
    kept = [line | {level: bisect_right(edges, line[level])} for line in scored if line[level] is not None]
    if len(kept) < len(scored):
        log.warning("%d of %d lines have no %s and are left out", len(scored) - len(kept), len(scored), reward)
    return kept


def returns_to_go(rewards: Sequence[float], discount: float = 1.0) -> list[float]:
    """Sum of the rewards from each step on: ``R_t = r_t + discount * R_(t+1)``.

    Decision Transformer (Chen et al., 2021, arXiv:2106.01345) conditions each step on it, undiscounted.
    """
    backward = accumulate(reversed(rewards), lambda later, now: now + discount * later)
    return [float(value) for value in backward][::-1]


def condition_prompts(
    lines: Iterable[Line], template: str = REWARD_TEMPLATE, *, prompt: str = "prompt", **wanted: Any
) -> list[dict[str, Any]]:
    """Write the reward into the prompts: the line's own for training, a wanted one for generation.

    Example::

        train = condition_prompts(lines)                 # "2+2= <rm_score>: 1.00 " for a line of reward 1
        ask = condition_prompts(prompts, reward=1.0)     # as if the completion were good already

    Args:
        lines: Scored completions, or rows with a prompt.
        template: Format string of ``prompt``, any column (``reward``, ``level``) and any of ``reward_parts``.
        prompt: Column of the prompts to rewrite: text, or chat messages, whose last one is rewritten.
        **wanted: Values that replace those of the line.

    Returns:
        One line each, without those that have ``None`` for a value of the template.

    Raises:
        ValueError: If the template has no ``{prompt}``, or names what a line does not have.
    """
    fields = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    if "prompt" not in fields:
        raise ValueError(f"the template must hold {{prompt}}, got {template!r}")
    conditioned, left_out = [], 0
    for line in lines:
        values = _values(line) | wanted
        content = line[prompt]
        values["prompt"] = content if isinstance(content, str) else content[-1]["content"]
        if missing := fields - set(values):
            raise ValueError(f"the template {template!r} names {', '.join(missing)}; there are {', '.join(values)}")
        if any(values[name] is None for name in fields):
            left_out += 1
            continue
        written: Any = template.format(**values)
        if not isinstance(content, str):
            written = [*content[:-1], {**content[-1], "content": written}]
        conditioned.append({**line, prompt: written})
    if left_out:
        log.warning("%d lines have no value for the template %r and are left out", left_out, template)
    return conditioned


def _values(line: Line) -> dict[str, Any]:
    """Columns of a line and the components of its reward, by name."""
    return {**(line.get("reward_parts") or {}), **line}
