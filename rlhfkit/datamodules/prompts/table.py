"""``TablePrompts``: prompts of one or several sources that were all read before training, drawn in shuffled passes."""

import logging
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from numbers import Integral
from typing import Any

from rlhfkit.data.packing import permutation
from rlhfkit.data.types import Prompt
from rlhfkit.datamodules.prompts.curriculum import Curriculum, PromptPass
from rlhfkit.datamodules.prompts.cursor import PromptCursor, TrainingPrompts
from rlhfkit.datamodules.prompts.rows import PromptRows, source_names
from rlhfkit.datamodules.tokenization.mixture import Mixture, interleaved

log = logging.getLogger(__name__)


class TablePrompts(TrainingPrompts):
    """Prompts of tables, drawn in passes that have each once, or the sources of a mixture by weight.

    Args:
        parts: The prompts of each source.
        mixture: The sources and their weights; ``None``: there is one source.
        batch_size: Prompts per iteration, of which none may be twice; ``None``: they are for validation.
        seed: Of the shuffling.
        shuffle: Shuffle each pass.
        curriculum: Orders each pass; ``None``: there is none.
        description: Of the data, for messages.

    Raises:
        ValueError: If there are fewer prompts than an iteration needs.
    """

    def __init__(
        self,
        parts: Sequence[PromptRows],
        mixture: Mixture | None = None,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
        description: str = "",
    ) -> None:
        super().__init__(PromptCursor(), description)
        self.parts = parts
        self.mixture = mixture
        self.names = [] if mixture is None else source_names(mixture.sources)
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.curriculum = curriculum
        self._permutations: dict[int, Sequence[int]] = {}  # by the number of the pass
        self._check_count()

    @property
    def counts(self) -> list[int]:
        """Prompts of each source in a pass."""
        sizes = [len(part) for part in self.parts]
        return sizes if self.mixture is None else self.mixture.counts(sizes)

    @property
    def total(self) -> int:
        """Prompts of all sources."""
        return sum(map(len, self.parts))

    def prompt(self, place: int) -> Prompt:
        """Return a prompt whose ``index`` counts on over the sources; that of a mixture has its source's name."""
        first = 0
        for number, part in enumerate(self.parts):
            if place < len(part):
                prompt = part[place]
                prompt.index += first
                if self.names:
                    prompt.metadata.setdefault("source", self.names[number])
                return prompt
            place, first = place - len(part), first + len(part.rows)
        raise IndexError(f"there are {self.total} prompts")

    def _check_count(self) -> None:
        if self.batch_size is None:
            return
        if self.total < self.batch_size:
            raise ValueError(
                f"{self.description} has {self.total} prompts, fewer than rollout_batch_size {self.batch_size}, and a "
                "prompt cannot be in an iteration twice: lower rollout_batch_size or add prompts"
            )
        for name, part, count in zip(self.names, self.parts, self.counts, strict=False):
            share = self.batch_size * count / sum(self.counts)
            if share > len(part):
                raise ValueError(
                    f"{name} has {len(part)} prompts, and its weight asks for {share:.1f} of the {self.batch_size} of "
                    "an iteration, in which a prompt cannot be twice: lower its weight or rollout_batch_size, or add "
                    "prompts"
                )

    def check(self, *, longest: int, reason: str, vocabulary: int | None) -> None:
        """Check the length of all prompts, and that the model knows their tokens.

        Raises:
            ValueError: If one is too long and such are errors, too few are left, or one has an unknown token.
        """
        for part in self.parts:
            part.check_vocabulary(vocabulary)
            part.limit_lengths(longest, reason)
        self._permutations = {}  # some rows may be gone
        self._check_count()

    def source_columns(self) -> list[tuple[Any, list[str]]]:
        """Each source, with its columns; prompts of a mixture have the name of their source too."""
        if self.mixture is None:
            return [(part.source, list(part.rows.column_names)) for part in self.parts]
        return [(part.source, sorted({*part.rows.column_names, "source"})) for part in self.parts]

    def describe(self, text: str) -> str:
        """``text``, the names of sources and columns, as a description of these prompts."""
        out = sum(len(part.rows) - len(part.kept) for part in self.parts)
        return f"{text}: {self.total} prompts" + (f", {out} rows left out" if out else "")

    def column(self, name: str) -> list[Any]:
        """The values of a column by place; ValueError if a source does not have it, or it has missing values."""
        return [value for part in self.parts for value in part.column(name)]

    def column_by_index(self, name: str) -> dict[int, Any]:
        """The values of a column by ``index``; ``source`` is the name of a source that does not have it."""
        found: dict[int, Any] = {}
        first = 0
        for number, part in enumerate(self.parts):
            missing = self.names and name == "source" and name not in part.rows.column_names
            values = [self.names[number]] * len(part) if missing else part.column(name)
            found |= {first + index: value for index, value in zip(part.kept, values, strict=True)}
            first += len(part.rows)
        return found

    # ------------------------------------------------------------------ order

    def take(
        self, count: int, cursor: PromptCursor, *, without: Collection[int] = ()
    ) -> tuple[list[int], PromptCursor]:
        """Take ``count`` different rows, none in ``without``; return them and the cursor after them.

        A batch that spans two passes may meet a row twice. The second occurrence is postponed to the front of the next
        batch, so that no pass loses a row. Raises ValueError if ``count`` is below 1, or there are not as many
        different rows.
        """
        seen = set(without)
        if not 1 <= count <= self.total - len(seen):
            besides = f" besides the {len(seen)} drawn already" if seen else ""
            raise ValueError(f"cannot take {count} different prompts: there are {self.total}{besides}")
        taken: list[int] = []
        skipped: list[int] = []
        first = 0
        while len(taken) < count and first < len(cursor.postponed):
            row = cursor.postponed[first]
            (skipped if row in seen else taken).append(row)
            seen.add(row)
            first += 1
        number, offset, rows = cursor.number, cursor.offset, cursor.rows
        if rows is None:
            rows = self._rows(number, cursor) if offset == 0 else self._permutation(number)
        taken_before_pass = -1  # rows taken when the current pass began; -1: it began in another batch
        while len(taken) < count:
            if offset >= len(rows) and taken_before_pass == len(taken):
                rows = self._with_left_out_rows(number, rows)
            elif offset >= len(rows):
                number, offset, taken_before_pass = number + 1, 0, len(taken)
                rows = self._rows(number, cursor)
                continue
            row = rows[offset]
            (skipped if row in seen else taken).append(row)
            seen.add(row)
            offset += 1
        kept = None if self.curriculum is None else rows
        postponed = (*skipped, *cursor.postponed[first:])
        return taken, cursor._replace(number=number, offset=offset, postponed=postponed, rows=kept)

    def _rows(self, number: int, cursor: PromptCursor) -> Sequence[int]:
        """Return the rows of one pass, ordered by the curriculum from the current history."""
        if self.curriculum is None:
            return self._permutation(number)
        history = {} if cursor.history is None else cursor.history
        asked = PromptPass(number, self._permutation(number), history, self.column, cursor.recent)
        rows = list(self.curriculum(asked))
        wrong = [row for row in rows if not (isinstance(row, Integral) and 0 <= int(row) < self.total)]
        if wrong:
            raise ValueError(
                f"curriculum={self.curriculum!r} has returned {wrong[0]!r} for pass {number}: it must return rows of "
                f"the pass, integers from 0 to {self.total - 1}"
            )
        return list(map(int, rows))  # NumPy's integers are not plain values for a checkpoint

    def _with_left_out_rows(self, number: int, rows: Sequence[int]) -> Sequence[int]:
        """Append the rows that the curriculum leaves out to a pass that is too short to fill a batch."""
        log.warning(
            "pass %d over the prompts has %d rows, too few for an iteration: those that its order leaves out follow",
            *(number, len(set(rows))),
        )
        return list(dict.fromkeys([*rows, *self._permutation(number), *range(self.total)]))

    def _permutation(self, number: int) -> Sequence[int]:
        """Return the order of one pass, cached for two passes. Thread-safe: the dictionary is replaced, not changed."""
        cached = self._permutations
        if number not in cached:
            order = self._mixed_pass(number) if len(self.parts) > 1 else self._shuffled(0, number)
            self._permutations = {key: cached[key] for key in cached if key >= number - 1} | {number: order}
            return order
        return cached[number]

    def _mixed_pass(self, number: int) -> list[int]:
        """The places of one pass: each source's share, evenly spread.

        A source continues where the previous pass left it, so that all of its prompts are used equally often.
        """
        counts, firsts = self.counts, list(accumulate((len(part) for part in self.parts), initial=0))
        orders: dict[tuple[int, int], Sequence[int]] = {}
        places = []
        for source, turn in interleaved(counts):
            size = len(self.parts[source])
            times, offset = divmod(number * counts[source] + turn, size)
            if (source, times) not in orders:
                orders[source, times] = self._shuffled(source, times)
            places.append(firsts[source] + orders[source, times][offset])
        return places

    def _shuffled(self, source: int, number: int) -> Sequence[int]:
        """The rows of a source's pass: a function of (seed, pass) alone."""
        size = len(self.parts[source])
        return permutation(size, seed=self.seed + source, number=number) if self.shuffle else range(size)

    def changes(self) -> str:
        """What another fingerprint may come from."""
        return f"{self.total} rows now"

    @property
    def fingerprint(self) -> str:
        """Digest that changes with the prompts, and with the shares of a mixture."""
        if self.mixture is None:
            return self.parts[0].fingerprint()
        return "/".join(f"{part.fingerprint()}*{count}" for part, count in zip(self.parts, self.counts, strict=True))


class PromptBatches:
    """Validation prompts in batches over all ranks; each rank takes every ``world_size``-th, so shares may be empty."""

    def __init__(self, prompts: TablePrompts, batch_size: int, rank: int, world_size: int) -> None:
        self.prompts = prompts
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        """Number of batches, the same on every rank."""
        return -(-self.prompts.total // self.batch_size)

    def __iter__(self) -> Iterator[list[Prompt]]:
        """Yield this rank's share of each batch."""
        for start in range(0, self.prompts.total, self.batch_size):
            stop = min(start + self.batch_size, self.prompts.total)
            yield [self.prompts.prompt(position) for position in range(start + self.rank, stop, self.world_size)]
