"""Forward passes of several ranks equal those of each rank alone; so does a head that they divide by vocabulary.

Covers joined_rows.py, ulysses.py, vocabulary.py and router_loss.py.
"""

import copy
import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from strategies import ranks
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config, Qwen3MoeConfig
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

from rlhfkit.losses import linear_logprobs
from rlhfkit.mesh import FORWARD_GROUP, ForwardGroup, Mesh
from rlhfkit.models import LoRA, ScalarModel, policy_output, scalar_output
from rlhfkit.models.attention.families import use_packed_attention
from rlhfkit.models.distillation import compare_logits, teacher_logits
from rlhfkit.models.forward import JoinedForward, UnpaddedBatch
from rlhfkit.models.heads import add_value_head, classifier_class, scalar_forward
from rlhfkit.models.lora import add_lora
from rlhfkit.models.parallel.joined_rows import OwnRow
from rlhfkit.models.parallel.vocabulary import GroupVocabulary, vocabulary_parts
from rlhfkit.models.router_loss import _has_usual_formula

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": 61, "max_position_embeddings": 64}
LENGTHS = ([13, 7, 20, 5], [2, 11], [1], [9, 17, 3])
"""Tokens of each row of a rank's batch; ranks beyond these begin again."""


class Batch:
    """Rows of random tokens; the second shares a prefix with the first."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.input_ids = torch.randint(0, 61, (len(lengths), max(lengths)), generator=generator)
        self.attention_mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
        if len(lengths) > 1:
            self.input_ids[1, :2] = self.input_ids[0, :2]
        self.mask = self.attention_mask[:, 1:] & (torch.rand(self.input_ids[:, 1:].shape, generator=generator) < 0.8)
        self.weights = torch.randn(self.input_ids.shape, generator=generator, dtype=torch.float64)


def language_model(kind: type = Qwen3Config, **changes: Any) -> nn.Module:
    """A tiny model in float64 whose family the class of its configuration tells."""
    torch.manual_seed(0)
    config = kind(**SIZES | {"num_key_value_heads": 2, "head_dim": 8} | changes)
    return prepared(AutoModelForCausalLM.from_config(config))


def prepared(model: nn.Module) -> nn.Module:
    """With packed attention, in float64, all weights different from their initial values."""
    use_packed_attention(model)
    model = cast(Any, model).double()
    model.set_experts_implementation("eager")  # the only one for float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, dtype=parameter.dtype)
    return model.train()


def policy_loss(model: nn.Module, batch: Batch, **asked: Any) -> tuple[Tensor, list[Tensor]]:
    """A loss of log-probs, entropy and, if asked for, values, with the columns themselves."""
    out = policy_output(model, batch, batch.mask, temperature=0.7, entropy=True, **asked)
    columns = [column for column in (out.logprobs, out.entropy, out.values) if column is not None]
    weights = batch.weights[:, 1:]
    return sum(
        ((number + 1) * (column * weights + column**2).sum() for number, column in enumerate(columns)), 0
    ), columns


def router_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """The load-balancing loss of a language model, of one beside a comparison, or of a scalar model."""
    if isinstance(model, ScalarModel):
        balance = scalar_forward(model, batch, router_aux_loss=True).router_aux_loss
    else:
        balance = policy_output(model, batch, batch.mask, router_aux_loss=True).router_aux_loss
    assert balance is not None
    return (1 + batch.weights[0, 0]) * balance, [balance]


def compared_router_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """The load-balancing loss of a student."""
    rows = teacher_logits(model, batch, batch.mask)
    values, balance = compare_logits(
        model, batch, batch.mask, lambda logits, *_: logits.sum(), rows, chunk_size=4, router_aux_loss=True
    )
    assert balance is not None
    return (1 + batch.weights[0, 0]) * balance + values, [values, balance]


def scalar_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """A loss of a scalar model's numbers at all tokens."""
    values = scalar_output(model, batch)
    return (values * batch.weights + values**2).sum(), [values]


