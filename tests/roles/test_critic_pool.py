"""A critic that is trained by ranks of its own against the same critic in the module.

Covers critic_desk.py, critic_rank.py and modules/parts/critic_elsewhere.py. One Ray session serves
all tests.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import ray_worker
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import StrategyRegistry
from modules.data_runs import trainer
from modules.on_policy.test_ppo_runs import MomentumPPO
from rl_runs import RANK, PlainGRPO, SaveAt, fit_run, on_all_ranks, setup_run
from strategies import ranks
from strategies.parity_cases import weight_difference
from tiny_models import tiny_model
from torch import Tensor

from rlhfkit import Placement, PPOModule, RunReport
from rlhfkit.models.heads import load_scalar_model
from rlhfkit.modules.parts import CriticWarmup, Reference
from rlhfkit.modules.parts.critic import Critic, ValueLoss
from rlhfkit.roles import CriticPool, CriticPoolError, critic_pool
from rlhfkit.roles.critic_desk import CriticDesk
from rlhfkit.roles.critic_pool import STRATEGIES, _Ranks
from rlhfkit.roles.critic_rank import CriticLoader, CriticWork, Request, merge_requests
from rlhfkit.strategies.checkpoint.directory import read_manifest

pytestmark = pytest.mark.ray

CRITIC: dict[str, Any] = {"optimizer": "sgd", "optimizer_arguments": {"momentum": 0.9}}
PLAIN: dict[str, Any] = {
    "lr": 0.05,
    "critic_lr": 0.05,
    "kl_coef": 0.05,
    "optimization": {"weight_decay": 0.01},
    "parts": [ValueLoss(clip=0.05).plain()],
}
"""With ``CRITIC`` the optimizer of ``MomentumPPO``."""


class SaveAndExport(SaveAt):
    """Exports the critic too, beside the checkpoint."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *arguments)
        if self.count == self.batch:
            pl_module.save_pretrained(self.path.with_name("exported"), child="critic")


class KillOf(L.Callback):
    """Sends a signal to the last rank of a critic after a batch; from then on what is asked of it has a limit."""

    def __init__(self, pool: CriticPool, batch: int, signal: int, limit: float = 3600.0) -> None:
        self.pool, self.batch, self.signal, self.limit, self.count = pool, batch, signal, limit, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1
        if self.count == self.batch:
            self.pool.request_timeout = self.limit
            if trainer.global_rank == 0:
                os.kill(self.pool.processes[-1][1], self.signal)


ADAM: dict[str, Any] = {
    "lr": 1e-3,
    "kl_coef": 0.05,
    "optimization": {"lr_schedule": "linear", "warmup_steps": 1, "weight_decay": 0.1},
}


def adam_parts(critic: CriticPool | None) -> list[Any]:
    """A critic wherever it is trained, its loss and its warm-up."""
    return [Critic(critic, lr=2e-3, normalize=True), ValueLoss(0.5, clip=0.05), CriticWarmup(1)]


def run(folder: Path, critic: CriticPool | None, *, module: Any = PPOModule, arguments: Any = ADAM, **more: Any) -> Any:
    """Three updates of two micro-batches in each of two iterations; returns Trainer, module and data."""
    given = {"parts": adam_parts(critic)} if arguments is ADAM else {"critic": critic}
    return setup_run(
        folder,
        module=module,
        module_arguments=arguments | given,
        data_arguments={"rollout_batch_size": 12, "micro_batch_size": 8},
        gradient_clip_val=0.5,
        **more,
    )[:3]


