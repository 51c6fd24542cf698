"""One tokenizer and chat template in a run: data, episodes, engines, checkpoints and exports have the same."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import additions, fit_run
from tiny_models import chat_tokenizer, tiny_model, tiny_tokenizer
from transformers import AutoTokenizer

from rlhfkit import (
    AgentEpisodes,
    Environment,
    Episodes,
    GRPOModule,
    LocalEngine,
    Prompt,
    PromptDataModule,
    RolloutCallback,
    SamplingSpec,
    SFTDataModule,
    SFTModule,
    Step,
)
from rlhfkit.cli.export import export
from rlhfkit.episodes import Action
from rlhfkit.models.load import tokenizer_differences
from rlhfkit.modules.parts.critic import ValueLoss
from rlhfkit.modules.parts.critic_elsewhere import CriticModule, _make_critic
from rlhfkit.rewards import EnvironmentReward
from rlhfkit.roles.replica import TextReading
from rlhfkit.rollout.groups import GroupError, GroupRunner
from rlhfkit.rollout.vllm.arguments import check_vllm_sampling

TEMPLATE = (
    "{% for message in messages %}[{{ mark or '' }}{{ message['role'] }}: {{ message['content'] }}]{% endfor %}"
    "{% if add_generation_prompt %}[{{ mark or '' }}assistant: {% endif %}"
)
OTHER = "{% for message in messages %}{{ message['role'] }}> {{ message['content'] }}\n{% endfor %}assistant> "


def other_end() -> Any:
    """A tokenizer whose answers end with a bracket."""
    tokenizer = chat_tokenizer(TEMPLATE)
    tokenizer.eos_token = "]"
    return tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose own tokenizer writes conversations in another way."""
    folder = tiny_model(tmp_path_factory.mktemp("model"))
    chat_tokenizer(OTHER).save_pretrained(folder)
    return str(folder)


def setup_for(data: Any, module: Any) -> None:
    data.trainer = SimpleNamespace(lightning_module=module, strategy=None, global_rank=0, world_size=1)
    data.setup()


def conversations(**arguments: Any) -> SFTDataModule:
    rows = [{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}] * 2
    return SFTDataModule(rows, **({"tokenizer": chat_tokenizer(TEMPLATE)} | arguments))


class Game(Environment):
    """Two turns, with a chat message between them."""

    async def step(self, action: Action) -> Step:
        if action.turn == 1:
            return Step(reward=1.0, done=True)
        return Step([{"role": "user", "content": "again"}], reward=0.0)


@pytest.mark.parametrize("where", ["tokenizer", "chat_template_kwargs", "row"])
def test_all_turns_of_an_episode_are_in_the_template_of_the_data(tmp_path: Path, model: str, where: str) -> None:
    arguments = {"tokenizer": chat_tokenizer(TEMPLATE)} if where == "tokenizer" else {}
    if where == "chat_template_kwargs":
        arguments = {"chat_template_kwargs": {"chat_template": TEMPLATE}}
    sampling = SamplingSpec(group_size=2, max_new_tokens=4)
    callback = RolloutCallback(EnvironmentReward(), group=Episodes(Game, max_turns=2), sampling=sampling)

    def with_own(_: str, **options: Any) -> PromptDataModule:
        own = {"chat_template_kwargs": json.dumps({"chat_template": TEMPLATE, "mark": "#"})} if where == "row" else {}
        return PromptDataModule([row | own for row in additions(40)], **options)

    _, module, _ = fit_run(
        tmp_path, model=Path(model), rollouts=callback, datamodule=with_own, data_arguments=arguments, max_epochs=1
    )
    sample = callback.samples[0]
    assert sample.action_mask is not None
    turns = "".join("a" if chosen else "e" for chosen in sample.action_mask.tolist())
    first, last = turns.index("e"), turns.rindex("e") + 1
    mark = "#" if where == "row" else ""
    number = sample.prompt.index
    asked, more = tiny_tokenizer().batch_decode([sample.prompt.token_ids, sample.token_ids[first:last]])
    assert asked == f"[{mark}user: {number}+{number}=][{mark}assistant: "
    assert more == f"][{mark}user: again][{mark}assistant: "
    module.save_pretrained(tmp_path / "export")
    exported = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert exported.chat_template == (OTHER if where == "row" else TEMPLATE)


