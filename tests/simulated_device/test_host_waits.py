"""How often the host waits for the device, and in which files: the table, and a test that holds it.

Lower a number that a change has made too high; raise one only for a reason that stands beside it.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from arguments import learning
from models.attention.varlen_reference import plug_in
from rl_runs import digits, setup_run
from step_cases import STEP, train
from strategies import ranks
from tiny_models import tiny_model

from rlhfkit import GRPOModule, LocalEngine, NonFiniteGuard, Prompt, RolloutCallback, SamplingSpec
from rlhfkit.models import load_causal_lm, policy_output
from rlhfkit.models.attention import varlen
from rlhfkit.models.forward import UnpaddedBatch
from rlhfkit.rollout import ModuleWeights
from simulated_device import HostWaits, record_host_waits, register, trainer_arguments
from simulated_device.test_training import SecondStep

FORWARD = {"models/attention/layout.py": 1}
"""Of a forward pass over a packed batch that was made on the device: its lengths are read."""

LIMITS: dict[str, dict[str, int]] = {
    "forward of a packed batch": FORWARD,
    "its backward": {},
    # The reference that takes the kernel's place reads four tensors in each of two layers; a kernel reads none.
    "forward of a packed batch with a varlen kernel": {**FORWARD, "models/attention/varlen.py": 8},
    "its backward with a varlen kernel": {},
    # Whether to step depends on all gradients.
    "a clipped step with NonFiniteGuard": {"callbacks/guard.py": 1},
    # The check that all weights are finite, however many there are.
    "a copy of all weights into LocalEngine": {"rollout/weight_sync/source.py": 1},
    # The probe that they arrived is a forward pass of each side, whose results are compared on the host.
    "a weight sync with its probe": {
        "rollout/weight_sync/source.py": 1,
        "modules/base.py": 1,
        "rollout/local/engine.py": 3,
    },
    "8 more tokens of a batch of LocalEngine": {"rollout/local/generator.py": 8},
    "a batch of LocalEngine without its tokens": {"rollout/local/generator.py": 11},
    # The log-probs are copied to the host once for each model.
    "preparing an iteration: two forward passes over it": {"modules/on_policy/forward_passes.py": 2},
}


@pytest.mark.distributed
def test_the_host_waits_for_the_device_at_most_as_often_as_listed(tmp_path: Path) -> None:
    ranks.run("simulated_device.test_host_waits:every_activity", 1, tmp_path)


def every_activity(folder: Path) -> None:
    """How often each line waits in each activity."""
    torch.set_num_threads(1)
    register()
    model = str(tiny_model(folder / "model"))
    found = forward_and_backward(model) | generation(model) | guarded_step(folder / "guarded") | iterations(folder)
    assert found.keys() == LIMITS.keys()
    for activity, lines in found.items():
        files: Counter[str] = Counter()
        for line, count in lines.items():
            files[line.split()[0]] += count
        assert files <= Counter(LIMITS[activity]), (activity, lines)


def forward_and_backward(model: str) -> dict[str, dict[str, int]]:
    """Log-probs and entropies of a batch with three lengths and a shared prompt, and their gradient."""
    policy: Any = load_causal_lm(model).to("sim")
    ids = torch.randint(3, 99, (4, 12), generator=torch.Generator().manual_seed(0)).to("sim")
    batch = UnpaddedBatch(ids)
    batch.attention_mask = torch.arange(12, device="sim") < torch.tensor([12, 9, 5, 12]).to("sim")[:, None]
    batch.input_ids[1, :4] = batch.input_ids[0, :4]
    mask = batch.attention_mask[:, 1:]
    found, results = {}, []
    for how in ("", " with a varlen kernel"):
        with pytest.MonkeyPatch.context() as patch:
            if how:
                plug_in(patch, "varlen")
                patch.setattr(varlen, "DEVICES", ("sim",))
            policy_output(policy, batch, mask)  # what is found out once for each family of models and kernel
            with record_host_waits() as forward:
                out = policy_output(policy, batch, mask, entropy=True)
            with record_host_waits() as backward:
                (out.logprobs.sum() + out.entropy.sum()).backward()
        varlen.choose_kernel.cache_clear()
        found |= {f"forward of a packed batch{how}": dict(forward.lines), f"its backward{how}": dict(backward.lines)}
        results.append(out.logprobs.detach().cpu())
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)
    return found


def generation(model: str) -> dict[str, dict[str, int]]:
    """A token of eight samples, from the difference between 16 and 8; what finishing adds; and a copy of weights."""
    engine = LocalEngine(device="sim")
    engine.start(model, dtype=torch.float32, load_weights=True)
    prompts = [Prompt(index, [5, 6, 7 + index]) for index in range(2)]
    lines: list[Counter[str]] = []
    for tokens in (8, 16):
        sampling = SamplingSpec(group_size=4, max_new_tokens=tokens, min_new_tokens=tokens)
        with record_host_waits() as waits:
            engine.generate(prompts, sampling, iteration=0)
        lines.append(waits.lines)
    short, long = lines
    difference = {line: (long[line] - short[line]) for line in long}
    policy: Any = load_causal_lm(model).to("sim")
    with record_host_waits() as loading:
        engine.load(ModuleWeights(policy), 1)
    return {
        "8 more tokens of a batch of LocalEngine": {line: count for line, count in difference.items() if count},
        "a batch of LocalEngine without its tokens": {
            line: count for line in short if (count := short[line] - difference[line]) > 0
        },
        "a copy of all weights into LocalEngine": dict(loading.lines),
    }


def guarded_step(folder: Path) -> dict[str, dict[str, int]]:
    """An optimizer step of two micro-batches whose gradients are clipped and checked."""
    learning.prepare(folder)
    second = SecondStep()
    options = {"size": STEP // 2, "attention": None, "order": None, "gradient_clip_val": 1.0} | trainer_arguments()
    with record_host_waits() as second.waits:
        train(folder, "sft", 0, callbacks=[NonFiniteGuard(), second], **options)
    return {"a clipped step with NonFiniteGuard": second.found()}


def iterations(folder: Path) -> dict[str, dict[str, int]]:
    """The second of two iterations of GRPO with a reference model; the first also loads the engine's model."""
    last: dict[str, HostWaits] = {}

    def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with record_host_waits() as last[method.__name__]:
                return method(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOModule, "prepare", recorded(GRPOModule.prepare))
        patch.setattr(RolloutCallback, "sync_weights", recorded(RolloutCallback.sync_weights))
        trainer, module, data, _ = setup_run(
            folder / "run",
            module=GRPOModule,
            module_arguments={"kl_coef": 0.01},
            rollouts=RolloutCallback(digits, sampling=SamplingSpec(group_size=4, max_new_tokens=8)),
            **trainer_arguments(),
        )
        trainer.fit(module, data)
    return {
        "preparing an iteration: two forward passes over it": dict(last["prepare"].lines),
        "a weight sync with its probe": dict(last["sync_weights"].lines),
    }
