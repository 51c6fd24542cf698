"""DPOModule against a loop written by hand, TRL's numbers, and itself with other references.

Covers ``preference/base.py`` and ``parts/answer_reference.py``.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from strategies import ranks

from modules import dpo_cases
from modules.data_runs import folder_of
from modules.dpo_cases import CASES, FOLLOWING, PlainDPO
from rlhfkit import DPOModule, PreferenceDataModule
from rlhfkit.data import PreferenceBatch
from rlhfkit.data.formats import collate_preferences
from rlhfkit.datamodules.tokenization.mixture import Mixture
from rlhfkit.losses import PreferencePairs, dpo_loss
from rlhfkit.losses.preference.dpo import AlphaDivergence, DiscoPOP
from rlhfkit.models import ModelLoading, PolicyOutput, load_causal_lm

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "trl.json").read_text())["dpo"]


folder = folder_of(dpo_cases.prepare)


# ---------------------------------------------------------------------------------------------------- exact training


def test_training_is_the_loop_by_hand(folder: Path) -> None:
    losses, weights = dpo_cases.by_hand(folder)
    run = dpo_cases.fit(folder, 2, precision="64-true")
    # The packed head and attention take their statistics in float32 here and there.
    assert run.totals == pytest.approx(losses, rel=1e-6)
    for name, tensor in run.weights.items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-6, atol=1e-8)


@pytest.mark.distributed
def test_two_ranks_train_as_one_with_every_kind_of_reference(folder: Path, tmp_path: Path) -> None:
    reports = ranks.run("modules.dpo_cases:on_ranks", 2, tmp_path, model=str(folder))
    for report in reports:  # the second epoch goes on with the reference where it was
        assert report["stopped and resumed"] == report["zero3, following"][3:]
        for strategy in ("rlhf_zero3", "ddp"):
            whole, rest = report[f"half {strategy}"]
            assert rest == whole[3:]
    start = load_causal_lm(str(folder / "model"), dtype=torch.bfloat16).state_dict()
    for strategy in ("rlhf_zero3", "ddp"):
        whole, rest = torch.load(tmp_path / f"half {strategy}.pt")
        assert all(torch.equal(tensor, rest[key]) for key, tensor in whole.items())
        assert not all(torch.equal(tensor, start[key]) for key, tensor in whole.items())
    runs: dict[str, Any] = {}
    for name, (_, _, options) in CASES.items():
        if str(options) not in runs:
            runs[str(options)] = dpo_cases.fit(folder, module=options)
        alone = runs[str(options)]
        both = [sum(pair) / 2 for pair in zip(*(report[name] for report in reports), strict=True)]
        assert both == pytest.approx(alone.losses, rel=1e-4)
        weights, reference = torch.load(tmp_path / f"{name}.pt")
        for key, tensor in weights.items():
            torch.testing.assert_close(tensor, alone.weights[key], rtol=1e-4, atol=2e-6)
            if options == FOLLOWING:
                torch.testing.assert_close(reference[key], alone.reference[key], rtol=1e-4, atol=2e-6)


# ------------------------------------------------------------------------------------------------------- the reference


def test_log_probs_computed_before_training_are_kept_beside_the_tokens(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    cache, here = tmp_path / "cache", tmp_path / "here"
    here.mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.chdir(here)
    options = {"ref_model": None, "precompute_ref_log_probs": True}
    dpo_cases.fit(folder, module=options, default_root_dir=None, max_epochs=1)
    assert not list(here.iterdir())
    assert len(list((cache / "rlhfkit" / "reference_logprobs").iterdir())) == 1


def test_log_probs_computed_before_training_are_those_of_the_live_reference(folder: Path, tmp_path: Path) -> None:
    live = dpo_cases.fit(folder, 2, module={"ref_model": None})
    before = {"ref_model": None, **dpo_cases.computed(tmp_path)}
    computed = dpo_cases.fit(folder, 2, module=before)
    again = dpo_cases.fit(folder, 2, module=before)
    # Sums of float32 over other groups of rows: one more or less in the last of seven digits.
    assert computed.losses == pytest.approx(live.losses, rel=2e-6)
    assert again.losses == computed.losses
    (file,) = tmp_path.iterdir()
    torch.save(torch.load(file) + torch.tensor([5.0, 0.0]), file)
    changed = dpo_cases.fit(folder, 2, module=before, max_epochs=1)
    assert abs(changed.losses[0] - computed.losses[0]) > 0.1  # what is on disk is used
    named = before | dpo_cases.computed(tmp_path, model=str(folder / "reference"))
    assert dpo_cases.fit(folder, 2, module=named).losses == pytest.approx(dpo_cases.fit(folder, 2).losses, rel=2e-6)
    assert len(list(tmp_path.iterdir())) == 2  # of another model; other data and weights: test_precompute.py


def test_a_mixture_of_sources_gets_its_log_probs_before_training_too(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}", "chosen": "x" * (i + 1), "rejected": "y"} for i in range(8)]
    runs = []
    for options in ({}, dpo_cases.computed(tmp_path / "cache")):
        steps = dpo_cases.Steps()
        mixed = Mixture([(rows[:6], 3.0), (rows[6:], 1.0)])
        source = PreferenceDataModule(mixed, validation_data=rows, validation_split="train", micro_batch_size=4)
        run = dpo_cases.trainer(tmp_path, callbacks=[steps])
        run.fit(PlainDPO(str(folder / "model"), lr=1e-3, **options), source)
        runs.append([*steps.losses, float(run.callback_metrics["val/loss"])])
    assert runs[1] == pytest.approx(runs[0], rel=2e-6)
    assert len(list((tmp_path / "cache").iterdir())) == 3  # two sources, and the validation data


def test_adapters_switched_off_are_the_reference_and_only_they_are_trained(folder: Path) -> None:
    run = dpo_cases.fit(folder, module={"ref_model": None, "lora": {"rank": 4}, "loss_type": "sigmoid", "lr": 0.5})
    assert run.logged[0]["rewards/margins"] == 0.0  # exactly: policy and reference are the same numbers
    assert run.losses[0] == pytest.approx(math.log(2), abs=1e-7)
    assert run.losses[-1] < run.losses[0]
    start = load_causal_lm(str(folder / "model")).state_dict()
    for name, tensor in run.weights.items():
        if "lora_" not in name:
            assert torch.equal(tensor, start[name.replace("base_layer.", "")])


def test_a_stopped_run_goes_on_bit_for_bit_without_the_log_probs_that_were_computed_before(
    folder: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"ref_model": None, **dpo_cases.computed(tmp_path / "cache")}

    def run(epochs: int, **arguments: Any) -> DPOModule:
        module = DPOModule(str(folder / "model"), lr=1e-3, **options)
        saving = [ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)]
        fitted = dpo_cases.trainer(
            tmp_path, max_epochs=epochs, callbacks=saving, enable_checkpointing=True, accumulate_grad_batches=2
        )
        fitted.fit(module, dpo_cases.data(folder, 4), **arguments)
        return module

    straight = run(2)
    for file in (tmp_path / "cache").iterdir():  # computed again, by a model that is loaded for it
        file.unlink()
    resumed = run(2, ckpt_path=str(tmp_path / "epoch=0.ckpt"))
    for name, tensor in straight.policy.state_dict().items():
        assert torch.equal(tensor, resumed.policy.state_dict()[name]), name


# --------------------------------------------------------------------------------------------------------- the losses


class FromNumbers(DPOModule):
    """Takes what the model would say from a table."""

    sharp: torch.Tensor

    def sharpened_logprobs(self, batch: PreferenceBatch) -> torch.Tensor:
        return self.sharp


def trl_arguments(args: dict[str, Any]) -> dict[str, Any]:
    """TRL's argument names and values in ours."""
    names = {"reverse_kl": "reverse_kl", "forward_kl": "forward_kl", "js_divergence": "js", "alpha_divergence": "alpha"}
    arguments = {**args, "divergence": names[args.get("f_divergence_type", "reverse_kl")]}
    if "f_alpha_divergence_coef" in args:
        arguments["divergence"] = AlphaDivergence(args["f_alpha_divergence_coef"])
    tempered = {"discopop": DiscoPOP(args["discopop_tau"])} if "discopop_tau" in args else {}
    losses = [tempered.get(name, name) for name in args["loss_type"]]
    weights = args.get("loss_weights", [1.0] * len(losses))
    trls = ("f_divergence_type", "f_alpha_divergence_coef", "discopop_tau", "loss_weights")
    arguments = {name: value for name, value in arguments.items() if name not in trls}
    return arguments | {"loss_type": dict(zip(losses, weights, strict=True))}


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_values_gradients_and_metrics_are_trls(case: dict[str, Any]) -> None:
    inputs = GOLDEN["inputs"][case["input"]]
    dtype = torch.float64 if inputs["dtype"] == "torch.float64" else torch.float32
    half = len(inputs["completion_mask"]) // 2
    turn = torch.arange(2 * half).view(2, half).T.flatten()  # chosen first, then rejected: to pairs side by side
    table = {
        name: torch.tensor(inputs[name], dtype=torch.float64)[turn] for name in inputs if isinstance(inputs[name], list)
    }
    mask = table["completion_mask"]
    batch = PreferenceBatch(
        input_ids=mask.long(), attention_mask=torch.ones_like(mask, dtype=torch.bool), loss_mask=mask[:, 1:].bool()
    )
    module = FromNumbers("nobody", **trl_arguments(case["args"]))
    logprobs = table["policy_per_token_logps"].to(dtype).requires_grad_()
    module.sharp = 2 * logprobs.detach() - table["log_sum_sq_probs"].to(dtype)
    batch.ref_logprobs = module.answer_logprobs(batch, table["ref_per_token_logps"].to(dtype))
    result = module.loss(batch, PolicyOutput(logprobs, None))
    result.loss.backward()
    rough = case["fp32_internal"] or dtype == torch.float32
    close = {"rtol": 3e-5, "atol": 3e-6} if rough else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(result.loss.double(), torch.tensor(case["loss"], dtype=torch.float64), **close)
    gradient = torch.tensor(case["grad"], dtype=torch.float64)[turn]
    selected = batch.loss_mask  # TRL's gradient on other tokens is that of constants
    torch.testing.assert_close(logprobs.grad.double()[selected], gradient[selected], **close)
    for name, value in result.metrics.items():  # TRL's are float32
        assert float(value) == pytest.approx(case["metrics"][name], rel=2e-5, abs=2e-5), name