def distillation_loss(model: nn.Module, batch: Batch, *, by_token: bool) -> tuple[Tensor, list[Tensor]]:
    """Squared distance to a teacher's logits, and to what the batch itself knows of its tokens."""
    count, generator = int(batch.mask.sum()), torch.Generator().manual_seed(5)
    known = torch.randn(count, 3, generator=generator, dtype=torch.float64), torch.arange(3).expand(count, 3).clone()
    teacher = teacher_logits(model, batch, batch.mask)

    def compare(logits: Tensor, teacher: tuple[Tensor, Tensor | None], tokens: Tensor, denominator: float) -> Tensor:
        values, ids = teacher
        apart = (logits - 1.3 * values) if ids is None else (logits.gather(1, ids) - values)
        found = torch.stack([apart.square().sum(-1), apart.sum(-1) * tokens], -1) / denominator
        return found if by_token else found.sum(0)

    asked: dict[str, Any] = {"chunk_size": 4, "by_token": by_token, "denominator": 1.0 + count}
    found = [compare_logits(model, batch, batch.mask, compare, rows, **asked)[0] for rows in (teacher, known)]
    return sum(values.square().sum() for values in found), found


def with_value_head() -> nn.Module:
    model = language_model()
    add_value_head(model, std=0.3)
    model.value_head.double()
    return model


def with_lora() -> nn.Module:
    model = language_model()
    add_lora(model, LoRA(rank=3), base="tiny")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return model.double()


def with_checkpointing() -> nn.Module:
    model = language_model(num_key_value_heads=1, tie_word_embeddings=True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


MIXTURE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def mixture() -> nn.Module:
    return language_model(Qwen3MoeConfig, **MIXTURE)


def scalar_model(kind: type = Qwen3Config, **more: Any) -> nn.Module:
    config = kind(**SIZES, num_key_value_heads=2, head_dim=8, num_labels=1, **more)
    torch.manual_seed(0)
    return ScalarModel(prepared(classifier_class(config, stepwise=False).from_config(config)))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Tensor, list[Tensor]]]]] = {
    "policy": (language_model, policy_loss),
    "window": (lambda: language_model(MistralConfig, sliding_window=6), policy_loss),
    "one key head, tied, checkpointing": (with_checkpointing, policy_loss),
    "all key heads": (lambda: language_model(LlamaConfig, num_key_value_heads=4), policy_loss),
    "values": (with_value_head, lambda model, batch: policy_loss(model, batch, values=True)),
    "lora": (with_lora, policy_loss),
    "scalar": (scalar_model, scalar_loss),
    "router": (mixture, router_loss),
    "router of a scalar model": (partial(scalar_model, Qwen3MoeConfig, **MIXTURE), router_loss),
    "router of a student": (mixture, compared_router_loss),
    "distillation": (language_model, partial(distillation_loss, by_token=False)),
    "distillation by token": (language_model, partial(distillation_loss, by_token=True)),
}


def three_heads() -> nn.Module:
    """Three heads with one key head, which no even number of ranks can divide; windows; recomputed layers."""
    model = language_model(MistralConfig, num_attention_heads=3, num_key_value_heads=1, sliding_window=6)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model


def two_heads() -> nn.Module:
    """Fewer heads than four ranks, recomputed in the backward pass."""
    model = language_model(num_attention_heads=2, num_key_value_heads=1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


RING_CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Tensor, list[Tensor]]]]] = {
    "four heads": (language_model, policy_loss),
    "two heads, checkpointing": (two_heads, policy_loss),
    "three heads, window, reentrant checkpointing": (three_heads, policy_loss),
    "scalar": (scalar_model, scalar_loss),
}


def attach(model: nn.Module, group: ForwardGroup) -> None:
    """Let a group compute a model's forward passes."""
    setattr(model.model if isinstance(model, ScalarModel) else model, FORWARD_GROUP, group)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def compare(
    group: ForwardGroup, cases: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Tensor, list[Tensor]]]]]
) -> None:
    """Losses, outputs and gradients of each case are those of each rank alone."""
    rank = dist.get_rank()
    batch = Batch(LENGTHS[rank % len(LENGTHS)], seed=rank)
    for name, (build, loss_of) in cases.items():
        alone = build()
        together = copy.deepcopy(alone)
        attach(together, group)
        results = []
        for model in (alone, together):
            loss, columns = loss_of(model, batch)
            loss.backward()
            mean = gradients(model)
            for gradient in mean.values():
                dist.all_reduce(gradient)
            results.append((loss.detach(), [column.detach() for column in columns], mean))
        (loss, columns, mean), (joint_loss, joint_columns, joint_mean) = results
        assert mean.keys() == joint_mean.keys(), name
        largest = max(1.0, *(float(gradient.abs().max()) for gradient in mean.values()))
        apart = [(loss - joint_loss).abs() / loss.abs().clamp(min=1e-9)]
        apart += [(a - b).abs().max() for a, b in zip(columns, joint_columns, strict=True) if a.numel()]
        apart += [(mean[key] - joint_mean[key]).abs().max() / largest for key in mean]
        # Transformers sums the routers' probabilities in float32.
        tolerance = 2e-6 if name.startswith("router") else 1e-12
        assert all(one < tolerance for one in apart), f"{name}: {max(map(float, apart))} apart"  # NaN is not


