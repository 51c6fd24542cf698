"""What one rank runs for the feature tests: stages per child, offloading, sharded building, LoRA, export."""

from pathlib import Path
from typing import Any

import peft
import torch
import toys
from parity_cases import RANK, RANKS, Spy, difference, fit, weight_difference
from transformers import LlamaForCausalLM

from rlhfkit.strategies import RLHFDeepSpeedStrategy


def zero(**options: Any) -> dict[str, Any]:
    """A child's ZeRO entries."""
    return {"zero_optimization": options}


def strategies() -> dict[str, Any]:
    """Strategies whose runs must equal plain Lightning."""
    offload = {"device": "cpu"}
    return {
        "policy 3, critic 1, reference plain": RLHFDeepSpeedStrategy(
            stage=3, engine_configs={"critic": zero(stage=1), "reference": zero(stage=0)}
        ),
        "policy 2, critic 3, reference 3": RLHFDeepSpeedStrategy(
            stage=2, engine_configs={"critic": zero(stage=3), "reference": zero(stage=3)}
        ),
        "reference offloaded": RLHFDeepSpeedStrategy(
            stage=3, engine_configs={"reference": zero(offload_param=offload)}
        ),
        "partitions within nodes": RLHFDeepSpeedStrategy(
            stage=3, engine_configs={name: zero(zero_hpz_partition_size=RANKS) for name in ("policy", "critic")}
        ),
        "rlhf_zero1_offload": "rlhf_zero1_offload",
        "rlhf_zero2_offload": "rlhf_zero2_offload",
        "rlhf_zero3_offload": "rlhf_zero3_offload",
    }


def everything(folder: Path, model: str, tied: str) -> dict[str, Any]:
    """All features in one launch."""
    options = {"model": model, "critic": True, "reference": True}
    plain = fit(None, **options)
    equal = {}
    for name, strategy in strategies().items():
        found = fit(strategy, **options)
        equal[name] = [
            difference(found["losses"], plain["losses"]),
            weight_difference(found["weights"], plain["weights"]) if RANK == 0 else 0.0,
        ]
    return {
        "equal": equal,
        "export": export(folder, model, tied),
        "sharded": sharded_build(model),
        "stages": one_module_at_many_stages(model),
        "adapters": {str(stage): adapters(folder / f"lora{stage}", model, stage) for stage in range(4)},
    }


class Residents(toys.Toy):
    """Counts the elements that are in this rank's memory in full."""

    def configure_model(self) -> None:
        super().configure_model()
        self.built = [sum(p.numel() for p in child.parameters()) for child in (self.policy, self.reference)]

    def on_train_batch_end(self, *rest: Any) -> None:
        self.after_step = sum(p.numel() for p in self.reference.parameters())


def sharded_build(model: str) -> dict[str, Any]:
    """At stage 3 nothing is ever whole; tiny parameters are kept gathered by DeepSpeed unless told otherwise."""
    module = Residents(model, reference=True)
    strategy = RLHFDeepSpeedStrategy(
        stage=3, engine_configs={name: zero(stage3_param_persistence_threshold=0) for name in ("policy", "reference")}
    )
    toys.trainer(strategy, RANKS).fit(module, toys.ShareLoader(toys.global_batches(2), RANK, RANKS))
    return {"built": module.built, "after_step": module.after_step}


def one_module_at_many_stages(model: str) -> list[float]:
    """One module trained at stages 3, 1, 3 and 0 in turn against four plain fits."""
    data, whole = toys.global_batches(2), toys.ShareLoader(toys.global_batches(2), 0, 1)
    module, plain = toys.Toy(model), toys.Toy(model)
    for stage in (3, 1, 3, 0):
        toys.trainer(f"rlhf_zero{stage}", RANKS).fit(module, toys.ShareLoader(data, RANK, RANKS))
        toys.trainer("auto", 1).fit(plain, whole)
    return [difference(module.losses, plain.losses), plain.losses[0] - plain.losses[-2]]


class WithAdapters(toys.Toy):
    """LoRA on the attention of the policy."""

    def configure_model(self) -> None:
        if hasattr(self, "policy"):
            return
        base = LlamaForCausalLM.from_pretrained(self.hparams.model)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        toys.pl.seed_everything(3, verbose=False)
        self.policy = peft.get_peft_model(base, config).train()


def adapters(place: Path, model: str, stage: int) -> dict[str, Any]:
    """Only adapters are in the optimizer and the checkpoint; resume is bitwise."""
    place = Path(place)

    class Save(toys.pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(place / "lora.ckpt")

    def run(epochs: int, callbacks: list[Any], resume: Path | None = None) -> tuple[Any, Spy]:
        module, spy = WithAdapters(model), Spy()
        trainer = toys.trainer(f"rlhf_zero{stage}", RANKS, max_epochs=epochs, callbacks=[spy, *callbacks])
        trainer.fit(module, toys.ShareLoader(toys.global_batches(3), RANK, RANKS), ckpt_path=resume)
        return module, spy

    straight, kept = run(2, [Save()])
    resumed, spy = run(2, [], place / "lora.ckpt")
    saved: list[str] = []
    for file in sorted((place / "lora.ckpt" / "policy" / "checkpoint").glob("*model_states.pt")):
        state = torch.load(file, weights_only=False)
        saved += [name for name, value in state["module"].items() if value is not None and value.numel()]
    return {
        "loss": difference(resumed.losses, straight.losses[3:]),
        "weight": weight_difference(spy.weights, kept.weights) if RANK == 0 else 0.0,
        "saved_base": [name for name in saved if "lora" not in name],
        "moved": straight.losses[0] != straight.losses[3],
    }


class Export(toys.pl.Callback):
    """Writes the policy as a Hugging Face folder while the engines live."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def on_train_end(self, trainer: Any, module: Any) -> None:
        state = trainer.strategy.consolidated_state_dict("policy")
        if trainer.is_global_zero:
            module.policy.module.save_pretrained(self.place, state_dict=state)


def export(folder: Path, model: str, tied: str) -> dict[str, float]:
    """Exported weights of every stage, loaded by Transformers, against plain Lightning's; tied embeddings too."""
    report = {}
    for kind, source in (("plain", model), ("tied", tied)):
        plain = fit(None, model=source, batches=2)["weights"]
        for stage in range(4):
            place = folder / f"export-{kind}-{stage}"
            module = toys.Toy(source)
            run = toys.trainer(f"rlhf_zero{stage}", RANKS, callbacks=[Export(place)])
            run.fit(module, toys.ShareLoader(toys.global_batches(2), RANK, RANKS))
            run.strategy.barrier()
            loaded = {f"policy.{k}": v for k, v in LlamaForCausalLM.from_pretrained(place).state_dict().items()}
            report[f"{kind}, stage {stage}"] = weight_difference(loaded, plain)
    return report