def test_weights_of_wpo_are_those_of_the_whole_vocabulary(folder: Path) -> None:
    module = DPOModule(str(folder / "model"), use_weighting=True)
    module.configure_model()
    source = dpo_cases.data(folder, 4, tokenizer=module.tokenizer)
    source.setup()
    batch = collate_preferences([source.examples[row] for row in range(6)])
    with torch.no_grad():
        found = module.pair_weights(batch, module.policy_output(batch))
    expected = []
    for pair in (source.examples[row] for row in range(6)):
        weight = 1.0
        for answer in (pair.chosen, pair.rejected):
            ids = torch.tensor([answer.input_ids])
            model = load_causal_lm(str(folder / "model"), loading=ModelLoading(attention="eager"))
            probabilities = model(input_ids=ids).logits[0, :-1].detach().double().softmax(-1)
            said = probabilities.gather(-1, ids[0, 1:, None])[:, 0].log()
            alignment = (said - probabilities.square().sum(-1).log())[torch.tensor(answer.loss_mask[1:])]
            weight *= float(alignment.mean().exp())
        expected.append(weight)
    assert found.tolist() == pytest.approx(expected, rel=1e-4)


def margin_halved(pairs: PreferencePairs) -> torch.Tensor:
    return 0.5 * pairs.margin


