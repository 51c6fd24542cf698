"""Models of a module that are on machines of their own: starting them, asking them, and waiting for their numbers."""

from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.distributed import gather_objects, run_on_each_rank
from rlhfkit.models.load import precision_dtype
from rlhfkit.roles import ModelPoolError
from rlhfkit.roles.frozen_model import FrozenModel, row_keys
from rlhfkit.roles.replica import Role


class PlacedModels:
    """The models of a module's parts that are elsewhere: each a :class:`~rlhfkit.roles.frozen_model.FrozenModel`.

    They are asked about a group as soon as it is finished (:meth:`ask_early`), while others are still sampled. A part
    asks for the rows of an iteration (:meth:`ask`) and takes the numbers when it needs them (:meth:`result`), by the
    name of the role.

    Args:
        module: The module.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._asked: dict[str, AskedRows] = {}

    def by_role(self) -> dict[str, tuple[FrozenModel, Role]]:
        """The models, by the name of the role, and what they are asked for."""
        return {name: one for part in self._module.parts for name, one in part.placed().items()}

    def start(self, pool: FrozenModel, role: Role) -> None:
        """Start the replicas of a pool, once. A collective."""
        module = self._module
        precision = module.trainer.precision  # the numbers are those of a child of the module
        types = {"weights": precision_dtype(precision), "compute": precision_dtype(precision, compute=True)}
        given = module.given_tokenizer
        pool.start(role, policy=module.model_name if given is None else given, **types)

    def ask(self, name: str, experience: Experience | None) -> None:
        """Ask a model for numbers of this rank's rows, ``None``: none; the first time, start it. A collective."""
        pool, role = self.by_role()[name]
        self.start(pool, role)
        self._asked[name] = AskedRows(pool, self._module, experience)

    def result(self, name: str, columns: int | None = None) -> Tensor:
        """Wait for what a model was asked: (B, T-1), (B, T-1, 2 K) of a model with ``top``, or (B, columns).

        (0, 1) for a rank without rows. A collective.

        Raises:
            ModelPoolError: On all ranks, if those of one rank cannot be computed.
        """
        asked = self._asked.pop(name)
        late, found = run_on_each_rank(lambda: asked.wait(columns), error_type=ModelPoolError)
        return asked.exchange(late, found, columns)

    @property
    def present(self) -> bool:
        """Whether there are any."""
        return bool(self.by_role())

    def begin_asking(self, iteration: int) -> None:
        """Start the models before an iteration's samples. A collective."""
        for pool, role in self.by_role().values():
            self.start(pool, role)
            pool.early.drop_before(iteration)

    def ask_early(self, experience: Experience, iteration: int) -> None:
        """Ask about samples of an iteration that are finished; the mask has the policy's tokens. Any thread may."""
        for pool, _ in self.by_role().values():
            pool.early.add(experience, pool.submit(experience, self._module.passes.batches(experience)), iteration)

    def take_seconds(self) -> dict[str, float]:
        """Seconds since the last call that this rank has waited for each model, and that were hidden, by name."""
        seconds: dict[str, float] = {}
        for name, (pool, _) in self.by_role().items():
            waited, hidden = pool.take_seconds()
            seconds |= {f"{name}_waited": waited, f"{name}_hidden": hidden}
        return seconds

    def close(self) -> None:
        """End these models, also after an error, when Lightning calls no ``teardown``. Not a collective."""
        for pool, _ in self.by_role().values():
            pool.close()


class AskedRows:
    """Numbers of rows that a pool is computing, some of them since their group was finished, on any rank.

    Making one is a collective, also for a rank without rows (``experience=None``).
    """

    def __init__(self, pool: FrozenModel, module: Any, experience: Experience | None) -> None:
        self._pool = pool
        self._experience = experience
        self._keys = [] if experience is None else row_keys(experience)
        early = pool.early.keys()
        ranks = gather_objects((early, self._keys))
        known = set().union(*(theirs for theirs, _ in ranks))
        self._mine = early.intersection(*[set().union(*(wanted for _, wanted in ranks))])
        self._moved = len(ranks) > 1
        """Whether rows may have moved to other ranks since."""
        self._late = None
        late = torch.tensor([key not in known for key in self._keys], dtype=torch.bool)
        if experience is not None and bool(late.any()):
            self._late = pool.submit(experience, module.passes.batches(experience, late))

    def wait(self, columns: int | None) -> tuple[Tensor | None, dict[bytes, Tensor]]:
        """Wait for what this rank has asked: rows of its own, and samples by key."""
        late = None if self._late is None else self._late.result(columns)
        return late, self._pool.early.result(self._mine, columns)

    def exchange(self, late: Tensor | None, found: dict[bytes, Tensor], columns: int | None) -> Tensor:
        """(B, T-1), (B, T-1, 2 K) or (B, columns), of this rank's rows; 0 outside their mask. A collective."""
        if self._moved:
            own = set(self._keys)
            leaving = {key: values for key, values in found.items() if key not in own}
            for arriving in gather_objects(leaving):
                found = found | arriving
        if self._experience is None:
            return torch.zeros(0, 1)
        mask, values = self._experience.action_mask.cpu(), late
        if self._pool.top:
            mask = mask[..., None].expand(-1, -1, 2 * self._pool.top)
        if values is None:
            values = torch.zeros(mask.shape if columns is None else (len(mask), columns))
        for row, key in enumerate(self._keys):
            if key in found:
                values[row, : len(found[key])] = found[key]
        return values * mask if columns is None else values
