"""Covers ``mesh.py``."""

from typing import Any

import mesh_ranks
import pytest
import torch
from shared_pool import SharedPool
from strategies import ranks
from tiny_models import tiny_model

from rlhfkit.mesh import Mesh
from rlhfkit.models import load_causal_lm


def test_every_rank_is_in_one_group_of_each_kind_at_its_place() -> None:
    for rank in range(12):
        mesh = Mesh(rank, 12, sequence=3, tensor=2)
        assert (mesh.data_rank, mesh.sequence_rank, mesh.tensor_rank) == (rank // 6, rank % 6 // 2, rank % 2)
        assert mesh.forward_groups()[mesh.data_rank][mesh.member] == rank
        assert [ranks.index(rank) for ranks in mesh.sequence_groups() if rank in ranks] == [mesh.sequence_rank]
        assert [ranks.index(rank) for ranks in mesh.tensor_groups() if rank in ranks] == [mesh.tensor_rank]
    assert Mesh(0, 12, sequence=3, tensor=2).tensor_groups()[:2] == [[0, 1], [2, 3]]
    assert Mesh(0, 12, sequence=3, tensor=2).sequence_groups()[:2] == [[0, 2, 4], [1, 3, 5]]


def test_ranks_that_cannot_be_divided_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"3 \* tensor_parallel_size 2 = 6 ranks .* does not divide the 8 rank"):
        Mesh(0, 8, sequence=3, tensor=2)
    with pytest.raises(ValueError, match="sequence_parallel_size"):
        Mesh(0, 8, sequence=0)


@pytest.fixture(scope="module")
def runs(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each run on one rank, and on each of 4 ranks that share forward passes, with final weights; the ranks' folder."""
    folder = tmp_path_factory.mktemp("mesh")
    found: dict[str, Any] = {"folder": folder}
    model = str(tiny_model(folder / "model", key_heads=2))  # two tensor ranks have one key head each
    reports = ranks.run("mesh_ranks:everything", 4, folder, model=model)
    pool, alone = SharedPool(kv_cache_gib=0.1, max_model_len=64), {}
    for run, epochs in dict.fromkeys(mesh[:2] for mesh in mesh_ranks.MESHES.values()):
        keep = mesh_ranks.Keep()
        report = mesh_ranks.fit(folder / "alone", model, pool, run, "auto", keep, epochs)
        alone[run, epochs] = report | {"weights": keep.weights, "trained_in_all": sum(keep.trained)}
    pool.really_close()
    for name, (run, epochs, _, _) in mesh_ranks.MESHES.items():
        found[name] = (alone[run, epochs], [report[name] for report in reports], torch.load(folder / f"{name}.pt"))
    return found


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.distributed
@pytest.mark.parametrize("run", mesh_ranks.MESHES)
def test_four_ranks_that_share_forward_passes_train_as_one(runs: dict[str, Any], run: str) -> None:
    """Also where the second of three epochs is resumed without groups, and the third with them again."""
    alone, shared, weights = runs[run]
    for each in shared:
        assert each["steps"] == alone["steps"]
        assert each["tokens"] == alone["tokens"]
        assert len(each["sizes"]) == len(shared[0]["sizes"])
        for name, value in alone["metrics"].items():
            assert each["metrics"][name] == pytest.approx(value, rel=1e-4, abs=2e-6), name
    ends = [weights]
    if run in mesh_ranks.RESUMED_ELSEWHERE:
        ends.append(torch.load(runs["folder"] / f"{run}, elsewhere.pt"))
    for end in ends:
        assert end.keys() == alone["weights"].keys()
        for name, tensor in end.items():
            torch.testing.assert_close(tensor, alone["weights"][name], rtol=1e-5, atol=1e-5, msg=name)
    if run != "sft":  # the reference has moved, and is not the policy
        head = "reference.model.embed_tokens.weight"
        start = load_causal_lm(str(runs["folder"] / "model")).get_input_embeddings().weight
        assert float((weights[head] - start).abs().max()) > 1e-4
        assert float((weights[head] - weights[head.replace("reference", "policy")]).abs().max()) > 1e-4


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.distributed
def test_rows_longer_than_what_a_rank_may_compute_are_divided(runs: dict[str, Any]) -> None:
    for run in ("sft", "grpo"):
        shared = runs[run][1]
        of_groups = [
            [sum(parts) for parts in zip(*(each["sizes"] for each in shared[first : first + 2]), strict=True)]
            for first in (0, 2)
        ]
        fillers = 2  # tokens, where one of the two ranks has no rows
        assert max(map(max, of_groups)) <= 2 * mesh_ranks.CAP + fillers
        assert max(max(each["sizes"]) for each in shared) > mesh_ranks.CAP
        assert sum(sum(each["trained"]) for each in shared) == runs[run][0]["trained_in_all"]
    # Log-probs of rows above a rank's share: each rank of two has a turn for every one.
    for first, second in (grpo[:2] for grpo in (runs["grpo"][1], runs["grpo"][1][2:])):
        assert all(not (one and other) for one, other in zip(first["turns"], second["turns"], strict=True))
        assert max(first["turns"] + second["turns"]) > mesh_ranks.CAP