def test_a_loss_can_be_a_function_and_is_remembered_by_name() -> None:
    module = DPOModule("nobody", loss_type=margin_halved)
    name = f"{margin_halved.__module__}.margin_halved"
    assert dict(module.hparams["loss_type"]) == {name: 1.0}
    assert DPOModule("nobody", loss_type=name).loss_type == {margin_halved: 1.0}


@pytest.mark.parametrize(
    ("name", "usual", "given"),
    [("divergence", "alpha", AlphaDivergence(0.3)), ("loss_type", "discopop", DiscoPOP(0.2))],
)
def test_a_function_with_arguments_of_its_own_is_given_in_yaml_and_remembered(
    name: str, usual: str, given: Any
) -> None:
    path = f"rlhfkit.losses.preference.dpo.{type(given).__name__}"
    plain = {"class_path": path, "init_args": dataclasses.asdict(given)}
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(DPOModule, "model")
    in_yaml = parser.parse_string(json.dumps({"model": {"model": "anywhere", name: plain}}))
    made = [DPOModule("anywhere", **{name: given}), parser.instantiate_classes(in_yaml).model]
    made += [DPOModule(**module.hparams) for module in made]
    chosen, rejected, zeros = torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -2.5]), torch.zeros(2)
    expected = dpo_loss(chosen, rejected, zeros, zeros, **{name: given}).loss
    assert expected != dpo_loss(chosen, rejected, zeros, zeros, **{name: usual}).loss
    for module in made:
        assert module.hparams[name] == plain
        found = module._pair_loss(chosen=chosen, rejected=rejected, ref_chosen=zeros, ref_rejected=zeros)
        assert found.loss == expected


