"""What identifies cached outputs of a model, and when they are computed again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from rlhfkit.data.batch import TokenExample
from rlhfkit.data.images import Image
from rlhfkit.modules import precompute
from rlhfkit.modules.precompute import load_or_compute, model_fingerprint, token_batches, tokens_fingerprint


def test_every_token_mask_and_image_is_part_of_the_fingerprint() -> None:
    examples = [
        [TokenExample([1, 2, 3], [False, True, True])],
        [TokenExample([1, 2, 4], [False, True, True])],
        [TokenExample([1, 2, 3], [False, False, True])],
        [TokenExample([1, 2], [False, True]), TokenExample([3], [True])],
        [TokenExample([1, 2, 3], [False, True, True], (Image(b"a"),))],
        [TokenExample([1, 2, 3], [False, True, True], (Image(b"b"),))],
    ]
    assert len({tokens_fingerprint(several) for several in examples}) == len(examples)
    assert tokens_fingerprint(examples[0]) == tokens_fingerprint(list(examples[0]))


def test_a_model_is_known_by_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompute, "_SAMPLE", 1000)  # of each end of a file, which is longer
    one, other = (tiny_model(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    before = model_fingerprint(str(one))
    assert before == model_fingerprint(str(one)) != model_fingerprint(str(other))
    weights = one / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert model_fingerprint(str(one)) != before


def test_batches_hold_every_example_once_and_fit() -> None:
    lengths = [5, 1, 9, 3, 12, 4]
    batches = token_batches(lengths, 10)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[index] for index in batch) <= 10 for batch in batches)


def test_what_is_on_disk_is_not_computed_again(tmp_path: Path) -> None:
    trainer: Any = SimpleNamespace(is_global_zero=True, strategy=SimpleNamespace(broadcast=lambda value: value))
    calls = []

    def compute() -> torch.Tensor:
        calls.append(1)
        return torch.arange(3.0)

    for key in ("a", "a", "b"):
        found = load_or_compute(lambda key=key: [key], tmp_path / "cache", trainer, compute, "numbers")  # type: ignore[misc]
        assert torch.equal(found, torch.arange(3.0))
    assert len(calls) == len(list((tmp_path / "cache").glob("*.pt"))) == 2
