"""Outputs of a frozen model that are kept on disk: what identifies them, and that they teach the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from modules.data_runs import fit, folder_of
from rlhfkit import DistillationModule, DPOModule, KTOModule
from rlhfkit.data.batch import TokenExample
from rlhfkit.data.images import Image
from rlhfkit.modules import precompute
from rlhfkit.modules.parts.answer_reference import PrecomputedReference
from rlhfkit.modules.parts.precomputed_teacher import PrecomputedTeacher
from rlhfkit.modules.precompute import model_fingerprint, token_batches, tokens_fingerprint

folder = folder_of()
REVERSE = {"divergence": "reverse_kl", "top_k": 5}


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


def kept(kind: type, cache: Path, *, other: bool = False) -> dict[str, Any]:
    """Arguments of a module whose frozen model is asked before training; ``other``: about other numbers."""
    if kind is DistillationModule:
        return REVERSE | {"top_k": 5 - 2 * other, "parts": [PrecomputedTeacher(cache=str(cache)).plain()]}
    model = str(cache.parent / "reference") if (kind is KTOModule) != other else None
    return {"ref_model": None, "parts": [PrecomputedReference(model, cache=str(cache)).plain()]}


@pytest.mark.parametrize("kind", [DPOModule, KTOModule, DistillationModule])
def test_what_is_kept_on_disk_teaches_what_the_model_beside_does(folder: Path, kind: type) -> None:
    cache = folder / kind.__name__
    besides = {DPOModule: {"ref_model": None}, KTOModule: {}, DistillationModule: REVERSE}
    beside = fit(folder, kind, 2, knobs=besides[kind])
    computed = fit(folder, kind, 2, knobs=kept(kind, cache))
    (file,) = cache.iterdir()
    written = file.stat().st_mtime_ns
    read = fit(folder, kind, 2, knobs=kept(kind, cache))
    assert file.stat().st_mtime_ns == written
    assert read.losses == computed.losses
    # Sums of float32 over other groups of rows.
    assert computed.losses == pytest.approx(beside.losses, rel=2e-6)
    for name, tensor in computed.weights.items():
        torch.testing.assert_close(tensor, beside.weights[name], rtol=1e-5, atol=1e-6)
    fit(folder, kind, 2, knobs=kept(kind, cache, other=True), max_epochs=1)
    assert len(list(cache.iterdir())) == 2
