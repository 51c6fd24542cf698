"""The scripts of docs/cluster.md, as far as one machine can run them: each trains, with sizes that fit.

A script that starts tasks with their variables stands in for Slurm's ``srun``; nodes are processes, or nodes of Ray.
"""

import csv
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from rl_runs import grpo_settings
from safetensors.torch import load_file
from strategies.ranks import free_port
from test_docs_examples import blocks
from tiny_models import chat_tokenizer, tiny_model

from rlhfkit.cli.main import lightning_cli

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "cluster.md"
LIMIT = 900.0
"""Seconds for ranks to start and to train, on a busy machine."""
WAIT = 'for task in "${tasks[@]}"; do wait "$task" || failed=1; done; exit ${failed:-0}'
TASKS = f"""#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do
  SLURM_PROCID=$node SLURM_NODEID=$node SLURM_LOCALID=0 "$@" &
  tasks+=($!)
done
{WAIT}
"""
"""``srun`` of two nodes with a task each."""
OTHER_NODE = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@" --num-cpus=2 --include-log-monitor=false --resources='{"other": 1}'
"""
"""``srun`` of a command of Ray on one more node."""


def script(word: str) -> str:
    """The first shell block of the page in which a word is."""
    return next(block for block in blocks(PAGE, "bash") if word in block)


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A folder with a model that has a chat template, and rows of conversations and of additions."""
    tiny_model(tmp_path / "model")
    chat_tokenizer().save_pretrained(tmp_path / "model")
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


def train(text: str, folder: Path, **more: str) -> None:
    """Run a script; what it has started ends with it if it takes too long."""
    output = folder / "output.txt"  # a pipe would be open as long as Ray's daemons are
    command = ["timeout", "--kill-after=10", str(LIMIT), "bash", "-c", text]
    with output.open("w") as file:
        done = subprocess.run(
            command, cwd=folder, env=environment(folder, **more), stdout=file, stderr=subprocess.STDOUT, check=False
        )
    assert done.returncode == 0, output.read_text()[-6000:]


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
    lightning_cli(["fit", "--config", "rlhfkit://sft", *SFT, "--trainer.accumulate_grad_batches", "2"])
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
        "--nnodes 4 --nproc-per-node 8", "--nnodes 2 --nproc-per-node 1 --local-addr 127.0.0.$((1 + node))", launch
    )
    train(f"for node in 0 1; do ( {launch} ) & tasks+=($!); done; {WAIT}", world)
    by_torchrun = exported(world / "runs/sft/model")

    start = exported(world / "model")
    assert start.keys() == alone.keys()
    assert not all(torch.equal(start[name], weight) for name, weight in alone.items())
    for name, weight in alone.items():
        torch.testing.assert_close(by_slurm[name], weight, atol=1e-5, rtol=0)
        assert torch.equal(by_torchrun[name], by_slurm[name])


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """A short path for Ray's sockets; what is started with it ends with the test."""
    import psutil

    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
        for process in psutil.process_iter():
            try:
                if process.environ().get("RAY_TMPDIR") == folder:
                    process.kill()
            except psutil.Error:
                continue


@pytest.fixture
def ray_variables(world: Path, ray_folder: Path) -> dict[str, str]:
    """Those of a cluster; ``run.yaml`` has a rank on each of its two nodes, and the reference on the second one."""
    pool = {"model": "model", "resources": {"other": 1}}
    settings = next(yaml.safe_load(block) for block in blocks(PAGE, "yaml") if "launcher: ray" in block)
    trainer, rollouts = settings["trainer"], settings["trainer"]["callbacks"][-1]
    assert trainer["strategy"]["init_args"] == {"stage": 3, "launcher": "ray"}
    rollouts["init_args"] |= {"engine": None, "sampling": {"group_size": 2, "max_new_tokens": 4}}
    reference = {"pool": {"class_path": "rlhfkit.ModelPool", "init_args": pool}}
    run = grpo_settings("model", "questions.jsonl")
    parts = [{"class_path": "rlhfkit.modules.parts.Reference", "init_args": reference}]
    run["model"]["init_args"] |= {"kl_coef": 0.1, "parts": parts}
    run["data"]["init_args"] |= {"prompt": "question", "answer": "answer"}
    run["data"]["init_args"] |= {"rollout_batch_size": 8, "micro_batch_size": 4}
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "runs", "name": "grpo"}}
    trainer |= {"devices": 1, "accelerator": "cpu", "max_epochs": 2, "logger": logger, "log_every_n_steps": 1}
    settings |= {"model": run["model"], "data": run["data"]}
    (world / "run.yaml").write_text(yaml.safe_dump(settings))
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    fewer = {"RAY_prestart_worker_first_driver": "0"}  # see conftest.py
    return token | fewer | {"RAY_TMPDIR": str(ray_folder), "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1"}


