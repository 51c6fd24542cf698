"""The recipe tutorials at reduced size, on one mediocre model: each ends well above it, or does what is asked for."""

import importlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TUTORIALS = Path(__file__).parent.parent / "tutorials"
RECIPES = ("rejection_sampling", "iterative_dpo", "conditional_sft", "decision_transformer")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the tutorials run; and the tests after them as before."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TUTORIALS))
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def world(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and the model that all recipes start from."""
    folder = tmp_path_factory.mktemp("recipes")
    importlib.import_module("recipe_steps").start(None, ["--folder", str(folder)])
    return folder


def run(name: str, world: Path, folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[float]:
    """Run a tutorial; the percentages of the lines about held-out accuracy, in order."""
    shutil.copytree(world, folder, dirs_exist_ok=True)
    importlib.import_module(name).main(["--folder", str(folder), *words])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("held-out accuracy")]
    return [float(number) for line in lines for number in re.findall(r"([\d.]+)%", line)]


@pytest.mark.parametrize("name", ["rejection_sampling", "iterative_dpo"])
def test_one_round_improves_the_policy(
    name: str, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = run(name, world, tmp_path, capsys, "--rounds", "1", "--samples", "4")
    assert after >= before + 5


def test_the_reward_in_the_prompt_steers_the_model(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, before, good = run("conditional_sft", world, tmp_path, capsys, "--samples", "4")
    assert good >= before + 3  # eight samples, as the tutorial takes, give 13 points
    assert good >= bad + 15


def test_the_return_in_the_prompt_steers_the_model(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--samples", "3")  # eight samples, as the tutorial takes, end 11 points above the start
    two_wrong, one_wrong, before, none_wrong = run("decision_transformer", world, tmp_path, capsys, *words)
    assert before > 50
    assert none_wrong >= one_wrong + 10
    assert one_wrong >= two_wrong


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_short(name: str) -> None:
    assert len((TUTORIALS / f"{name}.py").read_text().splitlines()) < 80
