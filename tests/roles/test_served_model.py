"""Models behind a real ``vllm serve`` against the same models in this process.

Covers ``rollout/server/completions.py`` too.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.test_forward import experience
from modules import data_runs
from rl_runs import fit_run, weights
from rollout.server.test_connection import SECRET, Misbehaviour, completion
from tiny_models import tiny_model

from rlhfkit import DistillationModule, OnPolicyDistillationModule, VLLMServer
from rlhfkit.data.batch import TokenExample
from rlhfkit.data.images import Image
from rlhfkit.models import load_causal_lm, policy_output
from rlhfkit.modules.parts import Reference
from rlhfkit.modules.parts.precomputed_teacher import PrecomputedTeacher
from rlhfkit.modules.parts.teacher import DivergenceLoss
from rlhfkit.roles import ModelPool, ModelPoolError, ServedModel
from rlhfkit.roles.frozen_model import FrozenModel
from rlhfkit.rollout.weight_sync.source import ModuleWeights
from rlhfkit.serving.access import AccessToken
from rlhfkit.serving.server import Server

EXACT = 1e-5  # float32 on both sides; what is left is the order of summation
FLOAT32: Any = {"weights": torch.float32, "compute": torch.float32}
ADDRESS = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model than the one that the server was started with, of the same shape."""
    return tiny_model(tmp_path_factory.mktemp("served") / "teacher", seed=1)


@pytest.fixture(scope="module")
def served(vllm_server: str, vllm_model: Path, folder: Path) -> Iterator[ServedModel]:
    engine = VLLMServer(vllm_server, start_timeout=600)
    engine.start(str(vllm_model), dtype=torch.float32)
    engine.load(ModuleWeights(load_causal_lm(str(folder))), 1)
    engine.close()
    made = ServedModel(str(folder), vllm_server)
    yield made
    made.close()


@pytest.mark.vllm
def test_log_probs_are_those_of_the_model_in_this_process(folder: Path, served: ServedModel) -> None:
    batch = experience([(4, 5), (2, 2), (6, 6), (3, 3)])
    served.start("logprobs", **FLOAT32)
    with torch.no_grad():
        expected = policy_output(load_causal_lm(str(folder)).eval(), batch, batch.action_mask).logprobs
    whole, some = (served.submit(batch, rows) for rows in ([torch.arange(4)], [torch.tensor([2]), torch.tensor([0])]))
    torch.testing.assert_close(whole.result(), expected, rtol=0, atol=EXACT)
    wanted = torch.zeros(4, 1)
    wanted[[0, 2]] = 1
    torch.testing.assert_close(some.result(), expected * wanted, rtol=0, atol=EXACT)
    batch.temperature = 0.5
    with pytest.raises(ModelPoolError, match=r"at temperature 1, and samples are at 0.5: use SamplingSpec"):
        served.submit(batch, [torch.arange(4)])


@pytest.mark.vllm
def test_a_student_learns_the_same_from_a_served_teacher_on_its_own_samples(
    tmp_path: Path, folder: Path, served: ServedModel
) -> None:
    trained, knobs = [], {"parts": [DivergenceLoss("jsd", top_k=7).plain()]}
    for teacher in (str(folder), ServedModel.of(served.plain())):
        _, module, _ = fit_run(
            tmp_path, module=OnPolicyDistillationModule, module_arguments={"teacher": teacher} | knobs, max_epochs=1
        )
        trained.append(weights(module))
    for name, tensor in trained[0].items():
        torch.testing.assert_close(trained[1][name], tensor, rtol=0, atol=EXACT)


