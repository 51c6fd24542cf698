"""``TeacherDomains``: several teachers of one student, of which a column of the prompts chooses one for each."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.modules.arguments import refuse_without_effect
from rlhfkit.protocols import HasPromptColumns

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
        if not isinstance(teacher, Mapping) or "model" in teacher or not plain:
            refuse_without_effect({"teacher_column": column != "source"}, "one teacher")
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
