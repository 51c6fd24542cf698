"""What graded samples of a benchmark say: avg@k, pass@k, best@k, maj@k, with the error of the mean, by source."""

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, stdev

DRAWS = 1000
"""Subsets of k samples that maj@k is a mean over, where there are more (verl draws as many, with replacement)."""


@dataclass(frozen=True)
class GradedSample:
    """One graded completion of a question."""

    question: int | str
    """Which question it answers."""
    reward: float | None
    """``None``: it could not be graded, which counts as 0."""
    vote: str | None = None
    """Its answer in the form in which answers are counted; ``None``: it has none."""
    source: str | None = None
    """The part of the benchmark that the question belongs to."""


def voted_answer(text: str) -> str | None:
    r"""Return the final answer of a text for majority votes; ``None`` if it has none.

    The content of the last ``\boxed{...}``, else what follows the last ``####``, else the last number, without
    thousands separators, else the whole text if it is one line.
    """
    start = text.rfind("\\boxed{")
    if start >= 0:
        depth = 0
        for place in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : place].strip()
        return None
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().replace(",", "") or None
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    if numbers:
        return str(numbers[-1]).replace(",", "")
    whole = text.strip()
    return whole if whole and "\n" not in whole else None


def pass_at_k(rewards: Sequence[float | None], k: int, *, success_threshold: float = 1.0) -> float:
    """Probability that one of k of these samples is correct: ``1 - C(n-c, k) / C(n, k)`` (arXiv:2107.03374).

    A sample without a reward is not, whatever the threshold.
    """
    n, correct = len(rewards), sum(reward is not None and reward >= success_threshold for reward in rewards)
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Expected largest reward of k of these samples, drawn without replacement.

    ``Σ_i r_(i) C(i-1, k-1) / C(n, k)`` over the rewards in ascending order.
    """
    ordered = sorted(rewards)
    return math.fsum(r * math.comb(i, k - 1) for i, r in enumerate(ordered)) / math.comb(len(ordered), k)


def majority_at_k(votes: Sequence[str | None], rewards: Sequence[float], k: int, *, draws: int = DRAWS) -> float:
    """Expected reward of the most frequent answer of k of these samples (self-consistency: arXiv:2203.11171).

    Over all subsets of k samples, or ``draws`` random ones if there are more, the same in every call. Samples without
    an answer do not vote; equally frequent answers count equally; without any vote it is 0.
    """
    n = len(votes)
    if math.comb(n, k) <= draws:
        subsets = list(map(list, combinations(range(n), k)))
    else:
        draw = random.Random(0)
        subsets = [draw.sample(range(n), k) for _ in range(draws)]
    return fmean(_majority([(votes[i], rewards[i]) for i in subset]) for subset in subsets)


def _majority(answers: Sequence[tuple[str | None, float]]) -> float:
    counts = Counter(vote for vote, _ in answers if vote is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    winners = [vote for vote, count in counts.items() if count == most]
    return fmean(fmean(reward for vote, reward in answers if vote == winner) for winner in winners)


def subset_metrics(
    rewards: Sequence[Sequence[float | None]],
    votes: Sequence[Sequence[str | None]] | None = None,
    *,
    success_threshold: float = 1.0,
    draws: int = DRAWS,
) -> dict[str, float]:
    """Metrics of k of the samples of each question, means over questions.

    Args:
        rewards: Of the samples of each question, n or more; ``None`` counts as 0 and is never correct.
        votes: Their answers, see :func:`majority_at_k`; ``None``: no ``maj@k``.
        success_threshold: A sample with at least this reward is correct.
        draws: See :func:`majority_at_k`.

    Returns:
        ``avg@n``, the mean reward, and for k = 1, 2, 4, ... up to n, and n, ``pass@k``, ``best@k`` and ``maj@k``.
    """
    n = min(map(len, rewards))
    sizes = sorted({2**power for power in range(n.bit_length())} | {n})
    counted = [[reward or 0.0 for reward in group] for group in rewards]
    metrics = {f"avg@{n}": fmean(map(fmean, counted))}
    for k in sizes:
        metrics[f"pass@{k}"] = fmean(pass_at_k(group, k, success_threshold=success_threshold) for group in rewards)
    for k in sizes:
        metrics[f"best@{k}"] = fmean(best_at_k(group, k) for group in counted)
    for k in sizes if votes is not None else ():
        pairs = zip(votes or (), counted, strict=True)
        metrics[f"maj@{k}"] = fmean(majority_at_k(answers, group, k, draws=draws) for answers, group in pairs)
    return metrics


def benchmark_metrics(samples: Sequence[GradedSample], *, success_threshold: float = 1.0) -> dict[str, float]:
    """Metrics of graded samples: :func:`subset_metrics`, with ``maj@k`` if samples have votes.

    Besides ``stderr``, the standard error of ``avg@n`` over questions (0 for one); ``questions``, ``samples``,
    ``ungraded``. Questions with more samples than others use all of theirs.

    Raises:
        ValueError: If there are no samples.
    """
    if not samples:
        raise ValueError("there are no samples to evaluate")
    groups: dict[tuple[str | None, int | str], list[GradedSample]] = {}
    for sample in samples:  # parts of a benchmark may each number their questions from 0
        groups.setdefault((sample.source, sample.question), []).append(sample)
    means = [fmean(one.reward or 0.0 for one in group) for group in groups.values()]
    voted = any(one.vote is not None for one in samples)
    return {
        "questions": float(len(groups)),
        "samples": float(len(samples)),
        "ungraded": float(sum(one.reward is None for one in samples)),
        "stderr": stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0,
        **subset_metrics(
            [[one.reward for one in group] for group in groups.values()],
            [[one.vote for one in group] for group in groups.values()] if voted else None,
            success_threshold=success_threshold,
        ),
    }


def metrics_by_source(
    samples: Sequence[GradedSample], *, success_threshold: float = 1.0
) -> dict[str, dict[str, float]]:
    """:func:`benchmark_metrics` of all samples, as ``all``, and of each source, if there are several."""
    found = {"all": benchmark_metrics(samples, success_threshold=success_threshold)}
    sources = sorted({one.source for one in samples if one.source is not None})
    for source in sources if len(sources) > 1 else []:
        chosen = [one for one in samples if one.source == source]
        found[source] = benchmark_metrics(chosen, success_threshold=success_threshold)
    return found


def metrics_table(metrics: dict[str, dict[str, float]]) -> str:
    """Write metrics by source as a Markdown table; ``avg`` with its standard error."""
    names = list(dict.fromkeys(name for one in metrics.values() for name in one if name != "stderr"))
    lines = [["source", *names]]
    for source, one in metrics.items():
        cells = []
        for name in names:
            value = one.get(name)
            if value is None:
                cells.append("")
            elif name in ("questions", "samples", "ungraded"):
                cells.append(str(int(value)))
            else:
                cells.append(f"{value:.3f}" + (f" ± {one['stderr']:.3f}" if name.startswith("avg@") else ""))
        lines.append([source, *cells])
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
