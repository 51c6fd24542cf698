"""DistillationModule against itself with cached and sharded teachers, and teachers that do not fit.

Covers ``teachers.py`` and ``data/formats.py`` too.
"""

import math
from pathlib import Path

import pytest
import torch
from rl_runs import RANKS
from strategies import ranks
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor

from modules.data_runs import data, fit, folder_of, trainer
from rlhfkit import DistillationModule
from rlhfkit.models import load_causal_lm
from rlhfkit.modules.parts.precomputed_teacher import PrecomputedTeacher

folder = folder_of()


REVERSE = {"divergence": "reverse_kl", "top_k": 5}


def on_ranks(folder: Path, data: str, cache: str) -> None:
    """What one rank runs: ZeRO 3, where the teacher is an inference engine; then with the teacher's tokens on disk."""
    weights = []
    for strategy, parts in (("rlhf_zero3", []), ("rlhf_zero2", [PrecomputedTeacher(cache=cache).plain()])):
        knobs = REVERSE | {"parts": parts}
        weights.append(fit(Path(data), DistillationModule, 2, ranks=RANKS, knobs=knobs, strategy=strategy).weights)
    if all(weights):
        torch.save(weights, folder / "weights.pt")


@pytest.mark.distributed
def test_two_ranks_train_as_one_with_the_teacher_sharded_or_on_disk(folder: Path, tmp_path: Path) -> None:
    alone = fit(folder, DistillationModule, knobs=REVERSE, precision="64-true")
    cache = str(tmp_path / "cache")
    ranks.run("modules.supervised.test_distillation:on_ranks", 2, tmp_path, data=str(folder), cache=cache)
    for trained in torch.load(tmp_path / "weights.pt"):
        for name, tensor in trained.items():
            torch.testing.assert_close(tensor.double(), alone.weights[name], rtol=1e-4, atol=5e-6)


def test_another_vocabulary_is_refused_and_a_padded_one_is_not(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    other = tiny_model(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ValueError, match=r"other tokens than the student .*\(100 and 99; 1 differ, e.g. \['<think>'\]"):
        trainer(tmp_path).fit(DistillationModule(str(folder / "model"), str(other)), data(folder, DistillationModule))
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
        checked = data(folder, DistillationModule, validated=True)
        losses.append(trainer(tmp_path).validate(module, checked, verbose=False)[0]["val/loss"])
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