def test_a_critic_with_two_ranks_is_the_one_in_the_module_resumes_bitwise_and_is_exported(
    tmp_path: Path, ray_session: None
) -> None:
    trainer, module, data = run(tmp_path, None)
    trainer.fit(module, data)
    report = RunReport(str(tmp_path / "report.html"))
    save = SaveAndExport(
        tmp_path / "saved.ckpt", batch=9
    )  # of 6 an iteration: the first micro-batch of a step of the second
    pool = CriticPool(num_ranks=2, strategy="rlhf_zero2")
    placed_trainer, placed, data = run(tmp_path, pool, callbacks=[save, report])
    placed_trainer.fit(placed, data)
    assert not hasattr(placed, "critic")
    assert placed_trainer.global_step == 6
    assert weight_difference(module.critic.state_dict(), pool.weights) < 1e-6
    assert weight_difference(module.policy.state_dict(), placed.policy.state_dict()) < 1e-6
    names = [name for name in trainer.callback_metrics if name.startswith(("value/", "policy/", "grad_norm/"))]
    assert {"value/loss", "value/explained_variance", "value/clip_fraction", "grad_norm/critic"} <= set(names)
    for name in names:
        expected = trainer.callback_metrics[name]
        torch.testing.assert_close(placed_trainer.callback_metrics[name], expected, rtol=1e-4, atol=1e-5)
    assert placed_trainer.callback_metrics["value/updates"] == 6

    # The critic's ranks note when they work: two iterations of three steps.
    noted = Counter((one.lane, one.phase) for one in report.times.intervals if one.lane.startswith("critic"))
    for lane in ("critic 0", "critic 1"):
        assert (noted[lane, "update"], noted[lane, "compute"]) == (6, 2)
        assert 0 < report.times.busy_shares()[lane] <= 1

    # It is exported by its ranks, and after the fit.
    during = load_scalar_model(str(tmp_path / "exported"), new_head=False)
    assert weight_difference(during.state_dict(), pool.weights) > 0  # of an earlier step
    after = load_scalar_model(str(placed.save_pretrained(tmp_path / "critic", child="critic")), new_head=False)
    assert weight_difference(after.state_dict(), pool.weights) == 0

    again = CriticPool(num_ranks=2, strategy="rlhf_zero2")
    trainer, resumed, data = run(tmp_path, again)
    trainer.fit(resumed, data, ckpt_path=str(save.path))
    assert weight_difference(placed.policy.state_dict(), resumed.policy.state_dict()) == 0
    assert weight_difference(pool.weights, again.weights) == 0
    assert not list(tmp_path.glob(".critic-*"))  # what is written on the way is gone


def test_a_stuck_rank_is_an_error_within_the_limit_that_says_what_was_waited_for(
    tmp_path: Path, ray_session: None
) -> None:
    critic = CriticPool(strategy="rlhf_zero0", **CRITIC)
    kill = KillOf(critic, batch=1, signal=signal.SIGSTOP, limit=5.0)
    trainer, module, data = run(tmp_path, critic, module=MomentumPPO, callbacks=[kill])
    with pytest.raises(CriticPoolError, match=r"waited 5 s for the critic's updates of an iteration of 1 critic rank"):
        trainer.fit(module, data)


