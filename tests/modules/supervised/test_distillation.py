"""DistillationModule against a loop written by hand, and itself with cached and sharded teachers.

Covers ``teachers.py`` and ``data/formats.py`` too.
"""

import math
from pathlib import Path

import pytest
import torch
from strategies import ranks
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor

from modules import distillation_cases as cases
from modules.data_runs import folder_of
from rlhfkit import DistillationModule
from rlhfkit.losses.distillation import JensenShannon
from rlhfkit.models import ModelLoading, load_causal_lm

folder = folder_of(cases.prepare)


def forward_kl(student: Tensor, teacher: Tensor, _: Tensor) -> Tensor:
    return (teacher.exp() * (teacher - student)).sum(-1)


def mixed(student: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
    """0.3 JSD of weight 0.2 at temperature 2, and 0.7 cross-entropy."""
    p, q = (student / 2).log_softmax(-1).exp(), (teacher / 2).log_softmax(-1).exp()
    m = 0.2 * q + 0.8 * p
    jsd = 0.2 * (q * (q / m).log()).sum(-1) + 0.8 * (p * (p / m).log()).sum(-1)
    return 0.3 * jsd - 0.7 * student.gather(-1, targets[:, None])[:, 0]


def bucketed(student: Tensor, teacher: Tensor, _: Tensor) -> Tensor:
    """Reverse KL over the teacher's five likeliest tokens and one category of all others."""
    q, ids = teacher.exp().topk(5, -1)
    p = student.exp().gather(-1, ids)
    p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
    return (p * (p / q).log()).sum(-1)


REVERSE = {"divergence": "reverse_kl", "top_k": 5}
LOSSES = {
    "forward_kl": ({}, forward_kl),
    "mixed": (
        {"divergence": JensenShannon(0.2), "temperature": 2.0, "distillation_coef": 0.3},
        mixed,
    ),
    "top_k": (REVERSE, bucketed),
}


@pytest.mark.parametrize("name", LOSSES)
def test_training_is_the_loop_by_hand(folder: Path, name: str) -> None:
    knobs, token_loss = LOSSES[name]
    losses, weights = cases.by_hand(folder, token_loss)
    run = cases.fit(folder, 2, knobs | {"loading": ModelLoading(attention="eager")}, precision="64-true")
    assert run.totals == pytest.approx(losses, rel=1e-12)
    for key, tensor in run.weights.items():
        torch.testing.assert_close(tensor, weights[key], rtol=1e-6, atol=1e-12)


def test_a_teacher_kept_on_disk_is_the_teacher_beside_the_student(folder: Path, tmp_path: Path) -> None:
    beside = cases.fit(folder, 2, REVERSE)
    cache = REVERSE | cases.computed(tmp_path)
    computed = cases.fit(folder, 2, cache)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    read = cases.fit(folder, 2, cache)
    assert file.stat().st_mtime_ns == written
    assert read.losses == computed.losses
    assert computed.losses == pytest.approx(beside.losses, rel=1e-5)
    for name, tensor in computed.weights.items():
        torch.testing.assert_close(tensor, beside.weights[name], rtol=1e-5, atol=1e-6)
    cases.fit(folder, 2, cache | {"top_k": 3})
    assert len(list(tmp_path.iterdir())) == 2  # another K is another file


@pytest.mark.distributed
def test_two_ranks_train_as_one_with_the_teacher_sharded_or_on_disk(folder: Path, tmp_path: Path) -> None:
    _, weights = cases.by_hand(folder, bucketed)
    ranks.run("modules.distillation_cases:on_ranks", 2, tmp_path, data=str(folder), knobs=REVERSE)
    for trained in torch.load(tmp_path / "weights.pt"):
        for name, tensor in trained.items():
            torch.testing.assert_close(tensor.double(), weights[name], rtol=1e-4, atol=5e-6)


def test_another_vocabulary_is_refused_and_a_padded_one_is_not(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    other = tiny_model(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(other)
    source = cases.data(folder, 8)
    with pytest.raises(ValueError, match=r"other tokens than the student .*\(100 and 99; 1 differ, e.g. \['<think>'\]"):
        cases.trainer(tmp_path).fit(DistillationModule(str(folder / "model"), str(other)), source)
    padded = load_causal_lm(str(folder / "teacher"))
    padded.resize_token_embeddings(160, mean_resizing=False)
    with torch.no_grad():
        padded.lm_head.weight[128:] = 0
        padded.lm_head.weight[128:, 0] = -100
    padded.save_pretrained(tmp_path / "padded")
    tiny_tokenizer().save_pretrained(tmp_path / "padded")
    losses = []
    for teacher in (folder / "teacher", tmp_path / "padded"):
        module = DistillationModule(str(folder / "model"), str(teacher))
        checked = cases.data(folder, 8, validation_data=str(folder / "data.jsonl"))
        losses.append(cases.trainer(tmp_path).validate(module, checked, verbose=False)[0]["val/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_divergence_of_ones_own(folder: Path) -> None:
    def squares(student: Tensor, teacher: Tensor) -> Tensor:
        return (student - teacher).square().sum(-1)

    module = DistillationModule(str(folder / "model"), str(folder / "teacher"), divergence=squares)
    logits = torch.randn(2, 3, 9)
    logprobs = logits.log_softmax(-1)
    found = module.compare(logits[0], (logits[1], None), torch.zeros(3, dtype=torch.int64), 3.0)
    assert float(found[0]) == pytest.approx(float((logprobs[0] - logprobs[1]).square().sum() / 3))
    assert math.isclose(float(found[1]), 0.0)
