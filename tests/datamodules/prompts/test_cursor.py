"""Drawing and requeueing: no row is lost, doubled or out of order, whatever iterations do and wherever they stop."""

import itertools
import json
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rlhfkit.data import Prompt
from rlhfkit.datamodules.prompts.curriculum import Curriculum, PromptPass
from rlhfkit.datamodules.prompts.cursor import IterationQueue, PromptCursor
from rlhfkit.datamodules.prompts.table import TablePrompts

from .drawing import numbered

TOTAL = 7
# Per iteration: how many prompts each round draws, and which of the drawn ones (by position) come back.
ITERATIONS = st.lists(
    st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.sets(st.integers(0, TOTAL - 1))), max_size=12
)


def prompts(**options: Any) -> TablePrompts:
    return numbered(TOTAL, first=100, **options)  # the index in the file is not the row: some were dropped as too long


def play(
    prompts: TablePrompts, cursor: PromptCursor, iterations: list[tuple[list[int], set[int]]]
) -> tuple[list[tuple[list[int], list[int]]], PromptCursor]:
    """Used and returned rows of each iteration, and the cursor behind the last."""
    played = []
    for rounds, returned in iterations:
        queue = IterationQueue(prompts, cursor)
        drawn: list[Prompt] = []
        for count in rounds:
            if queue.remaining:
                drawn += queue.take(min(count, queue.remaining))
        assert queue.remaining == TOTAL - len({each.index for each in drawn})  # nothing twice in an iteration
        known = cursor.history or {}
        queue.record({each.index: [float((each.index + len(known)) % 3 == 0)] for each in drawn})
        back = [each for position, each in enumerate(drawn) if position in returned]
        queue.requeue(reversed(back))
        used = [each.index - 100 for each in drawn if each not in back]
        played.append((used, [each.index - 100 for each in back]))
        cursor = PromptCursor.from_state_dict(json.loads(json.dumps(queue.after)))  # plain values, through any file
    return played, cursor


@given(ITERATIONS, st.booleans())
def test_every_row_is_used_or_comes_first_in_the_next_iteration(
    iterations: list[tuple[list[int], set[int]]], shuffle: bool
) -> None:
    played, cursor = play(prompts(seed=3, shuffle=shuffle), PromptCursor(), iterations)
    for (_, back), (next_used, next_back) in itertools.pairwise(played):
        drawn = {*next_used, *next_back}
        assert set(back[: len(drawn)]) <= drawn  # in order: the first of them first, if not all of them were drawn
    # Accounting over all passes: what was used, and what is still put off, is every row that the passes went over.
    uses = Counter(itertools.chain.from_iterable(used for used, _ in played))
    whole = Counter(dict.fromkeys(range(TOTAL), cursor.number))
    whole.update(prompts(seed=3, shuffle=shuffle)._permutation(cursor.number)[: cursor.offset])
    assert uses + Counter(cursor.postponed) == whole


def some(share: int) -> Curriculum:
    """A curriculum that leaves out about one of ``share`` rows, others in each pass, and what is solved."""

    def order(one: PromptPass) -> list[int]:
        unsolved = [row for row in one.rows if row not in one.history or one.history[row].reward < 1]
        return [row for row in unsolved if (row * 7 + one.number * 3) % (share + 1)]

    return order


@given(ITERATIONS, st.integers(0, 12), st.none() | st.integers(0, 3).map(some))
def test_it_resumes_at_any_iteration(
    iterations: list[tuple[list[int], set[int]]], stop: int, curriculum: Curriculum | None
) -> None:
    straight, end = play(prompts(seed=1, curriculum=curriculum), PromptCursor(), iterations)
    _, middle = play(prompts(seed=1, curriculum=curriculum), PromptCursor(), iterations[:stop])
    resumed, resumed_end = play(prompts(seed=1, curriculum=curriculum), middle, iterations[stop:])
    assert resumed == straight[stop:]
    assert resumed_end == end