def everything(**_: Any) -> None:
    """All cases on a group of two ranks."""
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    compare(ForwardGroup.create(Mesh(dist.get_rank(), 2, sequence=2), "ulysses"), CASES)


@pytest.mark.smoke
@pytest.mark.distributed
def test_two_ranks_equal_each_alone(tmp_path: Path) -> None:
    ranks.run(everything, ranks=2, folder=tmp_path)


def test_a_family_whose_router_loss_has_another_formula_is_noticed() -> None:
    def squared(logits: tuple[Tensor, ...], experts: int, chosen: int, mask: Any) -> Tensor:
        return modeling_mixtral.load_balancing_loss_func(logits, experts, chosen, mask).square()

    for module in (modeling_mixtral, modeling_qwen3_moe, modeling_gpt_oss):
        assert _has_usual_formula(module.load_balancing_loss_func)
    assert not _has_usual_formula(squared)


@pytest.mark.distributed
def test_log_probs_entropy_and_all_gradients_of_a_divided_head_are_those_of_one_rank(tmp_path: Path) -> None:
    ranks.run(divided_head, ranks=3, folder=tmp_path)


HEADS: dict[str, dict[str, Any]] = {
    "log-probs": {},
    "entropy": {"entropy": True},
    "small tiles": {"entropy": True, "chunk": 3},
    "all": {"entropy": True, "temperature": 0.7, "bias": True, "logit_scale": 0.5, "logit_softcap": 3.0},
}


def outputs(vocabulary: int, tokens: int, bias: bool = False, **options: Any) -> list[torch.Tensor]:
    """Results and gradients of the head, in float64."""
    generator = torch.Generator().manual_seed(vocabulary)
    hidden, weight, shift, outer = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((tokens, 5), (vocabulary, 5), (vocabulary,), (2, tokens))
    )
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    inputs = [one.requires_grad_() for one in ([hidden, weight, shift] if bias else [hidden, weight])]
    logprobs, entropy = linear_logprobs(hidden, weight, targets, bias=shift if bias else None, **options)
    found = [one for one in (logprobs, entropy) if one is not None]
    loss = sum(((one * factor).sum() for one, factor in zip(found, outer, strict=False)), torch.zeros(()))
    return [*(one.detach() for one in found), *torch.autograd.grad(loss, inputs)]


def divided_head(**_: Any) -> None:
    """For vocabularies that the ranks divide evenly, unevenly, and not at all."""
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    division = GroupVocabulary(dist.group.WORLD)
    for (name, options), vocabulary, tokens in itertools.product(HEADS.items(), (12, 13, 2), (9, 0)):
        want = outputs(vocabulary, tokens, **options)
        got = outputs(vocabulary, tokens, division=division, **options)
        place = f"{name}, {vocabulary} entries, {tokens} tokens: {{}}".format
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12, msg=place)


@pytest.mark.parametrize(("vocabulary", "sizes"), [(12, [4, 4, 4]), (13, [5, 4, 4]), (2, [1, 1, 0])])
def test_parts_cover_the_vocabulary_and_differ_by_one_entry_at_most(vocabulary: int, sizes: list[int]) -> None:
    parts = vocabulary_parts(vocabulary, 3)
    assert [part.stop - part.start for part in parts] == sizes
    assert [index for part in parts for index in range(part.start, part.stop)] == list(range(vocabulary))


def test_images_of_one_member_are_an_error_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would wait for its tokens."""
    brought: list[OwnRow] = []
    monkeypatch.setattr(ForwardGroup, "gather", lambda _, own: brought.append(own) or brought)
    forward = JoinedForward(ForwardGroup(Mesh(0, 2, sequence=2), None, None, None), "model")
    for images in (((), ("a picture",)), None):
        with pytest.raises(ValueError, match=r"1 sequences of a batch have images, .* or its attention .*sequence_par"):
            forward.inputs(UnpaddedBatch(torch.ones(2, 3, dtype=torch.int64), images))
    assert len(brought) == 2
