"""A step of any module is the same on any micro-batches and ranks, packed, in any order, and after a resume."""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from arguments import learning
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from models.vision_families import save_vision_model
from step_cases import KINDS, STEP, STOPPED, Found, Save, own_optimizer, train
from strategies import ranks
from transformers import AutoModelForImageTextToText

from rlhfkit import LoRA, Optimization
from rlhfkit.modules.parts.answer_reference import PrecomputedReference
from rlhfkit.modules.parts.fine_tuning import NEFTune
from rlhfkit.modules.parts.moving_reference import MovingReference

CASES = [(kind, setting) for kind, (_, _, chosen) in KINDS.items() for setting in range(len(chosen))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("steps")
    learning.prepare(place)
    return place


@functools.cache
def whole(folder: Path, kind: str, setting: int, images: str | None = None) -> Found:
    """All rows of a step at once, padded, in the order of the data."""
    return train(folder, kind, setting, size=STEP, attention="sdpa", order=None, images=images)


def same(found: Found, expected: Found) -> None:
    """Losses, weights and the metrics of both agree to the rounding of float32 sums."""
    assert found.losses == pytest.approx(expected.losses, rel=2e-4, abs=2e-5)
    names = found.metrics.keys() & expected.metrics.keys()  # strategies log more
    assert len(names) >= len(expected.metrics) - 2
    assert {name: found.metrics[name] for name in names} == pytest.approx(
        {name: expected.metrics[name] for name in names}, rel=2e-3, abs=5e-5
    )
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        text = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(found.weights[name], value, rtol=1e-4, atol=2e-5, msg=text)


def check_on_ranks(count: int, tmp_path: Path, folder: Path, cases: list[dict[str, Any]]) -> None:
    """So many ranks find in each case what one finds; every one of them logs the metrics of all."""
    reports = ranks.run("step_cases:on_ranks", count, tmp_path, place=str(folder), cases=cases)
    for number, case in enumerate(cases):
        own, (metrics, *others) = zip(*(report[number] for report in reports), strict=True)
        for other in others:
            assert other == pytest.approx(metrics, rel=1e-6, abs=1e-9)
        # Rounding decides who wins where policy and reference are one, as in a first step.
        metrics = {name: value for name, value in metrics.items() if not name.startswith("rewards/accuracies")}
        losses = [sum(parts) / len(reports) for parts in zip(*own, strict=True)]
        found = Found(losses, torch.load(folder / f"case_{number}.pt"), metrics)
        same(found, whole(folder, case["kind"], case["setting"], case.get("images")))


@settings(
    max_examples=24,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    case=st.sampled_from(CASES),
    size=st.sampled_from([1, 2, 4, 8]),
    attention=st.sampled_from([None, "sdpa"]),
    order=st.none() | st.integers(0, 99),
)
def test_a_step_does_not_depend_on_micro_batches_packing_and_order(
    folder: Path, case: tuple[str, int], size: int, attention: str | None, order: int | None
) -> None:
    found = train(folder, *case, size=size, attention=attention, order=order)
    same(found, whole(folder, *case))


LORA, MUON = {"lora": LoRA(rank=2)}, {"optimization": Optimization(optimizer="muon", lr_schedule="cosine")}
RESUMED: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    **{kind: (kind, lambda place: {}) for kind in KINDS},
    "dpo whose reference moves": ("dpo", lambda place: {"parts": [MovingReference(1, alpha=0.6).plain()]}),
    # Computed again after a resume, by a model that is loaded for it.
    "dpo whose reference is on disk": (
        "dpo",
        lambda place: {"parts": [PrecomputedReference(cache=str(place)).plain()]},
    ),
    "noise": ("sft", lambda place: {"parts": [NEFTune(5.0).plain()]}),
    "muon": ("sft", lambda place: MUON),
    "adapters": ("sft", lambda place: LORA),
    "adapters and a head": ("reward", lambda place: LORA),
    "grpo with images": ("grpo", lambda place: {"kl_coef": 0.1}),
}
"""Kind, and more arguments of a run whose files are in a folder."""


