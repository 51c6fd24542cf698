"""DPOModule against TRL's numbers, and itself with other references.

Covers ``preference/base.py`` and ``parts/answer_reference.py``.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import torch

from modules.data_runs import Steps, computed, data, fit, folder_of, plain_module, trainer
from rlhfkit import DPOModule, PreferenceDataModule
from rlhfkit.data import PreferenceBatch
from rlhfkit.data.formats import collate_preferences
from rlhfkit.datamodules.tokenization.mixture import Mixture
from rlhfkit.losses import PreferencePairs, dpo_loss
from rlhfkit.losses.preference.dpo import AlphaDivergence, DiscoPOP
from rlhfkit.models import ModelLoading, PolicyOutput, load_causal_lm

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "trl.json").read_text())["dpo"]


folder = folder_of()


# ------------------------------------------------------------------------------------------------------- the reference


def test_log_probs_computed_before_training_are_kept_beside_the_tokens(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    cache, here = tmp_path / "cache", tmp_path / "here"
    here.mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.chdir(here)
    knobs = {"ref_model": None, "precompute_ref_log_probs": True}
    fit(folder, DPOModule, knobs=knobs, default_root_dir=None, max_epochs=1)
    assert not list(here.iterdir())
    assert len(list((cache / "rlhfkit" / "reference_logprobs").iterdir())) == 1


def test_a_mixture_of_sources_gets_its_log_probs_before_training_too(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}", "chosen": "x" * (i + 1), "rejected": "y"} for i in range(8)]
    runs = []
    for knobs in ({"ref_model": None}, computed(tmp_path / "cache")):
        steps = Steps()
        mixed = Mixture([(rows[:6], 3.0), (rows[6:], 1.0)])
        source = PreferenceDataModule(mixed, validation_data=rows, validation_split="train", micro_batch_size=4)
        run = trainer(tmp_path, callbacks=[steps])
        run.fit(plain_module(folder, DPOModule, **knobs), source)
        runs.append([*steps.losses, float(run.callback_metrics["val/loss"])])
    assert runs[1] == pytest.approx(runs[0], rel=2e-6)
    assert len(list((tmp_path / "cache").iterdir())) == 3  # two sources, and the validation data


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
    source = data(folder, DPOModule, tokenizer=module.tokenizer)
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
    source = data(folder, DPOModule)
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


def test_predictions_are_in_the_order_of_the_rows_and_what_validation_measures(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "x or y? ", "chosen": "x" * (1 + 5 * n % 7), "rejected": "y" * n} for n in range(1, 6)]
    module, run = plain_module(folder, DPOModule), trainer(tmp_path)
    parts = [run.predict(module, PreferenceDataModule(order, micro_batch_size=2)) for order in (rows, rows[::-1])]
    there, back = ({name: torch.cat([part[name] for part in one]) for name in one[0]} for one in parts)
    assert there["logps/chosen"].shape == (5,)
    for name, values in there.items():
        torch.testing.assert_close(back[name].flip(0), values)
    source = PreferenceDataModule(rows, validation_data=rows, validation_split="train", micro_batch_size=5)
    margins = there["rewards/chosen"] - there["rewards/rejected"]
    (found,) = run.validate(module, source, verbose=False)
    assert found["val/rewards/margins"] == pytest.approx(float(margins.mean()), rel=1e-5)
    assert found["val/rewards/accuracies"] == pytest.approx(float((margins > 0).float().mean()))
