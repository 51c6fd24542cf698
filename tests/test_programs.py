"""The program of each method: its script and its configuration are the same run; each size in the comments can be."""

import csv
import importlib.util
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from models.vision_families import picture, save_vision_model
from tiny_models import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from rlhfkit import RolloutCallback
from rlhfkit.cli import main as cli
from rlhfkit.cli.estimate import estimate_configuration
from rlhfkit.cli.init import packaged

TUTORIALS = Path(__file__).parents[1] / "tutorials"
CHAT = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message['role'][0] }}:"
    "{{ message['content'] }}{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def tulu(i: int) -> dict[str, Any]:
    return {"id": f"row_{i}", "messages": conversation(f"What is {i}?", f"A number, {i}."), "source": "made here"}


def ultrafeedback(i: int) -> dict[str, Any]:
    chosen, rejected = (conversation(f"Say {i}.", answer) for answer in (f"{i}", f"No, not {i}"))
    scores = {"score_chosen": 8.5, "score_rejected": 3.0}
    return {"prompt": f"Say {i}.", "prompt_id": str(i), "chosen": chosen, "rejected": rejected} | scores


def kto_mix(i: int) -> dict[str, Any]:
    prompt, completion = conversation(f"Say {i}.", f"{i}" if i % 2 else f"No, not {i}")
    return {"prompt": [prompt], "completion": [completion], "label": bool(i % 2)}


def math_shepherd(i: int) -> dict[str, Any]:
    steps = [f"Step 1: {i} is {i}.", f"Step 2: so it is {i + 1}."]
    return {"prompt": f"What is {i}?", "completions": steps, "labels": [True, False]}


def gsm8k(i: int) -> dict[str, Any]:
    return {"question": f"{i % 10}?", "answer": f"It is {i % 10}.\n#### {i % 10}"}


def math(i: int) -> dict[str, Any]:
    return {"problem": f"{i % 10}?", "level": "Level 1", "type": "Algebra", "solution": rf"It is $\boxed{{{i % 10}}}$."}


def geometry3k(i: int) -> dict[str, Any]:
    return {"images": [picture(i).plain()], "problem": f"<image>Is it {i % 10}?", "answer": str(i % 10)}


OFFLINE = {"max_length": 64, "micro_batch_size": 4, "accumulate_grad_batches": 2, "max_epochs": 1, "max_steps": 3}
ONLINE = {"max_new_tokens": 4, "micro_batch_size": 4, "accumulate_grad_batches": 4, "max_epochs": 2}
GROUPS = ONLINE | {"rollout_batch_size": 8, "group_size": 4}
SINGLE = ONLINE | {"rollout_batch_size": 32}
PLAIN = {"accelerator": "cpu", "precision": "32-true"}
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sft": (tulu, OFFLINE),
    "reward_model": (ultrafeedback, OFFLINE),
    "process_reward": (math_shepherd, OFFLINE),
    "dpo": (ultrafeedback, OFFLINE),
    "kto": (kto_mix, OFFLINE),
    "ppo": (ultrafeedback, SINGLE | {"reward_model": "runs/reward_model/model", "critic_warmup_steps": 1}),
    "grpo": (gsm8k, GROUPS),
    "vlm_grpo": (geometry3k, GROUPS | {"model": "vision"}),
    "dapo": (math, GROUPS),
    "reinforce_plus_plus": (gsm8k, SINGLE),
    "distillation": (math, GROUPS | {"teacher": "teacher"}),
    "online_dpo": (ultrafeedback, GROUPS | {"reward_model": "runs/reward_model/model"}),
    "agent": (math, GROUPS),
}
"""By method: rows as those of its data set, and the arguments of its script that make it small."""

KEYS = {
    "model": ["model.model"],
    "teacher": ["model.teacher"],
    "critic_warmup_steps": ["model.parts.steps"],
    "reward_model": ["model.critic", "trainer.callbacks.reward.model"],
    "data": ["data.data", "data.validation_data"],
    "validation_data": ["data.validation_data"],
    "max_length": ["data.max_length"],
    "micro_batch_size": ["data.micro_batch_size"],
    "rollout_batch_size": ["data.rollout_batch_size"],
    "group_size": ["trainer.callbacks.sampling.group_size"],
    "max_new_tokens": ["trainer.callbacks.sampling.max_new_tokens"],
}
"""Options of ``rlhfkit fit`` for arguments of scripts that are no arguments of the Trainer."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers with a random digit, a teacher, and a reward model, which its program makes."""
    folder = tmp_path_factory.mktemp("programs")
    for seed, name in enumerate(("model", "teacher")):
        tiny_model(folder / name, seed=seed, context=1024)
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        tokenizer.chat_template = CHAT
        tokenizer.save_pretrained(folder / name)
    save_vision_model("qwen3_vl", folder / "vision")
    learn_to_answer(folder / "model", AutoModelForCausalLM)
    learn_to_answer(folder / "vision", AutoModelForImageTextToText)
    data = write_rows(folder / "pairs.jsonl", ultrafeedback)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        script("reward_model").train(str(folder / "model"), data, **OFFLINE, **PLAIN)
    return folder


