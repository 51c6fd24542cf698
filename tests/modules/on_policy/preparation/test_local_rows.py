"""Rows of an iteration scattered over three ranks are prepared as they are in one process.

Covers local_rows.py and iteration.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from strategies import ranks
from torch import Tensor

from rlhfkit import GRPOModule, local_rows
from rlhfkit.models.heads import load_scalar_model, reward_output

from . import local_rows_cases as cases

GATHERING = {"function of the iteration", "partial function of tokens", "overridden", "ppo, overridden"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    cases.write(folder)
    return folder


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, Any]:
    return cases.in_one_process(place)


@pytest.fixture(scope="module")
def three(place: Path) -> list[dict[str, Any]]:
    return ranks.run("modules.on_policy.preparation.local_rows_cases:on_ranks", 3, place / "ranks", place=str(place))


def in_order(shares: list[dict[str, Any]], field: str) -> Tensor | None:
    """What three ranks have computed, in the order of the iteration; 0 behind the end of shorter shares."""
    if shares[0][field] is None:
        assert all(share[field] is None for share in shares)
        return None
    columns = [torch.tensor(share[field], dtype=torch.float64) for share in shares]
    width = () if columns[0].dim() == 1 else (max(column.shape[1] for column in columns),)
    everyone = torch.zeros(cases.SEQUENCES, *width, dtype=torch.float64)
    for share, column in zip(shares, columns, strict=True):
        everyone[torch.tensor(share["rows"]), ...] = torch.nn.functional.pad(
            column, (0, 0 if not width else width[0] - column.shape[1])
        )
    return everyone


@pytest.mark.distributed
@pytest.mark.parametrize("name", cases.CASES)
def test_every_estimator_gives_what_it_gives_in_one_process(
    name: str, alone: dict[str, Any], three: list[dict[str, Any]]
) -> None:
    expected, got = alone[name], [rank["cases"][name] for rank in three]
    for number, whole in enumerate(expected["iterations"]):
        shares = [rank["iterations"][number] for rank in got]
        mask = torch.tensor(whole["action_mask"])
        assert torch.equal(in_order(shares, "action_mask") != 0, mask)
        for field in cases.FIELDS:
            wanted, found = whole[field], in_order(shares, field)
            assert (found is None) == (wanted is None), field
            if found is None:
                continue
            wanted = torch.tensor(wanted, dtype=torch.float64)
            selected = slice(None) if wanted.dim() == 1 else mask
            torch.testing.assert_close(found[selected], wanted[selected], rtol=1e-6, atol=1e-6, equal_nan=True)
    assert any(torch.tensor(whole["advantages"]).abs().sum() > 1 for whole in expected["iterations"])
    assert len({rank["kl_coef"] for rank in got}) == 1  # or weights would differ between ranks
    assert got[0]["kl_coef"] == pytest.approx(expected["kl_coef"], rel=1e-6)
    assert all(rank["return moments"] == got[0]["return moments"] for rank in got)
    assert got[0]["return moments"] == pytest.approx(expected["return moments"], rel=1e-6)
    for rank in got:
        for found, wanted in zip(rank["states"], expected["states"], strict=True):  # moments of rewards bit for bit
            if "coef" in wanted or wanted == {"moments": expected["return moments"]}:
                continue  # checked above
            assert found == wanted


@pytest.mark.distributed
def test_all_ranks_run_equally_many_forward_passes(three: list[dict[str, Any]]) -> None:
    for name in cases.CASES:
        passes = [rank["cases"][name]["passes"] for rank in three]
        assert passes[0] == passes[1] == passes[2]
        assert passes[0]["policy"] + sum(passes[0].values()) > 0 or name in ("function of the iteration",)


@pytest.mark.distributed
def test_only_functions_without_the_mark_are_given_the_whole_iteration(three: list[dict[str, Any]]) -> None:
    warned = {name for name, messages in three[0]["warnings"].items() if messages}
    assert warned == GATHERING
    (message,) = three[0]["warnings"]["function of the iteration"]  # once, of two iterations
    assert message.startswith("several_rewards is given the whole iteration, so that each of 3 ranks holds 24 seq")
    assert not any(messages for rank in three[1:] for messages in rank["warnings"].values())


@pytest.mark.distributed
def test_gathered_rows_are_the_iteration_with_missing_numbers_missing(three: list[dict[str, Any]]) -> None:
    for rank in three:
        found = rank["gathers"]
        assert all(found["equal"].values())
        assert found["parts"] == {"a": True, "b": True}
        assert found["whole"]
        assert found["token rewards of rank 1"] == 0.0
        assert found["missing parts"]
        assert found["bool"]
        assert found["matrix"]


@pytest.mark.distributed
def test_a_reward_model_scores_own_rows_although_a_rank_has_none(place: Path, three: list[dict[str, Any]]) -> None:
    whole = cases.iteration(0)
    expected = reward_output(load_scalar_model(str(place / "reward"), new_head=False).double(), whole, normalized=True)
    for number, rank in enumerate(three):
        rows = [] if number == 1 else cases.share(whole, 0, number).own_rows.tolist()
        assert rank["scores"] == pytest.approx(expected[rows].tolist(), abs=1e-5)


def test_rows_in_another_order_are_gathered_to_the_order_of_the_iteration() -> None:
    whole = cases.iteration(0)
    own = cases.share(whole, 0, 0)
    rows = torch.randperm(cases.SEQUENCES, generator=torch.Generator().manual_seed(1))
    own = cases.dataclasses.replace(whole.select(rows), rows=rows, iteration=whole.summarize())
    module = GRPOModule("anywhere", advantage_scale="batch")
    assert torch.equal(module.ranks.gather_rows(own, own.sample_index), whole.sample_index)
    assert torch.equal(module.advantages(own), module.advantages(whole)[rows])
    with pytest.raises(ValueError, match="one value for each of 24 own rows, got 5"):
        module.ranks.gather_rows(own, own.group[:5])


def test_advantages_of_other_rows_are_refused() -> None:
    module = GRPOModule("anywhere", advantages=local_rows(lambda experience: torch.zeros(7)))
    with pytest.raises(ValueError, match=r"7 sequences and was given 24; .* indexed with experience.own_rows"):
        module.credit[0].prepare(cases.iteration(0))