def test_exports_and_checkpoints_keep_the_tokenizer_of_the_data(tmp_path: Path, model: str) -> None:
    module, data = SFTModule(model), conversations(micro_batch_size=2)
    trainer = L.Trainer(accelerator="cpu", logger=False, max_steps=1, default_root_dir=tmp_path)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    module.save_pretrained(tmp_path / "saved")
    export(tmp_path / "run.ckpt", tmp_path / "exported")
    loaded = SFTModule.load_from_checkpoint(tmp_path / "run.ckpt", weights_only=True)
    loaded.save_pretrained(tmp_path / "loaded")
    for folder in ("saved", "exported", "loaded"):
        found = AutoTokenizer.from_pretrained(tmp_path / folder)
        assert tokenizer_differences(found, chat_tokenizer(TEMPLATE)) == [], folder
    checkpoint = dict[str, Any](state_dict={})
    SFTModule(model).on_save_checkpoint(checkpoint)
    assert "tokenizer_files" not in checkpoint  # of which the model's own needs none


def test_two_tokenizers_in_one_run_are_named_with_the_cure(model: str) -> None:
    module = SFTModule(model)
    module.tokenizer = chat_tokenizer(TEMPLATE)
    module.tokenizer = chat_tokenizer(TEMPLATE)  # the same again
    given = r"SFTDataModule\(tokenizer=...\)"
    with pytest.raises(ValueError, match=rf"SFTModule.tokenizer and {given} differ in special tokens: give both"):
        setup_for(conversations(tokenizer=other_end()), module)
    pretraining = conversations(tokenizer=chat_tokenizer(OTHER))
    options = {"rollout_batch_size": 1, "tokenizer": chat_tokenizer(TEMPLATE)}
    prompts = PromptDataModule([{"prompt": "1"}], pretraining_data=pretraining, **options)
    with pytest.raises(ValueError, match=rf"PromptDataModule\(tokenizer.*and {given} differ in chat template"):
        setup_for(prompts, SFTModule(model))

    class Own(SFTModule):
        @property
        def tokenizer(self) -> Any:
            return chat_tokenizer(OTHER)

    with pytest.raises(ValueError, match=rf"Own.tokenizer and {given} differ in chat template"):
        setup_for(conversations(), Own(model))
    data = conversations(tokenizer=None)
    for _ in range(2):
        setup_for(data, SFTModule(model))
    with pytest.raises(ValueError, match=r"an earlier run of this SFTDataModule differ in chat template: .*new Data"):
        setup_for(data, module)


def test_data_that_was_opened_alone_brings_its_tokenizer_to_the_run_which_pads_with_its_end(model: str) -> None:
    tokenizer, module = chat_tokenizer(TEMPLATE), SFTModule(model)
    tokenizer.pad_token = None
    data = conversations(tokenizer=tokenizer)
    data.setup()
    setup_for(data, module)
    assert (module.tokenizer.chat_template, module.tokenizer.pad_token) == (TEMPLATE, "<eos>")
    assert tokenizer.pad_token is None  # the user's own stays as it is


def test_engines_stop_where_the_tokenizer_of_the_run_says(model: str) -> None:
    engine = LocalEngine()
    engine.configure_tokenizer(other_end(), None)
    engine.start(model, dtype=torch.float32, load_weights=True)
    bracket = tiny_tokenizer().convert_tokens_to_ids("]")
    sampling = SamplingSpec(group_size=16, max_new_tokens=64, temperature=2.0)
    samples = [one.token_ids.tolist() for one in engine.generate([Prompt(0, [5, 6])], sampling, iteration=0)]
    assert any(ids[-1] == bracket for ids in samples)
    assert not any(bracket in ids[:-1] for ids in samples)
    engine.close()
    engine.start(model, dtype=torch.float32, load_weights=True)  # another run, with the model's own
    assert bracket not in engine._stops
    engine.close()


