"""Optimizers by name: what they are, against the packages' own, the kernels of AdamW, and errors."""

import importlib.util
import logging
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from rlhfkit import Optimization, SFTModule
from rlhfkit.modules.optimizers import adafactor, adamw, adamw_8bit, muon, sgd
from rlhfkit.modules.optimizers.factories import make_optimizer, state_bytes

GIVEN: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.3}
BETAS: dict[str, Any] = {"betas": (0.8, 0.9)}


def weight(size: int = 3) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(size, 4, generator=torch.Generator().manual_seed(7)))


def stepped(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, steps: range) -> torch.Tensor:
    for step in steps:
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return parameter.detach()


PACKAGES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "adamw": (adamw, "torch.optim.AdamW", BETAS | {"eps": 1e-5, "amsgrad": True}),
    "sgd": (sgd, "torch.optim.SGD", {"momentum": 0.9, "nesterov": True}),
    "adafactor": (adafactor, "torch.optim.Adafactor", {"d": 2.0}),
    "adamw_8bit": (adamw_8bit, "bitsandbytes.optim.AdamW8bit", BETAS),
}


@pytest.mark.parametrize("name", PACKAGES)
def test_the_arguments_reach_the_packages_own_optimizer(name: str) -> None:
    make, package, arguments = PACKAGES[name]
    home, _, kind = package.rpartition(".")
    theirs_of = getattr(pytest.importorskip(home, reason="the extra qlora is not installed"), kind)
    ours, theirs = weight(2048), weight(2048)
    found = stepped(make([{"params": [ours]}], **GIVEN, **arguments), ours, range(4))
    assert torch.equal(found, stepped(theirs_of([theirs], **GIVEN, **arguments), theirs, range(4)))
    assert not torch.equal(found, weight(2048))


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (adamw, {}),
        (adamw, {"amsgrad": True}),
        (adamw_8bit, {}),
        (muon, {}),
        (sgd, {}),
        (sgd, {"momentum": 0.9}),
        (adafactor, {}),
    ],
)
@pytest.mark.parametrize("kind", ["matrices", "embeddings"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_state_are_those_that_are_said(
    make: Any, arguments: dict[str, Any], kind: str, dtype: torch.dtype
) -> None:
    if make is adamw_8bit:
        pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed")
    parameter = torch.nn.Parameter(torch.ones(256, 256, dtype=dtype))
    optimizer = make_optimizer(make, [{"params": [parameter], "kind": kind}], arguments, **GIVEN, betas=(0.9, 0.95))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    # Without counters and bitsandbytes' tables, which do not grow, and Adafactor's rows and columns.
    state = {name: value for name, value in optimizer.state[parameter].items() if torch.is_tensor(value)}
    measured = sum(value.nbytes for name, value in state.items() if name not in ("step", "qmap1", "qmap2"))
    said = state_bytes(make, arguments, itemsize=dtype.itemsize)
    if make is adafactor:
        assert measured <= 8 * 256
    else:
        assert measured / parameter.numel() == (said.matrices if kind == "matrices" else said.others)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [(adamw, {}), (adamw, {"fused": True}), (sgd, {}), (sgd, {"momentum": 0.9, "nesterov": True})],
)
def test_the_bytes_of_a_step_are_those_that_are_said(make: Any, arguments: dict[str, Any]) -> None:
    parameter = torch.nn.Parameter(torch.ones(10**6))
    optimizer = make_optimizer(make, [{"params": [parameter], "kind": "others"}], arguments, **GIVEN, betas=(0.9, 0.95))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        optimizer.step()
    sizes = [one.nbytes() for one in profile.profiler.kineto_results.events() if one.name() == "[memory]"]
    most = max(accumulate(sizes, initial=0)) / parameter.numel()
    said = state_bytes(make, arguments)
    assert said.step_others == pytest.approx(most, abs=0.01)


def test_what_an_optimizer_does_not_take_is_not_ignored_silently(recwarn: pytest.WarningsRecorder) -> None:
    for taken in (
        {"optimizer": "sgd"},
        {"betas": (0.5, 0.5)},
        {"optimizer": "muon", "betas": (0.5, 0.5)},
        {"weight_decay": 0.1},
        {"optimizer": passes_on, "weight_decay": 0.1},
        {"optimizer": rms_prop},
    ):
        SFTModule("model", optimization=Optimization(**taken))
    assert not [one for one in recwarn if "is not used" in str(one.message)]
    with pytest.warns(UserWarning, match=r"betas=\(0.5, 0.5\) is not used: optimizer='sgd' takes no betas"):
        SFTModule("model", optimization=Optimization(optimizer="sgd", betas=(0.5, 0.5)))
    with pytest.warns(UserWarning, match="weight_decay=0.1 is not used: .*rms_prop' takes no weight_decay"):
        SFTModule("model", optimization=Optimization(optimizer=rms_prop, weight_decay=0.1))


def test_the_state_of_another_optimizer_is_unknown() -> None:
    assert state_bytes(torch.optim.RAdam, {}) is None


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else find(name))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'rlhfkit\[qlora\]'"):
        adamw_8bit([{"params": [weight()]}], **GIVEN, **BETAS)