@pytest.mark.vllm
def test_likeliest_tokens_of_a_server_teach_what_those_of_a_loaded_teacher_do(
    tmp_path: Path, folder: Path, served: ServedModel
) -> None:
    data_runs.prepare(tmp_path)
    made: list[DistillationModule] = []
    for teacher in (str(folder), ServedModel.of(served.plain())):
        arguments: dict[str, Any] = {"top_k": 5, "precompute_teacher": True, "lr": 1e-3, "divergence": "reverse_kl"}
        module = DistillationModule(
            str(tmp_path / "reference"), teacher, parts=[PrecomputedTeacher(cache=str(tmp_path / "c"))], **arguments
        )
        data_runs.trainer(tmp_path, max_epochs=1).fit(module, data_runs.data(tmp_path, DistillationModule))
        made.append(module)
    assert len(list((tmp_path / "c").iterdir())) == 2
    for name, tensor in weights(made[0]).items():
        torch.testing.assert_close(weights(made[1])[name], tensor, rtol=0, atol=1e-4)  # Adam's first steps are signs
    served.start("logprobs", **FLOAT32)
    with pytest.raises(ModelPoolError, match="greater than max allowed: 20"):
        served.top_tokens([TokenExample([5, 6, 7], [True] * 3)], 30)


def test_a_server_has_no_rewards() -> None:
    with pytest.raises(ModelPoolError, match="has no rewards or values: RemoteReward"):
        ServedModel("model", ADDRESS).start("reward", **FLOAT32)


def test_plain_values_say_which_kind_it_was() -> None:
    for one in (ServedModel("model", ADDRESS, concurrency=3), ModelPool("model", num_replicas=2)):
        found = FrozenModel.of(one.plain())
        assert type(found) is type(one)
        assert found.plain() == one.plain()
        assert FrozenModel.of(one) is one
    assert FrozenModel.of(None) is None
    written = {"class_path": "rlhfkit.ModelPool", "init_args": {"model": "model"}}  # as in YAML
    assert isinstance(Reference(written).pool, ModelPool)
    with pytest.raises(TypeError, match="ModelPool is no ServedModel"):
        ServedModel.of(ModelPool("model").plain())


@pytest.fixture
def misbehaving(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Misbehaviour, ServedModel]]:
    """A server over HTTP whose answers a test sets, with a context of 64 tokens, and a connected model."""
    app = Misbehaviour()
    monkeypatch.setenv("SERVED_TOKEN", SECRET)
    with Server(app, token=AccessToken(SECRET), shutdown_timeout=1) as server:
        made = ServedModel("model", server.url, token_variable="SERVED_TOKEN", start_timeout=300, retries=0)
        made.connect()
        yield app, made
        made.close()


def test_an_answer_that_is_not_vllms_is_an_error_that_reaches_the_other_ranks(
    misbehaving: tuple[Misbehaviour, ServedModel],
) -> None:
    app, served = misbehaving
    batch = experience([(4, 5), (2, 2)])
    app.answer = lambda body, number: completion(body | {"prompt_logprobs": None})
    with pytest.raises(ModelPoolError, match=r"the served model has no log-probs for this run: .*no log-probs of prom"):
        served.submit(batch, [torch.arange(2)]).result()
    app.answer = lambda body, number: completion(body)  # each token alone, and three are asked for
    with pytest.raises(ModelPoolError, match="returned 1 of the 3 likeliest tokens"):
        served.top_tokens([TokenExample([5, 5, 5], [True] * 3)], 3)


def test_a_sequence_that_the_server_does_not_take_is_an_error_where_its_numbers_are_waited_for(
    misbehaving: tuple[Misbehaviour, ServedModel],
) -> None:
    """Only one rank may have it: where it is asked about, the others would not learn of it."""
    _, served = misbehaving
    batch = experience([(4, 5), (30, 34)])
    assert served.submit(batch, [torch.tensor([0])]).result()[0, 3:8].tolist() == [-2.0] * 5
    pending = served.submit(batch, [torch.arange(2)])
    with pytest.raises(ModelPoolError, match=r"takes sequences of 2 to 63 tokens .*got one of 64"):
        pending.result()
    batch.attachments = ((), (Image(b"a picture"),))
    assert served.submit(batch, [torch.tensor([0])]).result()[0, 3:8].tolist() == [-2.0] * 5
    with pytest.raises(ModelPoolError, match=r"a sample has images, which /v1/completions of vLLM does not take"):
        served.submit(batch, [torch.tensor([1])]).result()


def test_nobody_at_the_address_is_an_error_within_the_limit() -> None:
    with pytest.raises(ModelPoolError, match=rf"no vLLM server answers at {ADDRESS} within 0.5 s"):
        ServedModel("model", ADDRESS, start_timeout=0.5).start("logprobs", **FLOAT32)
