"""``ProcessModelReward``: the step scores of a process reward model, reduced to one number per sample."""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from rlhfkit.data.batch import TokenBatch, TokenExample
from rlhfkit.data.types import Sample
from rlhfkit.models import scalar_output
from rlhfkit.rewards.models import ModelReward

Reduction = Literal["min", "prod", "mean", "last"]
"""How the probabilities of the steps become one number."""


class ProcessModelReward(ModelReward):
    r"""Scores samples with a process reward model: a token classifier with two labels, of which 1 is *good*.

    A step ends at the token that completes a separator, as in ``StepwiseDataModule``; a last step that was sampled
    without one gets one, in place of the end-of-sequence token.

    Example::

        RolloutCallback(ProcessModelReward("step-judge", separator="\n\n"), sampling=SamplingSpec(group_size=8))
    """

    stepwise: ClassVar[bool] = True

    def __init__(
        self,
        model: str,
        *,
        separator: str = "\n",
        reduction: Reduction = "min",
        text: Callable[[Sample], str] | None = None,
        name: str = "process_reward_model",
        **kwargs: Any,
    ) -> None:
        """Set what to load.

        Args:
            model: Folder or hub name.
            separator: What a step ends with in the data that the model was trained on.
            reduction: ``min`` (Math-Shepherd, Wang et al., 2023, arXiv:2312.08935), ``prod`` (Lightman et al., 2023,
                arXiv:2305.20050), ``mean`` or ``last``.
            text: See :class:`ModelReward`; steps are then found in all of the text, the prompt included.
            name: Name in logs.
            **kwargs: Arguments of :class:`ModelReward`.

        Raises:
            ValueError: If an argument is out of range.
        """
        if reduction not in get_args(Reduction):
            raise ValueError(f"reduction must be one of {', '.join(get_args(Reduction))}, got {reduction!r}")
        if not separator:
            raise ValueError("separator must have at least one character: a step is judged at its last token")
        super().__init__(model, normalized=False, text=text, name=name, **kwargs)
        self.separator = separator
        self.reduction = reduction

    def examples(self, samples: Sequence[Sample]) -> list[TokenExample]:
        """Return what the model reads, with the last token of each step marked."""
        starts = [0 if self.text is not None else len(sample.prompt.token_ids) for sample in samples]
        read = super().examples(samples)
        return [self._in_steps(one.input_ids, start) for one, start in zip(read, starts, strict=True)]

    def _in_steps(self, token_ids: list[int], start: int) -> TokenExample:
        """Mark where steps end after the first ``start`` tokens, which are the prompt."""
        special = set(self._tokenizer.all_special_ids) - {*self._separator_ids}
        while len(token_ids) > start and token_ids[-1] in special:
            token_ids = token_ids[:-1]
        ends = self._step_ends(token_ids[start:])
        if not ends or ends[-1] != len(token_ids) - start - 1:
            token_ids = token_ids + self._separator_ids
            ends.append(len(token_ids) - start - 1)
        marked = {start + end for end in ends}
        return TokenExample(token_ids, [position in marked for position in range(len(token_ids))])

    def _step_ends(self, token_ids: list[int]) -> list[int]:
        """Find the tokens that complete a separator.

        Tokens are decoded one by one: one may hold a part of a separator, or several.
        """
        pieces = self._tokenizer.batch_decode([[token] for token in token_ids])
        behind = list(accumulate(len(piece) for piece in pieces))  # characters up to and with each token
        found = re.finditer(re.escape(self.separator), "".join(pieces))
        return sorted({bisect_left(behind, match.end()) for match in found})

    @property
    def _separator_ids(self) -> list[int]:
        return self._tokenizer(self.separator, add_special_tokens=False)["input_ids"]

    def score(self, batch: TokenBatch) -> Tensor:
        """Return the rewards of a batch, (B,), each in [0, 1]."""
        ends = torch.nn.functional.pad(batch.loss_mask, (1, 0))
        good = scalar_output(self._loaded, batch, ends).sigmoid()
        if self.reduction == "min":
            return good.masked_fill(~ends, 1.0).amin(-1)
        if self.reduction == "prod":
            return good.masked_fill(~ends, 1.0).prod(-1)
        if self.reduction == "mean":
            return (good * ends).sum(-1) / ends.sum(-1)
        last = ends * torch.arange(ends.shape[1], device=ends.device)
        return good.gather(1, last.argmax(-1, keepdim=True))[:, 0]
