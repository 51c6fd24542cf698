"""Single-file checkpoints are complete or not there; empty, foreign, truncated and changed ones are errors.

Covers checkpoints/files.py too.
"""

import itertools
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy

from checkpoints.toy_runs import SaveEverywhere, fit, survives
from rlhfkit.checkpoints import CheckpointError, VerifiedCheckpointIO
from rlhfkit.checkpoints.files import install_verified_io, remove_abandoned


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run."""
    folder = tmp_path_factory.mktemp("run")
    saver = SaveEverywhere(folder / "saved")
    fit(folder, callbacks=[saver], max_epochs=1)
    return saver.folder / f"{list(saver.saved)[5]}.ckpt"


def resumed(path: Path) -> str:
    """What resuming says."""
    with pytest.raises(CheckpointError) as caught:
        fit(path.parent, resume=path, max_epochs=1)
    return str(caught.value)


def test_what_is_no_checkpoint_is_named_before_anything_is_loaded(tmp_path: Path, checkpoint: Path) -> None:
    whole = checkpoint.read_bytes()
    (tmp_path / "good.ckpt").write_bytes(whole)
    (tmp_path / "empty.ckpt").write_bytes(b"")
    (tmp_path / "truncated.ckpt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.ckpt").write_text("step=3")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "weights.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    (tmp_path / "folder.ckpt").mkdir()
    expected = {
        "empty.ckpt": "is empty: whatever wrote it was interrupted",
        "truncated.ckpt": "or its end is missing",
        "text.ckpt": r"(6 bytes) is no file of torch.save",
        "weights.ckpt": "is no checkpoint of a Trainer: it has no 'state_dict', it holds ['weight']",
        "list.ckpt": "it holds list",
        "folder.ckpt": "is a folder and no checkpoint; this strategy reads single files",
        "typo.ckpt": "does not exist. In",
    }
    for name, words in expected.items():
        said = resumed(tmp_path / name)
        assert words in said, name
        assert "inline_container" not in said, name
    assert "good.ckpt" in resumed(tmp_path / "typo.ckpt")
    assert "neither does its folder" in resumed(tmp_path / "nowhere" / "a.ckpt")


def test_a_flipped_bit_in_a_tensor_is_found(tmp_path: Path, checkpoint: Path) -> None:
    loaded = torch.load(checkpoint)
    weights = loaded["state_dict"]["weights"].numpy().tobytes()
    content = bytearray(checkpoint.read_bytes())
    content[content.index(weights) + 3] ^= 1
    (tmp_path / "changed.ckpt").write_bytes(content)
    changed = torch.load(tmp_path / "changed.ckpt")["state_dict"]["weights"]
    assert not torch.equal(changed, loaded["state_dict"]["weights"]), "torch itself does not notice"
    assert "is damaged (Bad CRC-32" in resumed(tmp_path / "changed.ckpt")


def test_a_full_disk_is_named_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    plugin, path = VerifiedCheckpointIO(), tmp_path / "last.ckpt"
    plugin.save_checkpoint({"state_dict": {"weight": torch.ones(10)}}, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"last.ckpt could not be written: File too large; .* MiB are free"):
            plugin.save_checkpoint({"state_dict": {"weight": torch.ones(1_000_000)}}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert torch.equal(plugin.load_checkpoint(path)["state_dict"]["weight"], torch.ones(10))


def test_a_kill_while_saving_leaves_a_whole_file_and_the_next_start_cleans_up(tmp_path: Path) -> None:
    plugin, path, left = VerifiedCheckpointIO(), tmp_path / "last.ckpt", []

    def save(number: float) -> None:
        plugin.save_checkpoint({"state_dict": {"weight": torch.full((300_000,), number)}}, path)

    moments: list[dict[str, Any]] = [{"file_bytes": size} for size in (0, 1, 500, 600_000, 1_200_000)]
    for moment in itertools.chain(moments, ({"operations": number} for number in itertools.count())):
        save(0.0)
        ended = survives(lambda: save(1.0), **moment)
        left.append(len(os.listdir(tmp_path)) - 1)
        weight = plugin.load_checkpoint(path)["state_dict"]["weight"]
        assert (weight == weight[0]).all()
        assert weight[0] == 1 or not ended
        remove_abandoned(tmp_path)
        assert os.listdir(tmp_path) == ["last.ckpt"]
        if ended:
            break
    assert left[: len(moments)] == [1] * len(moments)
    assert left[-1] == 0


def test_plugins_of_the_user_stay() -> None:
    ours = SingleDeviceStrategy(device=torch.device("cpu"))
    install_verified_io(ours)
    assert type(ours.checkpoint_io) is VerifiedCheckpointIO
    theirs = SingleDeviceStrategy(device=torch.device("cpu"), checkpoint_io=AsyncCheckpointIO(TorchCheckpointIO()))
    install_verified_io(theirs)
    assert isinstance(theirs.checkpoint_io, AsyncCheckpointIO)