def test_a_micro_batch_without_pairs_trains_nothing(folder: Path) -> None:
    source = dpo_cases.data(folder, 4)
    for loss_type in ("sigmoid", "aot"):
        module = DPOModule(str(folder / "model"), loss_type=loss_type)
        source.tokenizer = module.tokenizer
        source.setup()
        module.configure_model()
        empty = module.prepare(collate_preferences([source.examples[0]]).without_targets())
        loss = module.loss(empty, module.policy_output(empty)).loss
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert all(p.grad is None or not p.grad.any() for p in module.policy.parameters())


# ----------------------------------------------------------------------------------------------------------- learning


def test_the_margin_goes_to_the_log_odds_of_the_preferences(folder: Path, tmp_path: Path) -> None:
    """Three of four prefer x to y: the best policy has σ(β h) = 3/4, so β h = log 3 (Bradley-Terry)."""
    rows = [{"prompt": "x or y? ", "chosen": "x", "rejected": "y"}] * 3
    rows += [{"prompt": "x or y? ", "chosen": "y", "rejected": "x"}]
    source = PreferenceDataModule(
        rows, validation_data=rows[:1], validation_split="train", micro_batch_size=4, shuffle=False
    )
    module = DPOModule(str(folder / "model"), lr=3e-3, beta=0.5)
    run = dpo_cases.trainer(tmp_path, max_epochs=80, check_val_every_n_epoch=80)
    run.fit(module, source)
    assert float(run.callback_metrics["val/rewards/margins"]) == pytest.approx(math.log(3), abs=0.02)
    assert float(run.callback_metrics["val/rewards/accuracies"]) == 1.0
    ((predicted,),) = [run.predict(module, source.val_dataloader())]
    assert float(predicted["rewards/chosen"] - predicted["rewards/rejected"]) == pytest.approx(math.log(3), abs=0.02)


def test_predictions_are_in_the_order_of_the_rows(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "x or y? ", "chosen": "x" * (1 + 5 * n % 7), "rejected": "y" * n} for n in range(1, 6)]
    module, run = DPOModule(str(folder / "model"), reference_free=True), dpo_cases.trainer(tmp_path)
    parts = [run.predict(module, PreferenceDataModule(order, micro_batch_size=2)) for order in (rows, rows[::-1])]
    there, back = (torch.cat([part["logps/chosen"] for part in predicted]) for predicted in parts)
    assert there.shape == (5,)
    torch.testing.assert_close(back.flip(0), there)
