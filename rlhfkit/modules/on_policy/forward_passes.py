"""``ForwardPasses``: forward passes over the rows of an iteration, which are divided over the ranks."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhfkit.data.token_cap import PackedCost, PaddedCost, capped_batches
from rlhfkit.data.types import Experience
from rlhfkit.distributed import all_reduce, cpu_group, get_rank, get_world_size
from rlhfkit.mesh import Mesh, forward_group_of
from rlhfkit.models import policy_output
from rlhfkit.models.forward import packs_batches, unwrap
from rlhfkit.models.routing import choices_per_token


class TokenStatistics(NamedTuple):
    """What a forward pass over an iteration knows of each token; on the CPU, 0 in rows that were not wanted.

    Attributes:
        logprobs: (B, T-1) float32.
        entropy: (B, T-1) float32, nats; ``None`` unless asked for.
        values: (B, T-1) float32, those of a value head of the policy; ``None`` unless asked for.
        routing: (B, T-1, C) int16, see :func:`~rlhfkit.models.policy_output`; ``None`` unless asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None
    values: Tensor | None
    routing: Tensor | None


class ForwardPasses:
    """Computes over whole iterations of samples, of which each rank has some rows.

    Args:
        module: The module whose Trainer says the precision, and on whose device batches are computed.
        max_tokens: ``max_tokens_per_forward`` of :class:`~rlhfkit.ModelLoading`.
    """

    def __init__(self, module: Any, max_tokens: int) -> None:
        self._module = module
        self.max_tokens = max_tokens

    def logprobs(self, model: nn.Module, experience: Experience, rows: Tensor | None = None) -> Tensor:
        """The log-probs of :meth:`statistics`. A collective."""
        return self.statistics(model, experience, rows).logprobs

    def statistics(
        self,
        model: nn.Module,
        experience: Experience,
        rows: Tensor | None = None,
        *,
        entropy: bool = False,
        values: bool = False,
        routing: bool = False,
    ) -> TokenStatistics:
        """Compute what a model gives the tokens of this rank's rows, in as many forward passes as the other ranks.

        A collective.

        Args:
            model: A causal language model.
            experience: B sequences of this rank.
            rows: (B,) bool, the wanted sequences; ``None``: all.
            entropy: Return the entropy.
            values: Return the values of the model's value head.
            routing: Return which experts the routers of a mixture choose.

        Returns:
            0 outside the mask.
        """

        def compute(batch: Experience) -> Tensor:
            temperature = batch.temperature
            asked = {"entropy": entropy, "values": values, "routing": routing}
            out = policy_output(model, batch, batch.action_mask, temperature=temperature, **asked)
            columns = [one[..., None] for one in (out.logprobs, out.entropy, out.values) if one is not None]
            if out.routing is not None:
                columns.append(out.routing.to(columns[0].dtype))  # float32 holds numbers of experts exactly
            return torch.cat(columns, -1)

        first = 1 + entropy + values
        columns = first + (choices_per_token(unwrap(model)) if routing else 0)
        found = self.forward(model, compute, experience, rows, columns)
        return TokenStatistics(
            found[..., 0].clone(),
            found[..., 1].clone() if entropy else None,
            found[..., first - 1].clone() if values else None,
            found[..., first:].to(torch.int16) if routing else None,
        )

    @torch.no_grad()
    def forward(
        self,
        model: nn.Module,
        compute: Callable[[Experience], Tensor],
        experience: Experience,
        rows: Tensor | None = None,
        columns: int | None = None,
    ) -> Tensor:
        """Run a forward pass over this rank's rows, in as many batches as the other ranks. A collective.

        Args:
            model: What ``compute`` calls; in eval mode meanwhile.
            compute: From a batch of b sequences of t tokens to (b, t-1), or (b, t-1, C).
            experience: B sequences of this rank, which may be none; other ranks have others.
            rows: (B,) bool, the wanted sequences, which may be none; ``None``: all.
            columns: C, if ``compute`` returns several numbers for each token.

        Returns:
            (B, T-1) or (B, T-1, C) float32 on the CPU; 0 in other rows.
        """
        last = () if columns is None else (columns,)
        results = torch.zeros((*experience.action_mask.shape, *last), device=self._module.device)
        turns = self.turns(model, experience, rows)
        if not turns:
            return results.cpu()
        nothing = experience.select([]).placeholder().to(self._module.device)
        training = model.training
        model.eval()
        for batch_rows in turns:
            batch = nothing if batch_rows is None else experience.select(batch_rows).to(self._module.device)
            with self._module.trainer.precision_plugin.forward_context():
                values = compute(batch)
            if batch_rows is not None:
                results[batch_rows.to(self._module.device, non_blocking=True), : values.shape[1]] = values.float()
        model.train(training)
        return results.cpu()

    def turns(self, model: nn.Module, experience: Experience, rows: Tensor | None) -> list[Tensor | None]:
        """The rows of each forward pass, ``None`` for one in which only other ranks have some. A collective.

        A sharded model gathers its weights in each pass, so that all ranks run equally many. Ranks that compute their
        passes together have a turn each for batches that are longer than a rank's share: a long sequence then is the
        only one.
        """
        group = forward_group_of(unwrap(model))
        mesh = Mesh(get_rank(), get_world_size()) if group is None else group.mesh
        # The batches of all members are computed at once, and each rank computes its part of all their tokens.
        limit = max(self.max_tokens // mesh.tensor, 1)
        batches, long = self._forward_batches(experience, rows, limit, packed=packs_batches(model))
        counts = torch.zeros(mesh.world_size, 2, dtype=torch.int64)
        if mesh.forward_group_size == 1:
            long = 0
        counts[mesh.rank] = torch.tensor([long, len(batches) - long])
        counts = all_reduce(counts, group=cpu_group())
        of_groups = counts[:, 0].view(mesh.data, mesh.forward_group_size)
        before, slots = int(of_groups[mesh.data_rank, : mesh.member].sum()), int(of_groups.sum(-1).max())
        turns: list[Tensor | None] = [None] * (slots + int(counts[:, 1].max()))
        turns[before : before + long] = batches[:long]
        turns[slots : slots + len(batches) - long] = batches[long:]
        return turns

    def batches(self, experience: Experience, rows: Tensor | None = None) -> list[Tensor]:
        """Indices (b,) of the rows of each forward pass of a model on machines of its own; ``rows`` (B,) bool: some."""
        return self._forward_batches(experience, rows, self.max_tokens, packed=True)[0]

    @staticmethod
    def _forward_batches(
        experience: Experience, rows: Tensor | None, limit: int, *, packed: bool
    ) -> tuple[list[Tensor], int]:
        """Divide the wanted rows into batches of at most ``limit`` tokens, as their indices.

        A longer sequence is a batch of its own; these come first. Also returns how many of them there are.
        """
        wanted = torch.arange(len(experience)) if rows is None else rows.nonzero()[:, 0]
        if not len(wanted):
            return [], 0
        lengths, prompts, groups = (
            column[wanted].tolist() for column in (experience.lengths, experience.prompt_lengths, experience.group)
        )
        number = min(math.ceil(sum(lengths) / limit), len(wanted))
        together = PackedCost(lengths, prompts, groups)
        bins = together.split(range(len(wanted)), number, ranks=1)
        forward = together if packed else PaddedCost(lengths)
        if any(forward.tokens(each) > limit for each in bins):
            bins = capped_batches(forward, range(len(wanted)), limit)
        return [wanted[chosen] for chosen in bins], sum(forward.tokens(each) > limit for each in bins)


def two_tokens() -> Experience:
    """One sequence of two tokens, of which the second was chosen: the least that a model can run."""
    nothing = torch.zeros(1, 1)
    return Experience(
        input_ids=torch.zeros(1, 2, dtype=torch.int64),
        attention_mask=torch.ones(1, 2, dtype=torch.bool),
        action_mask=nothing == 0,
        rollout_logprobs=nothing,
        versions=torch.zeros(1, 1, dtype=torch.int64),
        rewards=nothing[0],
        group=torch.zeros(1, dtype=torch.int64),
        sample_index=torch.zeros(1, dtype=torch.int64),
        truncated=torch.zeros(1, dtype=torch.bool),
        update=torch.zeros(1, dtype=torch.int64),
    )