def with_a_reference(own: Path, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Weights of a run of GRPO on two ranks."""
    _, module, _ = fit_run(
        own,
        module=PlainGRPO,
        module_arguments={"lr": 0.05, "kl_coef": 0.1, **arguments},
        data_arguments={"micro_batch_size": 4},
        **on_all_ranks(),
    )
    assert hasattr(module, "reference") != bool(arguments)
    return module.policy.state_dict()


def with_critics_elsewhere(folder: Path, own: Path) -> None:
    """The same critic for all ranks, who lose it with an error and resume; and a module that has had one."""

    def run(critic: CriticPool | None, strategy: str, *callbacks: Any, trained: Any = None, **fit: Any) -> Any:
        trainer, module, data, _ = setup_run(
            own,
            module=MomentumPPO,
            module_arguments=PLAIN | ({} if critic is None else {"critic": critic}),
            data_arguments={"micro_batch_size": 4},
            callbacks=callbacks,
            gradient_clip_val=0.5,
            **on_all_ranks(strategy),
        )
        trainer.fit(trained or module, datamodule=data, **fit)
        return module

    def pool(ranks: int, strategy: str) -> CriticPool:
        return CriticPool(
            str(folder / "rank0" / "model"), num_ranks=ranks, strategy=strategy, start_timeout=600.0, **CRITIC
        )

    def check(module: Any, critic: CriticPool, policy: Any, values: Any, tolerance: float) -> None:
        """The critic's weights come back to one of the ranks."""
        assert weight_difference(policy.state_dict(), module.policy.state_dict()) <= tolerance
        assert critic.weights is None or weight_difference(values, critic.weights) <= tolerance

    expected = run(None, "ddp")
    three, one, dying, again = pool(3, "rlhf_zero3"), *(pool(1, "rlhf_zero2") for _ in range(3))
    check(run(three, "ddp"), three, expected.policy, expected.critic.state_dict(), 1e-6)
    save = SaveAndExport(folder / "saved.ckpt", batch=6)
    straight = run(one, "rlhf_zero1", save)
    check(straight, one, expected.policy, expected.critic.state_dict(), 1e-6)
    saved = read_manifest(save.path)["files"].keys()
    assert {"module/critic/manifest.json", "module/critic/rank_00000.pt"} < saved  # verified
    straight.save_pretrained(folder / "after", child="critic")  # of both ranks together, after the fit
    if one.weights is not None:
        exported = load_scalar_model(str(folder / "after"), new_head=False)
        assert weight_difference(exported.state_dict(), one.weights) == 0
    with pytest.raises(CriticPoolError, match="have ended with the last fit"):  # on both ranks
        run(None, "rlhf_zero1", trained=straight)
    with pytest.raises(CriticPoolError, match=r"the critic's ranks have failed: RankError: rank 0 of 1.*died"):
        run(dying, "rlhf_zero1", KillOf(dying, 2, signal.SIGKILL), ckpt_path=str(save.path))
    check(run(again, "rlhf_zero1", ckpt_path=str(save.path)), again, straight.policy, one.weights, 0)


def train(folder: Path) -> None:
    """Entry point of a training rank, with one Ray for all: a reference elsewhere, then critics."""
    os.environ.pop("RAY_ADDRESS", None)
    ray_worker.use()
    own = folder / f"rank{RANK}"  # ranks must not write the same model
    tiny_model(own / "model")  # before there is a process group, in which rank 0 alone saves
    placement = Placement(trainer=2, reference=2)  # rank 0 plans, and replicas read its folder
    reference = placement.reference(str(folder / "rank0" / "model"), start_timeout=600.0)
    plain = with_a_reference(own, {})
    assert weight_difference(plain, with_a_reference(own, {"parts": [Reference(reference)]})) < 1e-6
    with_critics_elsewhere(folder, own)


@pytest.mark.distributed
def test_two_training_ranks_have_the_same_models_elsewhere_lose_a_critic_with_an_error_and_resume(
    tmp_path: Path,
) -> None:
    ranks.run(train, 2, tmp_path)


def test_a_critic_that_cannot_be_placed_is_an_error(
    tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(critic_pool, "_REPORT_SECONDS", 600.0)  # in which the critic's desk must be up, too
    pool = CriticPool(resources={"GPU": 64}, start_timeout=2.0)
    trainer, module, data = run(tmp_path, pool)
    with pytest.raises(CriticPoolError, match="64 GPU are needed and the cluster has 0"):
        trainer.fit(module, data)


def test_the_strategies_are_those_that_are_registered() -> None:
    assert set(STRATEGIES) == {name for name in StrategyRegistry.available_strategies() if name.startswith("rlhf_")}


def test_ranks_that_would_share_a_gpu_are_an_error_before_anything_starts(tmp_path: Path) -> None:
    trainer, module, data = run(tmp_path, CriticPool(num_ranks=2, resources={"GPU": 0.5}))
    with pytest.raises(ValueError, match="whole GPUs, as NCCL does not share them"):
        trainer.fit(module, data)


def test_an_answer_that_does_not_arrive_is_an_error_of_the_pool(ray_session: None) -> None:
    import ray

    @ray.remote(num_cpus=0)
    def answer(seconds: float) -> int:
        time.sleep(seconds)
        return 1

    assert CriticPool().fetch(answer.remote(0.0)) == 1
    never = answer.remote(3600.0)
    with pytest.raises(CriticPoolError, match=r"what a critic rank has answered did not arrive: GetTimeout.*resumed"):
        CriticPool(request_timeout=0.5).fetch(never)
    ray.cancel(never, force=True)


def test_weights_that_do_not_come_back_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Desk:
        class fail:
            @staticmethod
            def remote(message: str) -> None: ...

    def broken(**_: Any) -> None:
        raise RuntimeError("no memory for the weights")

    assert _Ranks(broken, Desk()).returned(600.0) is None
    assert "did not return its weights: RuntimeError: no memory for the weights" in caplog.text


def test_a_module_is_made_again_with_its_critic_elsewhere() -> None:
    module = PPOModule("anywhere", critic=CriticPool("folder", num_ranks=3, resources={"GPU": 1}))
    restored = PPOModule(**dict(module.hparams))
    assert restored.critic_part.elsewhere.pool.plain() == module.critic_part.elsewhere.pool.plain()


@pytest.mark.parametrize("receivers", [1, 2, 3, 4, 5])
def test_micro_batches_of_all_ranks_are_divided_in_the_order_of_training_and_each_step_is_complete(
    receivers: int,
) -> None:
    async def messages() -> list[Any]:
        desk = CriticDesk(2, receivers)
        sent = [("values", "v", 0), *(("batch", number, 2) for number in range(4)), ("report", "r", 0)]
        for rank in (1, 0):  # one is ahead, and its messages arrive in any order
            for number in (2, 0, 1, 5, 4, 3):
                kind, part, micro_batches = sent[number]
                await desk.post(rank, number, kind, (rank, part), micro_batches)
        read = [[(await desk.messages(number))[1] for number in range(6)] for _ in range(receivers)]
        assert read == read[:1] * receivers  # all critic ranks read the same
        assert not desk._messages.values  # and nothing is kept
        return read[0]

    made = list(merge_requests(asyncio.run(messages()), receivers))
    assert [made[0].kind, made[-1].kind] == ["values", "report"]
    steps = [request for request in made if request.kind == "batches"]
    each = -(-4 // receivers)
    assert [request.micro_batches for request in steps] == [each] * len(steps)
    for step in range(2):
        own = steps[step * each : (step + 1) * each]
        found = [part for request in own for part in request.parts]
        assert [part for part in found if part is not None] == [
            (r, n) for n in (2 * step, 2 * step + 1) for r in (0, 1)
        ]
        assert len(found) == each * receivers
        assert own[0].scale == each * receivers / 4


def test_a_critic_trains_on_when_the_run_turns_out_longer(tmp_path: Path) -> None:
    """A callback may raise ``max_epochs``; the number of steps that the critic was told is for its learning rates."""

    class Ordered(CriticWork):
        """Reads its requests from a list, not from a desk."""

        orders = iter([*(Request(number, "batches", [None], 1, 1.0) for number in range(3)), Request(3, "stop", [])])

        def _read(self) -> Request:
            return next(self.orders)

        def _send(self, request: Request, value: Any) -> None:
            pass

        def _keep_weights(self, trainer: L.Trainer) -> None:
            pass

        def next_batch(self) -> Any:
            return torch.ones(1, 32)

        def on_train_batch_end(self, *args: Any) -> None:
            pass

    module = BoringModel()
    work = Ordered(cast(Any, module), None, 0)
    run = trainer(tmp_path, callbacks=[work])
    run.fit(module, train_dataloaders=CriticLoader(work))
    assert run.global_step == 3


def test_everybody_who_waits_learns_of_a_failure() -> None:
    async def wait() -> list[Any]:
        desk = CriticDesk(1, 1)
        waiting = [asyncio.create_task(desk.messages(0)), asyncio.create_task(desk.answers(0))]
        await asyncio.sleep(0)
        await desk.fail("rank 0 died")
        return [*await asyncio.gather(*waiting), await desk.messages(7)]

    assert asyncio.run(wait()) == [("failed", "rank 0 died")] * 3
