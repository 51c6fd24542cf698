"""Numbers of short seeded runs, to see that a change of structure changes no result; one JSON line.

    python benchmarks/recorded_numbers.py --output before.json                        # half a minute
    python benchmarks/recorded_numbers.py --output after.json --compare before.json   # prints what differs
    python benchmarks/recorded_numbers.py --only ppo kto --compare before.json
    python benchmarks/recorded_numbers.py --ranks 2 --output before-2.json
    python benchmarks/recorded_numbers.py --ranks 2 --compare before-2.json --tolerance 1e-5

Each configuration trains a tiny model for three iterations (or epochs) of two updates of two micro-batches. Kept of
each are the SHA-256 of its trained weights, the norm of each parameter, and every value that was logged, but for times,
speed and memory, as hexadecimal floats, which are exact. On one rank of one machine a recording is equal to the last
bit; over several ranks sums may round otherwise, for which ``--tolerance`` is a relative one, and hashes are not
compared.

A configuration is of use only while it sees what it is named after: ``--alike`` prints those with the same weights.
"""

import argparse
import functools
import hashlib
import json
import logging
import math
import os
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import lightning as L
import torch
import torch.multiprocessing

from benchmarks.trace import make_model

ITERATIONS = 3
UNSTABLE = ("time/", "memory/", "rollout/tokens_per_second")
"""Prefixes of logged values that depend on the machine."""
MOVING = {"class_path": "rlhfkit.modules.parts.moving_reference.MovingReference", "init_args": {"steps": 2}}
AHEAD = {"class_path": "rlhfkit.Ahead", "init_args": {"max_staleness": 1}}
NEFTUNE = {"class_path": "rlhfkit.modules.parts.fine_tuning.NEFTune", "init_args": {"alpha": 5.0}}
Recording = dict[str, dict[str, Any]]


# ---------------------------------------------------------------------- models and data


def make_models(folder: Path) -> None:
    """A model that answers with a few digits, a teacher, a reward model, and a mixture of experts."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        MixtralConfig,
        MixtralForCausalLM,
    )

    policy = make_model(folder / "policy")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    for name, seed, steps in (("policy", 0, 60), ("teacher", 1, 120)):
        model = AutoModelForCausalLM.from_pretrained(policy)
        learn_digits(model, tokenizer, steps=steps, seed=seed)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    torch.manual_seed(2)
    scores = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    torch.nn.init.normal_(scores.score.weight, std=1.0)
    scores.save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "reward")
    config = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        sliding_window=None, bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder / "mixture")
    tokenizer.save_pretrained(folder / "mixture")


def learn_digits(model: Any, tokenizer: Any, *, steps: int, seed: int) -> None:
    """Train a model to write one to seven digits after any prompt, and then the end."""
    generator = torch.Generator().manual_seed(seed)
    zero = tokenizer.convert_tokens_to_ids("0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        prompts = torch.randint(2, len(tokenizer), (32, 4), generator=generator)
        digits = torch.randint(zero, zero + 10, (32, 8), generator=generator)
        ends = torch.randint(1, 8, (32, 1), generator=generator)
        digits = digits.where(torch.arange(8) < ends, tokenizer.eos_token_id)
        ids = torch.cat([prompts, digits], 1)
        logits = model(ids).logits[:, 3:-1].flatten(0, 1)
        targets = digits.where(torch.arange(8) <= ends, -100).flatten()
        torch.nn.functional.cross_entropy(logits, targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def make_data(folder: Path) -> None:
    """Prompts, demonstrations, pairs, and answers that are judged or rated by steps; all of uneven lengths."""
    rows: dict[str, list[dict[str, Any]]] = {
        "prompts": [{"prompt": f"{number}+{number}="} for number in range(24)],
        "pairs": [
            {"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": "x" * (n % 5 + 1), "margin": n % 3 / 2}
            for n in range(24)
        ],
        "judged": [
            {"prompt": f"{n}+{n}=", "completion": str(2 * n) if n % 3 else "no", "label": bool(n % 3)}
            for n in range(24)
        ],
        "stepwise": [
            {"prompt": f"{n}?", "completions": ["a" * (n % 4 + 1), str(n), "so"][: n % 3 + 1],
             "labels": [1.0, 0.0, 0.3][: n % 3 + 1]}
            for n in range(24)
        ],
    }  # fmt: skip
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def reward(samples: Sequence[Any]) -> list[float]:
    """Share of even digits among six characters."""
    return [sum(character in "02468" for character in sample.text) / 6 for sample in samples]


def missing_reward(samples: Sequence[Any]) -> list[float | None]:
    """``reward``, but missing for answers that begin with a 7."""
    return [
        None if sample.text.startswith("7") else value for sample, value in zip(samples, reward(samples), strict=True)
    ]


def token_reward(samples: Sequence[Any]) -> list[float]:
    """``reward``, of which every even digit earns its part."""
    for sample in samples:
        parts = [1 / 6 if chr(int(token) + 30) in "02468" else 0.0 for token in sample.token_ids.tolist()]
        sample.token_rewards = parts
    return reward(samples)


# ---------------------------------------------------------------------- one run


class Record(L.Callback):
    """Keeps what was logged in each epoch."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, str]] = []

    def _keep(self, trainer: L.Trainer) -> None:
        logged = {name: float(value).hex() for name, value in trainer.callback_metrics.items() if stable(name)}
        if logged:
            self.metrics.append(dict(sorted(logged.items())))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep those of the epoch before, to which callbacks have added theirs."""
        self._keep(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep those of the last epoch."""
        self._keep(trainer)