def test_episodes_take_the_template_arguments_of_the_data(model: str) -> None:
    arguments = {"mark": "#", "tools": [{"name": "search"}]}
    with pytest.raises(ValueError, match=r"other chat_template_kwargs \(mark\).*give them to the DataModule alone"):
        Episodes(Game, chat_template_kwargs={}).configure_tokenizer(chat_tokenizer(TEMPLATE), arguments)
    Episodes(Game, chat_template_kwargs={"mark": "#"}).configure_tokenizer(chat_tokenizer(TEMPLATE), arguments)
    endpoints = []

    def agent(connection: Any, prompt: Prompt) -> float:
        endpoints.append(agents._endpoint)
        return 1.0

    agents = AgentEpisodes(agent)
    engine = LocalEngine()
    engine.start(model, dtype=torch.float32, load_weights=True)
    runner = GroupRunner(engine, agents)
    runner.configure(chat_tokenizer(TEMPLATE), arguments, model)
    with pytest.raises(GroupError, match="sent no request"):
        runner.generate([Prompt(0, [5])], SamplingSpec(group_size=2, max_new_tokens=2), iteration=0)
    assert endpoints[0].observations.tokenizer.chat_template == TEMPLATE
    assert endpoints[0].observations.formatter.arguments == {"mark": "#"}  # requests bring tools of their own
    runner.close()


def test_vllm_finds_texts_only_with_the_vocabulary_of_the_run() -> None:
    check_vllm_sampling(SamplingSpec(stop_token_ids=(3,)), same_vocabulary=False)
    check_vllm_sampling(SamplingSpec(stop=("\n",)))
    for spec in (SamplingSpec(stop=("\n",)), SamplingSpec(regex="a+")):
        with pytest.raises(ValueError, match=r"another vocabulary: save it with the model"):
            check_vllm_sampling(spec, same_vocabulary=False)


def test_models_and_critics_elsewhere_have_the_tokenizer_of_the_run(tmp_path: Path, model: str) -> None:
    mine = chat_tokenizer(TEMPLATE)
    mine.add_special_tokens({"additional_special_tokens": ["x"]})
    reading = TextReading("text", mine, model, False)
    token_ids = torch.tensor([mine("axb")["input_ids"]])
    read, _ = reading.read(token_ids, torch.tensor([3]), torch.tensor([[True, True]]))
    assert tiny_tokenizer().decode(read[0].tolist()) == "ab"  # x is a control token of this run
    module = GRPOModule(model)
    assert module.given_tokenizer is None
    module.tokenizer = mine
    critic = _make_critic(module.given_tokenizer, model, value_loss=ValueLoss())
    assert isinstance(critic, CriticModule)
    assert critic.tokenizer is mine
    assert _make_critic(None, model, value_loss=ValueLoss()).given_tokenizer is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda one: None, []),
        (lambda one: setattr(one, "pad_token", "<eos>"), []),
        (lambda one: setattr(one, "chat_template", OTHER), ["chat template"]),
        (lambda one: setattr(one, "eos_token", "a"), ["special tokens"]),
        (lambda one: one.add_tokens(["zz"]), ["vocabulary"]),
        (lambda one: one.add_tokens(["1+1"]), ["vocabulary", "way to divide a text"]),
    ],
)
def test_differences_of_tokenizers(change: Any, named: list[str]) -> None:
    other = chat_tokenizer(TEMPLATE)
    change(other)
    assert tokenizer_differences(chat_tokenizer(TEMPLATE), other) == named