def logged(world: Path, version: int) -> list[dict[str, str]]:
    """What a run has logged, row by row."""
    return [*csv.DictReader((world / f"runs/grpo/version_{version}/metrics.csv").read_text().splitlines())]


@pytest.mark.ray
@pytest.mark.slow
def test_a_job_of_slurm_trains_on_two_nodes_of_ray_and_goes_on_when_it_is_started_again(
    world: Path, ray_variables: dict[str, str]
) -> None:
    """The driver is in the batch script."""
    (world / "bin/srun").write_text(OTHER_NODE)
    (world / "bin/srun").chmod(0o755)
    job = {"JOB_ID": "4711", "JOB_NAME": "grpo", "NTASKS": "2", "NTASKS_PER_NODE": "1", "NODEID": "0", "NNODES": "2"}
    more = ray_variables | {f"SLURM_{name}": value for name, value in job.items()}

    def submit(*options: str) -> None:
        text = script("ray start --head --port").replace("6379", str(free_port()))
        text = text.replace(
            "ray start --head", "ray start --head --num-cpus=2 --include-dashboard=false --include-log-monitor=false"
        )
        text = text.replace("--ckpt_path last", " ".join(["--ckpt_path last", *options]))
        train(text, world, **more)

    submit()
    rows = logged(world, 0)
    assert {row["policy/ref_kl"] for row in rows if row["policy/ref_kl"]}
    assert max(int(row["step"]) for row in rows) == 3  # 2 iterations of 8 * 2 samples, in updates of 2 ranks * 4
    assert (world / "runs/grpo/checkpoints/last.ckpt").exists()

    submit("--trainer.max_epochs", "3")
    assert {int(row["step"]) for row in logged(world, 1)} == {4, 5}  # the third iteration only


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(find_spec("aiohttp_cors") is None, reason="jobs need ray[default]")
def test_a_job_that_is_submitted_to_ray_trains_in_the_common_folder(world: Path, ray_variables: dict[str, str]) -> None:
    head, dashboard = free_port(), free_port()
    text = script("ray start --head                ") + script("ray job submit")
    text = text.replace(
        "ray start --head ", f"ray start --head --port={head} --num-cpus=2 --dashboard-port={dashboard} "
    )
    other = "--num-cpus=2 --resources='{\"other\": 1}'"
    text = text.replace("--address=head:6379", f"--address=127.0.0.1:{head} {other}")
    text = text.replace("http://head:8265", f"http://127.0.0.1:{dashboard}").replace("/shared/run", str(world))
    lines = [line for line in text.splitlines() if not line.startswith("RAY_ADDRESS=")]
    (submit,) = (line for line in lines if line.startswith("ray job submit"))
    early = "No available agent"  # Ray's, while those of its nodes start
    lines[lines.index(submit)] = (
        f"until {submit} > submitted.txt 2>&1; do grep -q '{early}' submitted.txt || exit 1; sleep 2; done"
    )
    train("\n".join(lines), world, **ray_variables)
    printed = (world / "submitted.txt").read_text()
    assert "succeeded" in printed
    assert {row["policy/ref_kl"] for row in logged(world, 0) if row["policy/ref_kl"]}
    assert (world / "runs/grpo/checkpoints/last.ckpt").exists()
