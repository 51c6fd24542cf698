"""Teachers of distillation: frozen models, their tokens, how they are compared, and which prompt has which."""

from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.losses.distillation import Remainder
from rlhfkit.models import PolicyOutput, load_tokenizer
from rlhfkit.modules.base import PolicyModule, load_frozen
from rlhfkit.protocols import HasPromptColumns
from rlhfkit.validation import check_integer, function_or_name, refuse_without_effect


def checked_divergence(
    divergence: Any,
    *,
    top_k: int | None,
    remainder: Remainder,
    chunk_size: int,
) -> Any:
    """Check what says how distributions of student and teacher are compared.

    Args:
        divergence: A name of rlhfkit, or a function, see :data:`~rlhfkit.validation.GivenFunction`.
        top_k: Of the teacher's likeliest tokens.
        remainder: Treatment of the others.
        chunk_size: Tokens whose logits exist at a time.

    Returns:
        The divergence: a name of rlhfkit, or a function.

    Raises:
        ValueError: If one is out of range, or has no effect beside the others.
    """
    check_integer("top_k", top_k, minimum=1, optional=True)
    check_integer("chunk_size", chunk_size, minimum=1, why="it is in tokens")
    if top_k is None:
        refuse_without_effect({"remainder": remainder != "bucket"}, "top_k=None, which compares all tokens")
    return function_or_name(divergence, "divergence", home="rlhfkit.losses.distillation")


def check_teacher_tokens(name: str, student: PolicyModule) -> None:
    """Raise ValueError if the tokens of teacher and student differ."""
    trusted = student.trust_remote_code
    vocabulary = student.tokenizer.get_vocab()
    teacher_vocabulary = load_tokenizer(name, trust_remote_code=trusted).get_vocab()
    if vocabulary != teacher_vocabulary:
        different = sorted({token for token, _ in vocabulary.items() ^ teacher_vocabulary.items()})
        raise ValueError(
            f"the teacher {name!r} has other tokens than the student {student.model_name!r} "
            f"({len(teacher_vocabulary)} and {len(vocabulary)}; {len(different)} differ, e.g. {different[:4]}): "
            "distillation compares the probabilities of the same tokens, so take a teacher of the same family"
        )


def load_teacher(name: str, student: PolicyModule) -> nn.Module:
    """Load a frozen teacher without dropout, like the student; raises ValueError if its tokens differ."""
    check_teacher_tokens(name, student)
    return load_frozen(name, student)


MAX_TEACHERS = 16
"""Teachers of one student at most: each is a child of its own."""


class TeacherDomains:
    """Which teacher each prompt has.

    Args:
        teacher: What the module was given: a mapping of domains to names, or anything else for one teacher.
        column: Column of the prompts that names the domain.

    Raises:
        ValueError: If there are too many teachers or none, or there is one and a column is chosen.
    """

    def __init__(self, teacher: object, column: str) -> None:
        self.names: dict[str, str] = {}
        """Names of teachers by domain; empty: there is one teacher."""
        self.column = column
        self._of_prompt: Mapping[int, str] = {}
        plain = isinstance(teacher, Mapping) and all(isinstance(name, str) for name in teacher.values())
        if not isinstance(teacher, Mapping) or "class_path" in teacher or not plain:
            refuse_without_effect({"Teacher.column": column != "source"}, "one teacher")
            return  # a name, or a ModelPool as an object or from YAML
        if not 1 <= len(teacher) <= MAX_TEACHERS:
            raise ValueError(f"teacher must name 1 to {MAX_TEACHERS} teachers by domain, got {len(teacher)}")
        self.names = {str(domain): str(name) for domain, name in teacher.items()}

    def __bool__(self) -> bool:
        """Whether there are several teachers."""
        return bool(self.names)

    def read(self, data: Any) -> None:
        """Read the domain of each prompt from the DataModule.

        Raises:
            TypeError: If it has no columns.
            ValueError: If a domain has no teacher.
        """
        if not isinstance(data, HasPromptColumns):
            raise TypeError("several teachers need a DataModule with prompt_column(), such as PromptDataModule")
        found = {index: str(value) for index, value in data.prompt_column(self.column).items()}
        missing = sorted(set(found.values()) - set(self.names))
        if missing:
            raise ValueError(
                f"column {self.column!r} of the prompts names {', '.join(missing)}, and there are teachers for "
                f"{', '.join(self.names)}: give teacher={{...}} a name for each"
            )
        self._of_prompt = found

    def rows(self, experience: Experience) -> Iterator[Tensor]:
        """(B,) bool, the samples of each teacher, in the order of :attr:`names`."""
        domains = [self._of_prompt[index] for index in experience.group.tolist()]
        for domain in self.names:
            yield torch.tensor([each == domain for each in domains], dtype=torch.bool)


class ComparedOutput(PolicyOutput):
    """The policy's output for a batch, with its divergence from a teacher's.

    A named tuple takes no further fields, so these are attributes, which ``_replace`` does not keep.
    """

    divergence: Tensor
    """(B, T-1) float32 in nats, with gradient; 0 where the mask is false."""

    @classmethod
    def of(
        cls,
        logprobs: Tensor,
        entropy: Tensor | None,
        divergence: Tensor,
        router_aux_loss: Tensor | None,
    ) -> Self:
        """Make an output of tensors (B, T-1) and the router's loss, a scalar."""
        made = cls(logprobs, entropy, router_aux_loss)
        made.divergence = divergence
        return made