def rms_prop(groups: Any, lr: float) -> torch.optim.Optimizer:
    """A function of a user's own, which takes the learning rate only."""
    return torch.optim.RMSprop(groups, lr=lr)


def passes_on(groups: Any, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, **more)


@pytest.mark.parametrize(
    ("options", "kind", "expected"),
    [
        ({"optimizer": "torch.optim.RAdam"}, torch.optim.RAdam, {"betas": (0.5, 0.6), "weight_decay": 0.2}),
        ({"optimizer": rms_prop}, torch.optim.RMSprop, {"weight_decay": 0}),
        (
            {"optimizer": passes_on, "optimizer_arguments": {"eps": 1e-3}},
            torch.optim.AdamW,
            {"betas": (0.9, 0.999), "weight_decay": 0.2, "eps": 1e-3},
        ),
    ],
)
def test_functions_and_classes_are_given_what_they_take(options: Any, kind: type, expected: dict[str, Any]) -> None:
    module = SFTModule("a model", lr=0.1, optimization=Optimization(betas=(0.5, 0.6), weight_decay=0.2, **options))
    module.policy = torch.nn.Linear(2, 2)
    made = module.configure_optimizers()
    assert type(made) is kind
    assert {name: made.defaults[name] for name in ("lr", *expected)} == {"lr": 0.1, **expected}
    given = options["optimizer"]
    name = given if isinstance(given, str) else f"{__name__}.{given.__name__}"
    assert module.hparams["optimization"]["optimizer"] == name, "checkpoints hold the name"


ON_A_GPU = "fused kernels of torch, on a GPU"


@pytest.mark.parametrize(
    ("device", "precision", "fused", "said"),
    [
        (None, None, None, ""),
        ("cpu", None, None, ""),
        ("cuda", None, True, ON_A_GPU),
        ("cuda", "bf16-mixed", True, ON_A_GPU),
        ("cuda", "16-mixed", None, "default kernels of torch, Lightning's gradient scaler"),
    ],
)
def test_adamw_is_fused_on_gpus_and_says_so(
    device: str | None, precision: Any, fused: bool | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):  # whatever tests before have set
        caplog.set_level(logging.INFO, logger=name)
    plugin = Precision() if precision is None else MixedPrecision(precision, "cuda")
    # What the choice of kernels reads of a Trainer; one on a GPU cannot be made without a GPU.
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device(device or "cpu")), precision_plugin=plugin
    )
    groups = [{"params": [torch.nn.Parameter(torch.zeros(3))], "lr": 0.5}]
    optimizer = adamw(groups, lr=0.1, betas=(0.8, 0.9), weight_decay=0.3, trainer=trainer if device else None)
    expected = {"fused": fused, "lr": 0.5, "betas": (0.8, 0.9), "weight_decay": 0.3}
    assert {name: optimizer.param_groups[0][name] for name in expected} == expected
    assert said in caplog.text
    assert ("kernels of torch" in caplog.text) == bool(said)