def stable(name: str) -> bool:
    """Whether a logged value does not depend on the machine."""
    return not name.startswith(UNSTABLE) and "second" not in name


def fit(module: Any, data: Any, folder: Path, callbacks: Sequence[L.Callback] = (), **arguments: Any) -> dict[str, Any]:
    """Train and return the numbers."""
    record = Record()
    ranks = int(os.environ.get("RANKS", "1"))
    trainer = L.Trainer(**{
        "accelerator": "cpu", "devices": ranks, "strategy": "ddp" if ranks > 1 else "auto", "max_epochs": ITERATIONS,
        "accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder,
        "callbacks": [*callbacks, record],
    } | arguments)  # fmt: skip
    trainer.fit(module, datamodule=data)
    weights, norms = hashlib.sha256(), {}
    for name, value in sorted(module.state_dict().items()):
        weights.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
        norms[name] = float(value.double().norm()).hex()
    return {"weights": weights.hexdigest(), "norms": norms, "metrics": record.metrics}


def reinforce(
    folder: Path,
    kind: str,
    *,
    model: str = "policy",
    rollout: Mapping[str, Any] | None = None,
    rows: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    **module: Any,
) -> dict[str, Any]:
    """A module of rlhfkit, by name, that learns from its own samples: 8 prompts with 4 answers each."""
    import rlhfkit

    given = {"reward": reward, "sampling": rlhfkit.SamplingSpec(group_size=4, max_new_tokens=6)}
    ranks = int(os.environ.get("RANKS", "1"))
    size = {"rollout_batch_size": 8, "micro_batch_size": 8 // ranks}
    data = rlhfkit.PromptDataModule(str(folder / "prompts.jsonl"), prompt="prompt", **size | dict(rows or {}))
    made = getattr(rlhfkit, kind)(str(folder / model), **{"lr": 1e-3} | module)
    rollout = dict(rollout or {})
    parts = [*rollout.pop("parts", ()), {"class_path": "rlhfkit.callbacks.Alarms", "init_args": {"alarms": []}}]
    callback = rlhfkit.RolloutCallback(**given | rollout, parts=parts)
    return fit(made, data, folder, [callback], **dict(trainer or {}))


def supervise(folder: Path, kind: str, source: str, rows: Mapping[str, Any], **module: Any) -> dict[str, Any]:
    """A module of rlhfkit, by name, that learns from a data set: 16 rows of it an epoch."""
    import rlhfkit

    ranks = int(os.environ.get("RANKS", "1"))
    data = getattr(rlhfkit, source)(micro_batch_size=4 // ranks, max_length=48, **rows)
    made = getattr(rlhfkit, kind)(str(folder / "policy"), **{"lr": 1e-3} | module)
    return fit(made, data, folder, limit_train_batches=4)


# ---------------------------------------------------------------------- the configurations


def configurations(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """All runs by name."""
    import rlhfkit

    path = {name: str(folder / f"{name}.jsonl") for name in ("prompts", "pairs", "judged", "stepwise")}

    def grpo(**given: Any) -> Callable[[], dict[str, Any]]:
        return functools.partial(reinforce, folder, "GRPOModule", **given)

    def ppo(**given: Any) -> Callable[[], dict[str, Any]]:
        return functools.partial(reinforce, folder, "PPOModule", **given)

    def distillation(**given: Any) -> Callable[[], dict[str, Any]]:
        teacher = str(folder / "teacher")
        return functools.partial(reinforce, folder, "OnPolicyDistillationModule", teacher=teacher, **given)

    def offline(kind: str, source: str, rows: Mapping[str, Any], **given: Any) -> Callable[[], dict[str, Any]]:
        return functools.partial(supervise, folder, kind, source, rows, **given)

    def part(name: str, **arguments: Any) -> dict[str, Any]:
        return {"class_path": f"rlhfkit.modules.parts.{name}", "init_args": arguments}

    def control(target: float | None, limit: float | None = None) -> list[dict[str, Any]]:
        found = [] if target is None else [part("kl_control.KLTarget", target=target, horizon=100)]
        return found if limit is None else [*found, part("kl_control.StopEarly", limit=limit)]

    reward = str(folder / "reward")
    texts = {"data": path["pairs"], "prompt": "prompt", "completion": "chosen"}
    pairs, judged = {"data": path["pairs"]}, {"data": path["judged"]}
    epochs = {"rows": {"epochs_per_iteration": 2}, "trainer": {"accumulate_grad_batches": 4}}

    def with_text(make: Callable[..., Callable[[], dict[str, Any]]]) -> dict[str, Any]:
        data = rlhfkit.SFTDataModule(**texts, micro_batch_size=4 // int(os.environ.get("RANKS", "1")), max_length=48)
        result: dict[str, Any] = make(
            parts=[part("pretraining_loss.PretrainingLoss", coef=0.3)], rows={"pretraining_data": data}
        )()
        return result

    return {
        # The thirteen of the prototype of parts.
        "plain": grpo(),
        "tutorial": grpo(kl_coef=0.05, optimization={"warmup_steps": 3}),
        "rloo": grpo(preset="rloo"),
        "reinforce": grpo(preset="reinforce++"),
        "reward_processing": grpo(
            advantage_scale="none",
            parts=[
                part("rewards.MaskTruncated"),
                part("rewards.MissingEndPenalty", penalty=0.5),
                part("rewards.NormalizeRewards"),
                part("rewards.ClipRewards", limit=1.0),
            ],
        ),
        "epochs": grpo(**epochs),
        "control": grpo(
            kl_coef=0.05,
            parts=[
                *control(0.001, 0.0004),
                part("entropy.EntropyTarget", target=2.5, step=0.01),
                part("token_filters.TopEntropy", fraction=0.5),
            ],
        ),
        "remax": grpo(preset="remax"),
        "moving_reference": grpo(kl_coef=0.1, parts=[MOVING]),
        "stale": grpo(parts=[part("old_policy.LogLinear")], rollout={"parts": [AHEAD]}),
        "dynamic_sampling": grpo(
            parts=[part("correction.Correction")], rollout={"parts": [{"class_path": "rlhfkit.DynamicSampling"}]}
        ),
        "optimal_token_baseline": grpo(advantages="rlhfkit.modules.on_policy.presets.optimal_token_baseline"),
        "ppo": ppo(),
        # Every other option of the modules' own files.
        "grpo_paper": grpo(preset="grpo", parts=[part("kl_penalty.KLPenalty", coef=0.04, clamp=0.5)]),
        "kl_weighted": grpo(
            parts=[part("kl_penalty.KLPenalty", coef=0.1, importance_weight=True, estimator="k1")]
        ),
        "kl_sequence": grpo(parts=[part("kl_penalty.KLInReward", coef=0.1)], advantage_scale="none"),
        "kl_target_in_reward": grpo(
            parts=[
                part("kl_penalty.KLInReward", coef=0.1, place="token"),
                part("advantages.TokenCredit", gamma=0.9),
                *control(0.001),
            ]
        ),
        "early_stop_epochs": grpo(parts=control(None, 0.0005), **epochs),
        "entropy_bonus": grpo(parts=[part("entropy.EntropyBonus", coef=0.05)]),
        "entropy_both": grpo(
            parts=[part("entropy.EntropyBonus", coef=0.05), part("entropy.EntropyTarget", target=2.5, step=0.02)]
        ),
        "off_policy": grpo(parts=[part("token_filters.OffPolicyMask", threshold=0.0)], rollout={"parts": [AHEAD]}),
        "rejection": grpo(
            parts=[part("token_filters.Rejection", level="sequence-mean", divergence="k3", high=3e-3)],
            rollout={"parts": [AHEAD]},
        ),
        "sequence_correction": grpo(
            parts=[part("correction.Correction", kind={"level": "sequence", "high": 1.01})], rollout={"parts": [AHEAD]}
        ),
        "stale_recomputed": grpo(rollout={"parts": [AHEAD]}),
        "decoupled": grpo(preset="decoupled_ppo", rollout={"parts": [AHEAD]}),
        "stop_properly": grpo(parts=[part("rewards.StopProperly", coef=0.2)], advantage_scale="none"),
        "mask_truncated": grpo(
            parts=[part("rewards.MaskTruncated"), part("token_filters.TopEntropy", fraction=0.3)]
        ),
        "token_rewards": grpo(
            parts=[part("advantages.TokenCredit", earned=True)],
            advantage_scale="none",
            rollout={"reward": token_reward},
        ),
        "missing_rewards": grpo(rollout={"reward": missing_reward}),
        "dr_grpo": grpo(preset="dr_grpo", policy_loss_arguments={"max_length": 6}),
        "gspo": grpo(preset="gspo"),
        "reward_model": grpo(parts=[part("reward_model.RewardModel", models=reward)], rollout={"reward": None}),
        "reward_models": grpo(
            parts=[
                part("reward_model.RewardModel", models=dict.fromkeys(("one", "two"), reward), weights={"two": -0.5})
            ]
        ),
        "pretraining_text": lambda: with_text(grpo),
        "mixture": grpo(model="mixture", parts=[part("routers.RouterLoss", coef=0.05)], **epochs),
        "router_replay": grpo(model="mixture", parts=[part("routers.RouterReplay")], **epochs),
        "lora": grpo(lora=rlhfkit.LoRA(rank=4), kl_coef=0.05),
        "ppo_normalized": ppo(
            parts=[
                part("critic.Critic", normalize=True, bootstrap_truncated=True),
                part("critic.GAE", lam={"class_path": "length_adaptive_lambda", "init_args": {"alpha": 0.5}}),
                part("critic.Returns", lam=1.0),
                part("critic.CriticWarmup", steps=1),
            ],
            rollout={"reward": token_reward},
        ),
        "ppo_shared": ppo(
            parts=[part("critic.Critic", shared=True), part("critic.ValueLoss", coef=0.1)], whiten_advantages=False
        ),
        "ppo_control": ppo(
            parts=[
                part("rewards.MaskTruncated"), part("entropy.EntropyBonus", coef=0.01), *control(0.001, 0.001)
            ],
        ),
        "ppo_text": lambda: with_text(ppo),
        "ppo_function": ppo(advantages="rlhfkit.modules.on_policy.presets.no_baseline", kl_coef=0.0),
        "distillation": distillation(),
        "distillation_reward": distillation(
            reward_coef=0.5, parts=[part("teacher.TeacherAdvantages", gamma=0.9)], kl_coef=0.05
        ),
        "distillation_jsd": distillation(divergence="jsd"),
        "online_dpo": functools.partial(
            reinforce, folder, "OnlineDPOModule", parts=[part("pairs.Pairs", truncated=False)]
        ),
        "online_dpo_moving": functools.partial(reinforce, folder, "OnlineDPOModule", parts=[MOVING]),
        # Modules that learn from data.
        "sft": offline("SFTModule", "SFTDataModule", texts),
        "sft_neftune": offline("SFTModule", "SFTDataModule", texts, parts=[NEFTUNE]),
        "dpo": offline("DPOModule", "PreferenceDataModule", pairs),
        "dpo_moving": offline("DPOModule", "PreferenceDataModule", pairs, parts=[MOVING]),
        "dpo_precomputed": offline("DPOModule", "PreferenceDataModule", pairs, precompute_ref_log_probs=True),
        "simpo": offline("SimPOModule", "PreferenceDataModule", pairs),
        "kto": offline("KTOModule", "UnpairedPreferenceDataModule", judged),
        "reward": offline("RewardModule", "PreferenceDataModule", pairs, center_rewards_coefficient=0.05),
        "process_reward": offline("ProcessRewardModule", "StepwiseDataModule", {"data": path["stepwise"]}),
        "teacher_data": offline("DistillationModule", "SFTDataModule", texts, teacher=str(folder / "teacher")),
    }  # fmt: skip


# ---------------------------------------------------------------------- recording and comparing


def record(folder: Path, only: Sequence[str]) -> Recording:
    """Run the configurations in this process, which may be one of several ranks."""
    from transformers.utils.logging import disable_progress_bar

    warnings.filterwarnings("ignore")
    disable_progress_bar()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found: Recording = {}
    runs = configurations(folder)
    unknown = set(only) - set(runs)
    if unknown:
        raise SystemExit(f"no configurations {', '.join(sorted(unknown))}; there are {', '.join(runs)}")
    for name in only or runs:
        start = time.perf_counter()
        os.environ["WORLD_SIZE"] = os.environ.get("RANKS", "1")  # Lightning removes it at the end of a fit
        L.seed_everything(0, verbose=False)
        found[name] = runs[name]()
        if not int(os.environ.get("LOCAL_RANK", "0")):
            print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return found


def record_rank(rank: int, ranks: int, port: int, folder: Path, only: Sequence[str]) -> None:
    """Run the configurations as one of several ranks; the first writes what it found."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANKS": str(ranks), "NODE_RANK": "0"}
    os.environ |= {"LOCAL_RANK": str(rank)}
    found = record(folder, only)
    if not rank:
        (folder / "found.json").write_text(json.dumps(found))


def record_on(ranks: int, only: Sequence[str]) -> Recording:
    """Make models and data, and run the configurations on one or several ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.set_num_threads(1)
        make_models(folder)
        make_data(folder)
        if ranks == 1:
            return record(folder, only)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        torch.multiprocessing.spawn(record_rank, (ranks, port, folder, only), nprocs=ranks)
        found: Recording = json.loads((folder / "found.json").read_text())
        return found


def differences(before: Recording, after: Recording, tolerance: float | None = None) -> list[str]:
    """A line for each number of the configurations of both recordings that differs.

    Args:
        before: A recording.
        after: Another one, which may have fewer configurations.
        tolerance: Relative difference of logged values and norms that is allowed; ``None``: none, of weights neither.
    """
    found = []
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        if tolerance is None and old["weights"] != new["weights"]:
            found.append(f"{name}: other weights")
        pairs = [("norms", old["norms"], new["norms"])]
        pairs += [
            (f"iteration {number}", *both)
            for number, both in enumerate(zip(old["metrics"], new["metrics"], strict=False))
        ]
        if len(old["metrics"]) != len(new["metrics"]):
            found.append(f"{name}: {len(old['metrics'])} iterations before, {len(new['metrics'])} after")
        for place, one, other in pairs:
            for key in sorted(one.keys() | other.keys()):
                if key not in one or key not in other:
                    found.append(f"{name}, {place}: {key} is {'new' if key in other else 'gone'}")
                elif not alike(one[key], other[key], tolerance):
                    values = f"{float.fromhex(one[key]):.9g} before, {float.fromhex(other[key]):.9g} after"
                    found.append(f"{name}, {place}: {key} {values}")
    return sorted(found)


def alike(one: str, other: str, tolerance: float | None) -> bool:
    """Whether two hexadecimal floats are equal, or within a relative tolerance of one another."""
    if one == other or tolerance is None:
        return one == other
    return math.isclose(float.fromhex(one), float.fromhex(other), rel_tol=tolerance, abs_tol=tolerance)


def main() -> None:
    """Record, write and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, help="file for the recording; numbers of other configurations stay in it"
    )
    parser.add_argument("--compare", type=Path, help="an earlier recording")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these configurations")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tolerance", type=float, help="relative; without it every number must be the same")
    parser.add_argument("--alike", action="store_true", help="print configurations with the same weights")
    options = parser.parse_args()
    start = time.perf_counter()
    found = record_on(options.ranks, options.only)
    if options.output is not None:
        known = json.loads(options.output.read_text()) if options.output.exists() else {}
        options.output.write_text(json.dumps(known | found, indent=1))
    changed = []
    if options.compare is not None:
        changed = differences(json.loads(options.compare.read_text()), found, options.tolerance)
        print("\n".join(changed))
    if options.alike:
        for name, one in found.items():
            same = [other for other, two in found.items() if other != name and two["weights"] == one["weights"]]
            if same:
                print(f"{name} has the weights of {', '.join(same)}")
    values = sum(len(each) for one in found.values() for each in one["metrics"])
    seconds = round(time.perf_counter() - start)
    print(json.dumps({"configurations": len(found), "values": values, "different": len(changed), "seconds": seconds}))
    if changed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
