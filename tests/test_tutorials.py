"""The recipe tutorials at reduced size, on one mediocre model: each ends well above it, or does what is asked for."""

import importlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parent.parent / "tutorials"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the tutorials run; and the tests after them as before."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TUTORIALS))
        patch.syspath_prepend(str(TUTORIALS / "research"))
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


@pytest.mark.long
@pytest.mark.parametrize("name", ["rejection_sampling", "iterative_dpo"])
def test_one_round_improves_the_policy(
    name: str, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = run(name, world, tmp_path, capsys, "--rounds", "1", "--samples", "2")
    assert after >= before + 5


@pytest.mark.long
def test_the_reward_in_the_prompt_steers_the_model(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, before, good = run("conditional_sft", world, tmp_path, capsys, "--samples", "4")
    assert good >= before + 3  # eight samples, as the tutorial takes, give 13 points
    assert good >= bad + 15


@pytest.mark.long
def test_the_return_in_the_prompt_steers_the_model(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--samples", "3")  # eight samples, as the tutorial takes, end 11 points above the start
    two_wrong, one_wrong, before, none_wrong = run("decision_transformer", world, tmp_path, capsys, *words)
    assert before > 50
    assert none_wrong >= one_wrong + 10
    assert one_wrong >= two_wrong


@pytest.mark.long
def test_online_dpo_improves_the_policy_and_draws_curves(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(world, tmp_path / "0")
    importlib.import_module("online_dpo_arithmetic").main(["--folder", str(tmp_path), "--iterations", "10"])
    [(before, after)] = re.findall(r"before: ([\d.]+)%, after: ([\d.]+)%", capsys.readouterr().out)
    assert float(after) > float(before) + 3
    sampled, heldout = json.loads((tmp_path / "0.json").read_text())
    assert len(sampled) == 10
    assert [iteration for iteration, _ in heldout] == [0, 10]
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def printed(cell: nbformat.NotebookNode) -> str:
    """What a cell of a notebook has printed."""
    return "".join(output["text"] for output in cell.get("outputs", []) if output["output_type"] == "stream")


NUMBERS = re.compile(r"(random|SFT|PPO) +right: +([\d.]+)% +as preferred: +([\d.]+)%")


def stages(notebook: nbformat.NotebookNode) -> dict[str, tuple[float, float]]:
    """Percentages of held-out answers that are right and as preferred, of each stage."""
    text = "".join(map(printed, notebook.cells))
    return {name: (float(right), float(preferred)) for name, right, preferred in NUMBERS.findall(text)}


@pytest.mark.slow
def test_the_notebook_goes_from_demonstrations_to_ppo_in_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook itself, with another cell of parameters: every stage improves its held-out metric."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TUTORIALS.parent), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(TUTORIALS / "sft_reward_ppo.ipynb", as_version=4)
    [parameters] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    parameters.source = "sft_epochs, reward_epochs, ppo_iterations = 12, 2, 13"
    NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(TUTORIALS)}}).execute()
    found = stages(notebook)
    assert found["SFT"][0] > found["random"][0] + 5
    assert found["PPO"][1] > found["SFT"][1] + 3
    [told_apart] = re.findall(r"told apart: ([\d.]+)% before, ([\d.]+)% after", "".join(map(printed, notebook.cells)))
    assert float(told_apart[1]) > float(told_apart[0]) + 10
