"""``PairwiseReward``: the share of comparisons that an answer wins, as its reward."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any, Literal, Protocol, cast

from rlhfkit.data.types import Sample
from rlhfkit.rewards.base import Needs, reward_metrics, reward_name

Pair = tuple[Sample, Sample]
"""Two answers to one prompt."""

Judgements = Sequence[float | None]
"""For each pair the probability in [0, 1] that the first answer is better, 1/2 for a tie; ``None``: not judged."""


class PairwiseJudge(Protocol):
    """A callable that compares answers: a rule, a model, or a server.

    Example::

        def shorter(pairs):
            return [0.5 + 0.5 * ((a.num_tokens < b.num_tokens) - (a.num_tokens > b.num_tokens)) for a, b in pairs]
    """

    def __call__(self, pairs: Sequence[Pair], /) -> Any:
        """Return :data:`Judgements` of the pairs, in order, or an awaitable of them."""
        ...


class PairwiseReward:
    """Rewards each sample by how often a judge prefers it to the others of its prompt.

    ``r_i = mean over j of (P(i ≻ j) + 1 - P(j ≻ i)) / 2``, where ``P(a ≻ b)`` is the judgement with a shown first. Both
    orders are asked, because judges that are language models prefer a position (Zheng et al., 2023, arXiv:2306.05685,
    section 3.4). For two samples of a prompt the better one has the larger reward, as online DPO needs it (Guo et al.,
    2024, arXiv:2402.04792); for more it is the win rate, which any module can learn from.

    Example::

        RolloutCallback(reward=PairwiseReward(shorter), sampling=SamplingSpec(group_size=2))
        PairwiseReward(ChatJudge("http://127.0.0.1:8000/v1", model="judge"), against="answer")

    Args:
        judge: Compares pairs of samples; plain or async, see :class:`PairwiseJudge`.
        against: What a sample is compared with: ``group``: all other samples of its prompt (a single one, as in greedy
            validation, has no reward); ``answer``: the prompt's answer, whose text is that of the column
            ``PromptDataModule(answer=...)``.
        both_orders: Ask each comparison in both orders; with false a pair costs one judgement.

    Raises:
        TypeError: If the judge cannot be called.
        ValueError: If ``against`` is unknown.
    """

    def __init__(
        self,
        judge: PairwiseJudge | Callable[[Sequence[Pair]], Any],
        *,
        against: Literal["group", "answer"] = "group",
        both_orders: bool = True,
    ) -> None:
        if not callable(judge):
            raise TypeError(f"judge must be callable on a list of pairs of samples, got {type(judge).__name__}")
        if against not in ("group", "answer"):
            raise ValueError(f"against must be 'group' or 'answer', got {against!r}")
        self.judge = judge
        self.against = against
        self.both_orders = both_orders
        self.name = f"{reward_name(judge)}_win_rate"
        self._agreements: list[float] = []

    async def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Return the win rate of each sample; ``None`` where no comparison of it could be judged.

        Raises:
            ValueError: If the judge does not return one number in [0, 1] or ``None`` per pair.
        """
        opponents = self._comparisons(samples)
        pairs = [pair for _, _, pair in opponents]
        asked = [*pairs, *((second, first) for first, second in pairs)] if self.both_orders else pairs
        judgements = _checked(await _awaited(self.judge(asked)), len(asked), reward_name(self.judge)) if asked else []
        wins: list[list[float]] = [[] for _ in samples]
        for place, (row, other, _) in enumerate(opponents):
            first = judgements[place]
            if self.both_orders:
                second = judgements[place + len(pairs)]
                if first is not None and second is not None:
                    self._agreements.append(float((first - 0.5) * (0.5 - second) > 0 or first == 1 - second))
                first = None if first is None or second is None else (first + 1 - second) / 2
            if first is None:
                continue
            wins[row].append(first)
            if other is not None:
                wins[other].append(1 - first)
        return [fmean(each) if each else None for each in wins]

    def _comparisons(self, samples: Sequence[Sample]) -> list[tuple[int, int | None, Pair]]:
        """Row of each first answer, of the second (``None``: it is no sample), and both."""
        if self.against == "answer":
            return [(row, None, (sample, _answer(sample))) for row, sample in enumerate(samples)]
        groups: dict[int, list[int]] = {}
        for row, sample in enumerate(samples):
            groups.setdefault(sample.prompt.index, []).append(row)
        return [
            (row, other, (samples[row], samples[other]))
            for rows in groups.values()
            for row, other in combinations(rows, 2)
        ]

    @property
    def needs(self) -> Needs:
        """The prompts' answers with ``against="answer"``, else nothing."""
        return Needs(answer=self.against == "answer")

    def inner_rewards(self) -> list[Any]:
        """Return the judge, which may have needs too."""
        return [self.judge]

    def metrics(self) -> dict[str, float]:
        """Share of comparisons that came out alike in both orders since the last call, and the judge's metrics."""
        agreements, self._agreements = self._agreements, []
        agreement = {f"{self.name}/order_agreement": fmean(agreements)} if agreements else {}
        return agreement | reward_metrics(cast(Any, self.judge))


def _answer(sample: Sample) -> Sample:
    """The reference answer as a sample."""
    if sample.prompt.answer is None:
        raise ValueError(
            f"PairwiseReward(against='answer') compares with the prompt's answer, but prompt {sample.prompt.index} has "
            "none: name the column that holds it, PromptDataModule(answer=...)"
        )
    return Sample(sample.prompt, -1, [], [], [], "stop", text=str(sample.prompt.answer))


async def _awaited(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


def _checked(judgements: Any, count: int, name: str) -> list[float | None]:
    """Return judgements as floats and ``None``; errors name the wrong one."""
    rule = "a judge returns for each pair the probability in [0, 1] that the first answer is better, or None"
    if isinstance(judgements, str | bytes | Mapping) or not hasattr(judgements, "__len__") or len(judgements) != count:
        size = f"{len(judgements)} values" if hasattr(judgements, "__len__") else type(judgements).__name__
        raise ValueError(f"judge {name!r} returned {size} for {count} pairs; {rule}")
    found = [None if value is None else float(value) for value in judgements]
    for place, value in enumerate(found):
        if value is not None and not (math.isfinite(value) and 0 <= value <= 1):
            raise ValueError(f"judge {name!r} returned {value!r} for pair {place}; {rule}")
    return found
