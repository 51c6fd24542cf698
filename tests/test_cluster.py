"""The scripts of docs/cluster.md, as far as one machine can run them: each trains, with sizes that fit.

A script that starts tasks with their variables stands in for Slurm's ``srun``; nodes are processes, or nodes of Ray.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from strategies.ranks import free_port
from test_docs_examples import blocks
from tiny_models import tiny_model
from transformers import AutoTokenizer

from rlhfkit.cli.main import run

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "cluster.md"
LIMIT = 240.0
"""Seconds for ranks to start and to train, on a busy machine."""
CHAT = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
TASKS = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do
  SLURM_PROCID=$node SLURM_NODEID=$node SLURM_LOCALID=0 "$@" &
  tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || failed=1; done
exit ${failed:-0}
"""
"""``srun`` of two nodes with a task each."""


def script(word: str) -> str:
    """The first shell block of the page in which a word is."""
    return next(block for block in blocks(PAGE, "bash") if word in block)


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A folder with a model that has a chat template, and rows of conversations and of additions."""
    tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "model")
    turns = [[{"role": "user", "content": f"{i}+1="}, {"role": "assistant", "content": str(i + 1)}] for i in range(64)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))
    rows = [{"question": f"{i}+1=", "answer": f"{i + 1}"} for i in range(16)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "bin").mkdir()
    return tmp_path


def small(word: str, *options: str) -> str:
    """A script of the page for two nodes of one core, with these options after those of ``rlhfkit fit``."""
    text = re.sub(r" \\\n *", " ", script(word))
    for name, value in {"num_nodes": 2, "devices": 1}.items():
        text = re.sub(rf"(--trainer\.{name}) \d+", rf"\1 {value}", text)
    return re.sub(r"(rlhfkit fit [^\n&]*[^\n& ])", lambda found: " ".join([found[1], *options]), text)


SFT = shlex.split("""
    --model.model model --model.lr 1e-3 --model.optimization.warmup_steps 0
    --data.data chats.jsonl --data.validation_data chats.jsonl --trainer.limit_val_batches 0
    --data.max_length 64 --data.micro_batch_size 4
    --trainer.max_epochs 1 --trainer.max_steps 4 --trainer.accelerator cpu --trainer.precision 32-true
""")


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Variables of a node: commands of this environment and the stand-ins in ``bin`` are found first."""
    found = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    python = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return found | {"PATH": path, "PYTHONPATH": python, "OMP_NUM_THREADS": "1"} | more


def train(text: str, folder: Path, **more: str) -> str:
    """Run scripts of a cluster's nodes, one for each ``{node}`` of the text, and return what the first has printed."""
    texts = [text.replace("{node}", str(node)) for node in range(2)] if "{node}" in text else [text]
    outputs = [folder / f"output_{node}.txt" for node in range(len(texts))]
    nodes = [
        subprocess.Popen(
            ["bash", "-c", one],
            cwd=folder,
            env=environment(folder, **more),
            stdout=output.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for one, output in zip(texts, outputs, strict=True)
    ]
    end = time.monotonic() + LIMIT
    try:
        for node, output in zip(nodes, outputs, strict=True):
            assert node.wait(max(end - time.monotonic(), 1)) == 0, output.read_text()[-6000:]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()
    return outputs[0].read_text()


def exported(folder: Path) -> Mapping[str, torch.Tensor]:
    """Weights that a run has exported."""
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


@pytest.mark.distributed
@pytest.mark.slow
def test_two_nodes_of_slurm_or_torchrun_train_what_one_process_trains(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world)
    run(["fit", "--config", "rlhfkit://sft", *SFT, "--trainer.accumulate_grad_batches", "2"])
    alone = exported(world / "runs/sft/model")
    shutil.rmtree(world / "runs")

    (world / "bin/srun").write_text(TASKS)
    (world / "bin/srun").chmod(0o755)
    slurm = {"JOB_ID": "4711", "JOB_NAME": "sft", "NTASKS": "2", "NTASKS_PER_NODE": "1", "NNODES": "2"}
    slurm |= {"NODELIST": "localhost", "STEP_NUM_TASKS": "2"}
    train(small("--ntasks-per-node=8", *SFT), world, **{f"SLURM_{name}": value for name, value in slurm.items()})
    by_slurm = exported(world / "runs/sft/model")
    shutil.rmtree(world / "runs")

    launch = small("torchrun", *SFT).replace("head:29500", f"127.0.0.1:{free_port()}")
    launch = re.sub(
        "--nnodes 4 --nproc-per-node 8", "--nnodes 2 --nproc-per-node 1 --local-addr 127.0.0.$((1 + {node}))", launch
    )
    train(launch, world)
    by_torchrun = exported(world / "runs/sft/model")

    start = exported(world / "model")
    assert start.keys() == alone.keys()
    assert not all(torch.equal(start[name], weight) for name, weight in alone.items())
    for name, weight in alone.items():
        torch.testing.assert_close(by_slurm[name], weight, atol=1e-5, rtol=0)
        assert torch.equal(by_torchrun[name], by_slurm[name])