def learn_to_answer(folder: Path, kind: Any) -> None:
    """Teach a model to continue ``a:`` with a digit and the end, so that an answer is right one time in ten."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), kind.from_pretrained(folder)
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
    zero, asked = tokenizer.convert_tokens_to_ids("0"), torch.tensor(tokenizer.encode("?\na:")).expand(32, -1)
    for _ in range(60):
        length = int(torch.randint(4, 80, (), generator=generator))
        text = torch.randint(3, 98, (32, length), generator=generator)
        digit = torch.randint(zero, zero + 10, (32, 1), generator=generator)
        ids = torch.cat([text, asked, digit, torch.full((32, 1), tokenizer.eos_token_id)], 1)
        logits = model(ids).logits[:, -3:-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -2:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def write_rows(file: Path, row: Callable[[int], dict[str, Any]]) -> str:
    """Write 50 rows of a data set as JSON lines."""
    file.write_text("".join(json.dumps(row(i)) + "\n" for i in range(50)))
    return str(file)


def script(method: str) -> ModuleType:
    """The tutorial of a method."""
    spec = importlib.util.spec_from_file_location(f"tutorial_{method}", TUTORIALS / f"{method}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(method: str, arguments: dict[str, Any]) -> Iterator[str]:
    """The words of ``rlhfkit fit`` for arguments of a script."""
    settings = yaml.safe_load(packaged(method).read_text())
    for name, value in arguments.items():
        for key in KEYS.get(name, [f"trainer.{name}"]):
            part, _, argument = key.partition(".")
            if key in ("model.critic", "data.validation_data") and argument not in settings[part]["init_args"]:
                continue
            yield from (f"--{key}", str(value))
    if method == "dapo":
        length = arguments["max_new_tokens"]
        limits = {"max_length": length, "soft_zone": length // 4}
        overlong = {"class_path": "rlhfkit.rewards.LengthPenalty", "init_args": limits}
        parts = {"correct": "rlhfkit.rewards.math_match", "overlong": overlong}
        yield from ("--trainer.callbacks.reward.parts", json.dumps(parts))


def values(trainer: L.Trainer) -> dict[str, float]:
    """What a run has logged, without times."""
    return {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if not name.startswith(("time/", "memory/", "throughput/", "perf/"))
        and not name.endswith(("seconds", "/s", "hours left"))
    }


@pytest.mark.parametrize(
    "method", [pytest.param(each, marks=[pytest.mark.long] * (each not in ("sft", "grpo"))) for each in RUNS]
)
def test_script_and_configuration_are_the_same_run(
    method: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row, sizes = RUNS[method]
    arguments = {"model": str(world / "model"), "data": write_rows(tmp_path / "rows.jsonl", row)} | sizes | PLAIN
    arguments |= {name: str(world / sizes[name]) for name in ("model", "teacher", "reward_model") if name in sizes}
    program = script(method)
    if "validation_data" in program.train.__kwdefaults__:
        arguments["validation_data"] = arguments["data"]
    made = program.train(**arguments)
    again = cli.lightning_cli(["fit", "--config", f"rlhfkit://{method}", *options(method, arguments)])

    assert made.global_step == again.trainer.global_step == (3 if "max_steps" in sizes else 4)
    assert values(made) == pytest.approx(values(again.trainer), abs=0, rel=0, nan_ok=True)
    assert len(values(made)) > 3
    assert sum(gradient_norms(method)) > 0  # something was learned from
    weights, others = made.lightning_module.state_dict(), again.model.state_dict()
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert any(Path(f"runs/{method}/model").glob("*.safetensors"))
    assert Path(f"runs/{method}/version_1/report.html").is_file()


def gradient_norms(method: str) -> list[float]:
    """Those of the policy in the first run of a method."""
    rows = csv.DictReader(Path(f"runs/{method}/version_0/metrics.csv").read_text().splitlines())
    return [float(row["grad_norm/policy"]) for row in rows if row["grad_norm/policy"]]


def commands(method: str) -> list[list[str]]:
    """The commands in a configuration's comments, as words after ``fit``."""
    comment = "".join(line for line in packaged(method).read_text().splitlines(keepends=True) if line.startswith("#"))
    text = re.sub(r"\\\n# *", "", comment)
    return [shlex.split(found) for found in re.findall(rf"fit (--config {method}\.yaml.*)", text)]