@pytest.mark.parametrize("case", RESUMED)
def test_a_stopped_run_goes_on_bit_for_bit(folder: Path, tmp_path: Path, case: str) -> None:
    """Two epochs of two steps of two micro-batches, saved after a step, inside a window and at the end of an epoch."""
    kind, more = RESUMED[case]
    images = "idefics3" if "images" in case else None
    if images is not None and not (folder / images).exists():
        save_vision_model(images, folder / images)

    def run(place: Path, **given: Any) -> Found:
        own = own_optimizer(**more(place))
        return train(folder, kind, -1, size=STEP // 2, **STOPPED, own=own, images=images, **given)

    straight = run(tmp_path / "straight", callbacks=[Save(tmp_path)])
    for batch, done in ((1, 1), (2, 1), (3, 2)):
        resumed = run(tmp_path / str(batch), resume=tmp_path / f"0, {batch}.ckpt")
        assert resumed.losses == straight.losses[done:]
        assert resumed.metrics == straight.metrics
        for name, value in straight.weights.items():
            assert torch.equal(resumed.weights[name], value), (batch, name)


@pytest.mark.distributed
def test_a_step_does_not_depend_on_ranks(folder: Path, tmp_path: Path) -> None:
    """Every module on two ranks, with a setting, micro-batches and a strategy drawn once for each."""
    draw = random.Random(0)
    cases: list[dict[str, Any]] = [
        {
            "kind": kind,
            "setting": draw.randrange(len(KINDS[kind][2])),
            "size": draw.choice([2, 4]),  # rows of a micro-batch; a step has 8
            "attention": draw.choice([None, "sdpa"]),
            "order": draw.randrange(99),
            "strategy": draw.choice(["ddp", "rlhf_zero1", "rlhf_zero2", "rlhf_zero3"]),
        }
        for kind in KINDS
    ]
    # What is exchanged between ranks besides gradients: reference points, moving averages, samples of two models.
    others = {"ddp": "rlhf_zero3", "rlhf_zero3": "ddp"}
    cases += [
        case | {"strategy": others.get(case["strategy"], "ddp"), "setting": len(KINDS[case["kind"]][2]) - 1}
        for case in cases
        if case["kind"] == "bco"
    ]
    check_on_ranks(2, tmp_path, folder, cases)


@pytest.mark.distributed
def test_a_run_stopped_on_ranks_goes_on_bit_for_bit_and_nowhere_else(folder: Path, tmp_path: Path) -> None:
    """What engines save does not depend on the module, nor what loaders and iterations save on the stage."""
    stages = {"sft": 0, "dpo": 1, "grpo": 2, "ppo": 3}
    ranks.run("step_cases:resumed_on_ranks", 2, tmp_path, place=str(folder), stages=stages)
    # Samples of an iteration belong to ranks.
    refusals = {"sft": (0, "world_size was 2 and is 1"), "grpo": (2, "its data loaders differ between ranks")}
    ranks.run("step_cases:refused_on_ranks", 1, tmp_path, place=str(folder), refusals=refusals)


SEEING = [
    ("sft", "idefics3", 0),
    ("dpo", "qwen3_vl", 0),
    ("kto", "idefics3", 0),
    ("reward", "qwen3_vl", 0),
    ("grpo", "qwen3_vl", 0),
    ("ppo", "idefics3", 0),
    ("ppo", "qwen3_vl", 1),
]
"""Kind, model and setting."""


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Path:
    for name in ("idefics3", "qwen3_vl"):
        save_vision_model(name, folder / name)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(("kind", "images", "setting"), SEEING)
def test_a_step_with_images_does_not_depend_on_micro_batches_and_packing(
    seeing: Path, kind: str, images: str, setting: int
) -> None:
    found = train(seeing, kind, setting, size=2, attention=None, order=3, images=images)
    expected = whole(seeing, kind, setting, images)
    same(found, expected)
    start = AutoModelForImageTextToText.from_pretrained(seeing / images).state_dict()
    vision = [name for name in start if ("vision" in name or "visual" in name) and name.endswith("weight")]
    moved = {
        name.partition(".")[0]
        for name, value in expected.weights.items()
        for end in vision
        if name.endswith(end) and not torch.equal(value, start[end])
    }
    assert moved == ({"policy", "critic"} & {name.partition(".")[0] for name in expected.weights})


@pytest.mark.distributed
def test_a_step_with_images_does_not_depend_on_ranks(seeing: Path, tmp_path: Path) -> None:
    """Some micro-batches and forward passes have no image where the other rank's have one, or no rows at all."""
    strategies = [*("ddp", "rlhf_zero3", "rlhf_zero1", "rlhf_zero2"), *("rlhf_zero3", "rlhf_zero0", "rlhf_zero1")]
    cases = [
        {"kind": kind, "images": images, "setting": setting, "size": 1 if strategy == "ddp" else 2}
        | {"attention": (None, "sdpa")[number % 2], "order": number, "strategy": strategy}
        for number, ((kind, images, setting), strategy) in enumerate(zip(SEEING, strategies, strict=True))
    ]
    check_on_ranks(2, tmp_path, seeing, cases)


@pytest.mark.distributed
@pytest.mark.parametrize("count", [2, 4])
def test_a_step_does_not_depend_on_ranks_that_divide_sequences(count: int, folder: Path, tmp_path: Path) -> None:
    """Every module, DDP and ZeRO 0 to 3, on one group of two ranks and on two; some ranks have no rows of their own."""
    draw = random.Random(count)
    kinds = list(KINDS) if count == 2 else ["sft", "kto", "grpo", "ppo"]
    cases: list[dict[str, Any]] = [
        {
            "kind": kind,
            "setting": draw.randrange(len(KINDS[kind][2])),
            "size": draw.choice([1, 2, 4]),
            "attention": None,
            "order": draw.randrange(99),
            "strategy": (0, 3, 2, None, 1)[number % 5],
            "sequence": 2,
            "sharing": draw.choice(["ulysses", "ring"]),
        }
        for number, kind in enumerate(kinds)
    ]
    for case in cases:
        case["setting"] *= case["kind"] != "distillation"  # spans of a teacher that reads text are not divided
    check_on_ranks(count, tmp_path, folder, cases)
