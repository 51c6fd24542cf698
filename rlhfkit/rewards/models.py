"""``ModelReward`` and ``ProcessModelReward``: the scores of trained reward models.

The models read the sampled token ids, unless ``text=`` writes a text for a reward model with another tokenizer or
dialogue format.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from rlhfkit.data.batch import TokenBatch, TokenExample, collate_tokens
from rlhfkit.data.packing import balanced_partition
from rlhfkit.data.types import Sample
from rlhfkit.models import ModelLoading, load_causal_lm, load_scalar_model, load_tokenizer, reward_output, scalar_output
from rlhfkit.models.distillation import word_log_odds, word_token
from rlhfkit.models.load import context_length
from rlhfkit.validation import check_integer

Reduction = Literal["min", "prod", "mean", "last"]
"""How the probabilities of the steps become one number."""


class ModelReward:
    r"""Scores samples with a reward model: any sequence classifier with one label, such as ``RewardModule`` saves.

    The model is loaded at the first call, in every process that scores, and never trained.

    Example::

        RolloutCallback(ModelReward("reward-model"), sampling=SamplingSpec(group_size=8))
        ModelReward("other-family", text=lambda sample: f"User: {sample.prompt.text}\nAssistant: {sample.text}")
    """

    stepwise: ClassVar[bool] = False
    """Whether the model is a token classifier with two labels."""

    def __init__(
        self,
        model: str,
        *,
        normalized: bool = True,
        text: Callable[[Sample], str] | None = None,
        max_tokens_per_forward: int = 16384,
        dtype: str = "float32",
        device: torch.device | str | None = None,
        attention: str | None = None,
        trust_remote_code: bool = False,
        name: str = "reward_model",
    ) -> None:
        """Set what to load.

        Args:
            model: Folder or hub name.
            normalized: Shift and scale by the mean and standard deviation in the model's configuration, if it has them.
            text: Writes the text that the model reads, for models with another tokenizer or chat template than the
                policy's; ``None``: the token ids of prompt and completion.
            max_tokens_per_forward: Tokens per forward pass.
            dtype: Type of the weights: ``"float32"``, ``"bfloat16"`` ...; the head always computes in float32.
            device: Where it runs; ``None``: the process's accelerator (set to the rank's by a Trainer), else the CPU.
            attention: As in :class:`~rlhfkit.modules.PolicyModule`; ``None``: packed where the model can be packed.
            trust_remote_code: Run Python code that comes with the model.
            name: Name in logs.

        Raises:
            ValueError: If an argument is out of range.
        """
        check_integer("max_tokens_per_forward", max_tokens_per_forward, minimum=1)
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"dtype must be the name of a torch type such as 'bfloat16', got {dtype!r}")
        self.model = model
        self.normalized = normalized
        self.text = text
        self.max_tokens_per_forward = max_tokens_per_forward
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = device
        self.attention = attention
        self.trust_remote_code = trust_remote_code
        self.name = name
        self._loaded: Any = None
        self._tokenizer: Any = None

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Return the reward of each sample.

        Raises:
            ValueError: If there is no ``text`` and samples have no token ids or another tokenizer than the model's, or
                if one is longer than the model's context.
        """
        if not samples:
            return []
        self.load()
        examples = self.examples(samples)
        lengths = [len(example.input_ids) for example in examples]
        context = context_length(self._loaded.config)
        longest = max(range(len(lengths)), key=lambda row: lengths[row])
        if context is not None and lengths[longest] > context:
            raise ValueError(
                f"a sample of prompt {samples[longest].prompt.index} has {lengths[longest]} tokens, and {self.model} "
                f"reads at most {context}: lower max_new_tokens, shorten what it reads (text=lambda sample: ...), or "
                "use one with a longer context"
            )
        forwards = min(math.ceil(sum(lengths) / self.max_tokens_per_forward), len(lengths))
        rewards = torch.zeros(len(lengths))
        device = next(self._loaded.parameters()).device
        for rows in balanced_partition(lengths, forwards):
            with torch.no_grad():
                rewards[rows] = self.score(collate_tokens([examples[row] for row in rows]).to(device)).cpu()
        return rewards.tolist()

    def examples(self, samples: Sequence[Sample]) -> list[TokenExample]:
        """Return what the model reads, one example per sample; override to add tokens or set ``loss_mask``."""
        if self.text is None:
            token_ids = self._sampled(samples)
            images = [sample.prompt.attachments for sample in samples]
        else:
            token_ids = self._tokenizer([self.text(sample) for sample in samples])["input_ids"]
            images = [()] * len(samples)
        return [TokenExample(ids, [False] * len(ids), seen) for ids, seen in zip(token_ids, images, strict=True)]

    def score(self, batch: TokenBatch) -> Tensor:
        """Return the rewards of a batch of examples, (B,); override to use the model's output in another way."""
        return reward_output(self._loaded, batch, normalized=self.normalized)

    def load(self) -> None:
        """Load the model, unless it is loaded already."""
        if self._loaded is not None:
            return
        device = self.device
        if device is None:
            device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        self._tokenizer = load_tokenizer(self.model, trust_remote_code=self.trust_remote_code)
        self._loaded = self.load_model().requires_grad_(False).eval().to(device)

    def load_model(self) -> nn.Module:
        """Return the model, on the CPU; override it for another kind."""
        return load_scalar_model(
            self.model,
            stepwise=self.stepwise,
            new_head=False,
            dtype=self.dtype,
            loading=ModelLoading(attention=self.attention, trust_remote_code=self.trust_remote_code),
        )

    def _sampled(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Return the sampled token ids; raises ``ValueError`` if there are none or they are of another tokenizer."""
        known = self._loaded.config.get_text_config().vocab_size
        texts = self._tokenizer.batch_decode([sample.token_ids for sample in samples], skip_special_tokens=True)
        for sample, text in zip(samples, texts, strict=True):
            if not sample.num_tokens and not sample.prompt.num_tokens:
                raise ValueError(
                    f"a sample of prompt {sample.prompt.index} has no token ids: tell ModelReward how to write it, "
                    "text=lambda sample: ..."
                )
            if text != sample.text or int(sample.all_token_ids.max()) >= known:
                raise ValueError(
                    f"{self.model} has another tokenizer than the policy: it reads {text[:40]!r} where "
                    f"{sample.text[:40]!r} was sampled. Tell ModelReward how to write a sample, text=lambda sample: ..."
                )
        return [sample.all_token_ids.tolist() for sample in samples]


class StepTokens:
    r"""Writes a sample with a step token at the end of each step, as Math-Shepherd's models read it.

    ``StepTokens("ки")`` makes ``"1 + 1 = ? Step 1: 1 + 1 = 2 ки\nStep 2: The answer is: 2 ки"`` of two lines.
    """

    def __init__(self, step_token: str, *, separator: str = "\n", between: str = " ") -> None:
        """Set the format.

        Args:
            step_token: Ends each step.
            separator: Stands between the steps of a sample, and stays.
            between: Stands between the prompt and the sample, and before each step token.

        Raises:
            ValueError: If the step token or the separator is empty.
        """
        if not step_token or not separator:
            raise ValueError(f"step_token and separator must not be empty, got {step_token!r} and {separator!r}")
        self.step_token = step_token
        self.separator = separator
        self.between = between

    def __call__(self, sample: Sample) -> str:
        """Return the text."""
        steps = [step for step in sample.text.split(self.separator) if step.strip()] or [""]
        ended = self.separator.join(step + self.between + self.step_token for step in steps)
        return sample.prompt.text + self.between + ended


class ProcessModelReward(ModelReward):
    r"""Scores samples with a process reward model: a token classifier with two labels, of which 1 is *good*.

    With ``words`` it is a language model, and the probability of a step is that of the first word against the second
    after the token that ends the step: Math-Shepherd's and OpenRLHF's models.

    A step ends at the token that completes a separator, as in ``StepwiseDataModule``. If the last step has no
    separator, one replaces the end-of-sequence token.

    Example::

        RolloutCallback(ProcessModelReward("step-judge", separator="\n\n"), sampling=SamplingSpec(group_size=8))
        ProcessModelReward("math-shepherd-mistral-7b-prm", words=("+", "-"), separator="ки", text=StepTokens("ки"))
    """

    stepwise: ClassVar[bool] = True

    def __init__(
        self,
        model: str,
        *,
        separator: str = "\n",
        words: Sequence[str] | None = None,
        reduction: Reduction = "min",
        text: Callable[[Sample], str] | None = None,
        name: str = "process_reward_model",
        **kwargs: Any,
    ) -> None:
        """Set what to load.

        Args:
            model: Folder or hub name.
            separator: End of a step in the model's training data.
            words: Words for a good and a bad step, each one token of a language model; ``None``: a token classifier.
            reduction: ``min`` (Math-Shepherd, Wang et al., 2023, arXiv:2312.08935), ``prod`` (Lightman et al., 2023,
                arXiv:2305.20050), ``mean`` or ``last``.
            text: See :class:`ModelReward`; steps are then found in the whole text, the prompt included.
            name: Name in logs.
            **kwargs: Arguments of :class:`ModelReward`.

        Raises:
            ValueError: If an argument is out of range.
        """
        if reduction not in get_args(Reduction):
            raise ValueError(f"reduction must be one of {', '.join(get_args(Reduction))}, got {reduction!r}")
        if not separator:
            raise ValueError("separator must have at least one character: a step is judged at its last token")
        if words is not None and (isinstance(words, str) or len(words) != 2 or words[0] == words[1]):
            raise ValueError(f"words must be two different words, for good and for bad steps, got {words!r}")
        super().__init__(model, normalized=False, text=text, name=name, **kwargs)
        self.words = None if words is None else (words[0], words[1])
        self.separator = separator
        self.reduction = reduction

    def examples(self, samples: Sequence[Sample]) -> list[TokenExample]:
        """Return what the model reads, with the last token of each step marked."""
        starts = [0 if self.text is not None else sample.prompt.num_tokens for sample in samples]
        read = super().examples(samples)
        return [self._in_steps(one, start) for one, start in zip(read, starts, strict=True)]

    def _in_steps(self, example: TokenExample, start: int) -> TokenExample:
        """Mark where steps end, after the ``start`` tokens of the prompt."""
        token_ids = example.input_ids
        special = set(self._tokenizer.all_special_ids) - {*self._separator_ids}
        while len(token_ids) > start and token_ids[-1] in special:
            token_ids = token_ids[:-1]
        ends = self._step_ends(token_ids[start:])
        if not ends or ends[-1] != len(token_ids) - start - 1:
            token_ids = token_ids + self._separator_ids
            ends.append(len(token_ids) - start - 1)
        marked = {start + end for end in ends}
        mask = [position in marked for position in range(len(token_ids))]
        return TokenExample(token_ids, mask, example.attachments)

    def _step_ends(self, token_ids: list[int]) -> list[int]:
        """Find the tokens that complete a separator, each decoded alone: it may hold a part of one, or several."""
        pieces = self._tokenizer.batch_decode([[token] for token in token_ids])
        behind = list(accumulate(len(piece) for piece in pieces))  # number of characters up to and including each token
        found = re.finditer(re.escape(self.separator), "".join(pieces))
        return sorted({bisect_left(behind, match.end()) for match in found})

    @property
    def _separator_ids(self) -> list[int]:
        token_ids: list[int] = self._tokenizer(self.separator, add_special_tokens=False)["input_ids"]
        return token_ids

    def load_model(self) -> nn.Module:
        """Return the token classifier, or the language model with ``words``."""
        if self.words is None:
            return super().load_model()
        loading = ModelLoading(attention=self.attention, trust_remote_code=self.trust_remote_code)
        model: nn.Module = load_causal_lm(self.model, dtype=self.dtype, loading=loading)
        return model

    def log_odds(self, batch: TokenBatch, ends: Tensor) -> Tensor:
        """Return (B, T) log-odds that the steps that end at ``ends`` (B, T) are good; override for other outputs."""
        if self.words is None:
            return scalar_output(self._loaded, batch, ends)
        good, bad = (word_token(self._tokenizer, word) for word in self.words)
        return word_log_odds(self._loaded, batch, ends, (good, bad)).values

    def score(self, batch: TokenBatch) -> Tensor:
        """Return the rewards of a batch, (B,), each in [0, 1]."""
        ends = torch.nn.functional.pad(batch.loss_mask, (1, 0))
        good = self.log_odds(batch, ends).sigmoid()
        if self.reduction == "min":
            return good.masked_fill(~ends, 1.0).amin(-1)
        if self.reduction == "prod":
            return good.masked_fill(~ends, 1.0).prod(-1)
        if self.reduction == "mean":
            return (good * ends).sum(-1) / ends.sum(-1)
        last = ends * torch.arange(ends.shape[1], device=ends.device)
        return good.gather(1, last.argmax(-1, keepdim=True))[:, 0]