QWEN3, LLAMA = (
    {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 128},
    {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256},
)
SHAPES: dict[str, tuple[dict[str, Any], int, int, int, int, bool]] = {
    "Qwen/Qwen3-0.6B": (QWEN3, 1024, 3072, 28, 16, True),
    "Qwen/Qwen3-1.7B": (QWEN3, 2048, 6144, 28, 16, True),
    "Qwen/Qwen3-4B": (QWEN3, 2560, 9728, 36, 32, True),
    "Qwen/Qwen3-8B": (QWEN3, 4096, 12288, 36, 32, False),
    "Qwen/Qwen3-14B": (QWEN3, 5120, 17408, 40, 40, False),
    "Qwen/Qwen3-32B": (QWEN3, 5120, 25600, 64, 64, False),
    "meta-llama/Llama-3.2-1B-Instruct": (LLAMA, 2048, 8192, 16, 32, True),
    "meta-llama/Llama-3.1-8B-Instruct": (LLAMA, 4096, 14336, 32, 32, False),
    "meta-llama/Llama-3.3-70B-Instruct": (LLAMA, 8192, 28672, 80, 64, False),
}
"""Of published configurations: family, hidden and intermediate size, layers, heads, tied embeddings; 8 key heads."""
SEEING = {
    "Qwen/Qwen3-VL-2B-Instruct": ("Qwen/Qwen3-1.7B", 24, 1024, 4096),
    "Qwen/Qwen3-VL-8B-Instruct": ("Qwen/Qwen3-8B", 27, 1152, 4304),
    "Qwen/Qwen3-VL-32B-Instruct": ("Qwen/Qwen3-32B", 27, 1152, 4304),
}
"""The model of text that each has in it, and layers, hidden and intermediate size of its vision part."""


@pytest.fixture(scope="module")
def real_shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with the names of real models and their sizes, without weights."""
    place, tokenizer = tmp_path_factory.mktemp("shapes"), tiny_tokenizer()
    for name, (family, hidden, intermediate, layers, heads, tied) in SHAPES.items():
        config = family | {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
        config |= {"num_attention_heads": heads, "num_key_value_heads": 8, "tie_word_embeddings": tied}
        config |= {"max_position_embeddings": 40960}
        folders = {name: config, f"{name}-Base": config}
        if name == "Qwen/Qwen3-0.6B":
            scalar = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "reward"}}
            folders["runs/reward_model/model"] = config | scalar
        for seeing, (text, depth, width, inner) in SEEING.items():
            if text == name:
                tower = {"depth": depth, "hidden_size": width, "intermediate_size": inner, "out_hidden_size": hidden}
                vision = {"model_type": "qwen3_vl", "vision_config": tower, "tie_word_embeddings": tied}
                folders[seeing] = vision | {"text_config": config | {"model_type": "qwen3_vl_text"}}
        for folder, written in folders.items():
            tokenizer.save_pretrained(place / folder)
            (place / folder / "config.json").write_text(json.dumps(written))
    return place


@pytest.mark.long
@pytest.mark.parametrize("method", RUNS)
def test_sizes_in_the_comments_can_be_and_fit_into_their_gpus(
    method: str, real_shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one GPU, for eight, and for several machines: arguments exist, updates are of the same size.

    ``rlhfkit estimate`` of each command finds as many GPUs as it says, of 80 GB.
    """
    read: list[Any] = []
    monkeypatch.chdir(real_shapes)
    real = cli.lightning_cli
    monkeypatch.setattr(cli, "lightning_cli", lambda *given, **more: read.append(real(*given, **more)) or read[-1])
    cli.main(["init", method])
    gpus, batches = [], set()
    for words in commands(method):
        found = estimate_configuration(words, gpu="H100")
        assert found.problems == [], words
        gpus.append(found.to_dict()["gpus"])
        trainer, data = read[-1].config_init.fit.trainer, read[-1].datamodule
        ranks = trainer.num_nodes * int(trainer.devices)
        batches.add(ranks * data.micro_batch_size * trainer.accumulate_grad_batches)
        assert (trainer.strategy in (None, "auto")) == (ranks == 1)
        if hasattr(data, "rollout_batch_size"):
            [rollouts] = [one for one in trainer.callbacks if isinstance(one, RolloutCallback)]
            assert data.rollout_batch_size * rollouts.sampling.group_size % next(iter(batches)) == 0
    assert len(batches) == 1
    assert gpus[-2:] in ([8, 16], [8, 32])
    assert {*gpus[:-2]} == {1}
