"""Which tokens of a conversation are learned, in a dozen styles of chat template: exact, and written by hand.

The templates in ``templates/`` follow the published formats. Expected texts mark what is learned with « and ».
"""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhfkit.datamodules.tokenization.assistant_mask import span_mask, write_conversation
from rlhfkit.datamodules.tokenization.chat import PromptFormatter, as_messages

TEMPLATES = Path(__file__).parent / "templates"
CHAT = [
    {"role": "system", "content": "Be 2 brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+3, 5?"},
    {"role": "assistant", "content": "5."},
]
THOUGHTS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\none and one\n</think>\n\n2"},
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": "<think>\ntwo and three\n</think>\n\n5"},
]
EXPECTED = {
    "chatml": "<|im_start|>system\nBe 2 brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
    "<|im_start|>assistant\n«2<|im_end|>»\n<|im_start|>user\nAnd 2+3, 5?<|im_end|>\n"
    "<|im_start|>assistant\n«5.<|im_end|>»\n",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe 2 brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«2<|eot_id|>»"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd 2+3, 5?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«5.<|eot_id|>»",
    "gemma": "<bos><start_of_turn>user\nBe 2 brief.\n\n1+1?<end_of_turn>\n"
    "<start_of_turn>model\n«2<end_of_turn>»\n<start_of_turn>user\nAnd 2+3, 5?<end_of_turn>\n"
    "<start_of_turn>model\n«5.<end_of_turn>»\n",
    "mistral": "<s>[INST] 1+1?[/INST]« 2</s>»[INST] Be 2 brief.\n\nAnd 2+3, 5?[/INST]« 5.</s>»",
    # The empty thoughts are what the model has to write when it does not think.
    "qwen3": "<|im_start|>system\nBe 2 brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
    "<|im_start|>assistant\n«2<|im_end|>»\n<|im_start|>user\nAnd 2+3, 5?<|im_end|>\n"
    "<|im_start|>assistant\n«<think>\n\n</think>\n\n5.<|im_end|>»\n",
    "phi3": "<|system|>\nBe 2 brief.<|end|>\n<|user|>\n1+1?<|end|>\n<|assistant|>\n«2<|end|>»\n"
    "<|user|>\nAnd 2+3, 5?<|end|>\n<|assistant|>\n«5.<|end|>»\n<|endoftext|>",
    "zephyr": "<|system|>\nBe 2 brief.</s>\n<|user|>\n1+1?</s>\n<|assistant|>\n«2</s>»\n"
    "<|user|>\nAnd 2+3, 5?</s>\n<|assistant|>\n«5.</s>»\n",
    "deepseek_r1": "<｜begin▁of▁sentence｜>Be 2 brief.<｜User｜>1+1?<｜Assistant｜>«2<｜end▁of▁sentence｜>»"
    "<｜User｜>And 2+3, 5?<｜Assistant｜>«5.<｜end▁of▁sentence｜>»",
    "command_r": "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be 2 brief.<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>1+1?<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>«2<|END_OF_TURN_TOKEN|>»"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>And 2+3, 5?<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>«5.<|END_OF_TURN_TOKEN|>»",
    "vicuna": "Be 2 brief. USER: 1+1? ASSISTANT:« 2</s>»USER: And 2+3, 5? ASSISTANT:« 5.</s>»",
    "alpaca": "Be 2 brief.\n\n### Instruction:\n1+1?\n\n### Response:\n«2\n\n»"
    "### Instruction:\nAnd 2+3, 5?\n\n### Response:\n«5.\n\n»",
}
TOKENS = ("END_OF_TURN", "START_OF_TURN", "SYSTEM", "USER", "CHATBOT")
EXPECTED["chatml_marked"] = EXPECTED["chatml"]
SPECIAL = {  # begin and end of sequence first
    **{name: ["<|endoftext|>", "<|im_end|>", "<|im_start|>"] for name in ("chatml", "chatml_marked", "qwen3")},
    "llama3": ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    "gemma": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]"],
    "phi3": ["<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
    "deepseek_r1": ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
    "command_r": ["<BOS_TOKEN>", *(f"<|{name}_TOKEN|>" for name in TOKENS)],
    **{name: ["<s>", "</s>"] for name in ("zephyr", "vicuna", "alpaca")},
}


@functools.cache
def merging_tokenizer() -> str:
    """A byte-level BPE with merges, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [re.sub("[«»]", "", text) for text in EXPECTED.values()] * 3
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def tokenizer_for(style: str, kind: str = "merges") -> Any:
    begin, end, *others = SPECIAL[style]
    if kind == "characters":
        tokenizer = tiny_tokenizer()
        tokenizer.add_special_tokens({"bos_token": begin, "eos_token": end})
    else:
        inner = Tokenizer.from_str(merging_tokenizer())
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=begin, eos_token=end)
    tokenizer.add_special_tokens({"additional_special_tokens": others})
    tokenizer.chat_template = (TEMPLATES / f"{style}.jinja").read_text()
    return tokenizer


def marked(tokenizer: Any, messages: Any, first: int = 0, **arguments: Any) -> str:
    """The conversation with what is learned in « », put together from the tokens."""
    style = PromptFormatter(tokenizer, chat_template_kwargs=arguments)
    written = write_conversation(style, messages, first=first)
    token_ids, mask = span_mask(tokenizer, written.text, written.spans)
    text, inside = "", False
    for token_id, learned in zip(token_ids, mask, strict=True):
        if learned != inside:
            text, inside = text + ("«" if learned else "»"), learned
        text += tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    return text + "»" * inside


@pytest.mark.parametrize("kind", ["characters", "merges"])
@pytest.mark.parametrize("style", EXPECTED)
def test_what_is_learned_is_what_the_assistant_has_to_say_or_its_last_answer_alone(style: str, kind: str) -> None:
    tokenizer, whole = tokenizer_for(style, kind), EXPECTED[style]
    assert marked(tokenizer, CHAT) == whole
    last = whole.rindex("«")
    assert marked(tokenizer, CHAT, first=4) == re.sub("[«»]", "", whole[:last]) + whole[last:]


@pytest.mark.parametrize("style", ["chatml", "gemma", "mistral", "qwen3", "phi3", "vicuna"])
def test_slow_tokenizers_that_know_no_offsets_find_the_same(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_for(style)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    assert marked(tokenizer, CHAT) == EXPECTED[style]


def test_thoughts_of_earlier_turns_are_gone_and_the_last_ones_learned() -> None:
    """Qwen3: a turn is written differently once others follow."""
    expected = (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n«2<|im_end|>»\n<|im_start|>user\n2+3?<|im_end|>\n"
        "<|im_start|>assistant\n«<think>\ntwo and three\n</think>\n\n5<|im_end|>»\n"
    )
    assert marked(tokenizer_for("qwen3"), THOUGHTS) == expected
    one, two = (
        {"content": "2", "reasoning_content": "one and one"},
        {"content": "5", "reasoning_content": "two and three"},
    )
    apart = [THOUGHTS[0], {"role": "assistant"} | one, THOUGHTS[2], {"role": "assistant"} | two]
    assert marked(tokenizer_for("qwen3"), apart) == expected
    assert marked(tokenizer_for("qwen3"), apart[:2], first=1) == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n«<think>\none and one\n</think>\n\n2<|im_end|>»\n"
    )


def test_what_the_template_writes_into_the_prompt_is_not_learned() -> None:
    """Without thinking, Qwen3's generation prompt has the empty thoughts in it already."""
    assert marked(tokenizer_for("qwen3"), CHAT[1:3], enable_thinking=False) == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n«2<|im_end|>»\n"
    )


def test_a_template_that_drops_all_thoughts_learns_the_answers_alone() -> None:
    """DeepSeek-R1: and its generation prompt, which opens thoughts, is nowhere in a finished conversation."""
    assert marked(tokenizer_for("deepseek_r1"), THOUGHTS) == (
        "<｜begin▁of▁sentence｜><｜User｜>1+1?<｜Assistant｜>«\n\n2<｜end▁of▁sentence｜>»"
        "<｜User｜>2+3?<｜Assistant｜>«\n\n5<｜end▁of▁sentence｜>»"
    )


@pytest.mark.parametrize("style", ["chatml", "llama3", "qwen3", "phi3", "zephyr", "command_r"])
def test_words_that_occur_elsewhere_and_turns_in_a_row_are_told_apart(style: str) -> None:
    said = (
        ("user", "assistant\nno"),
        ("assistant", "no"),
        ("assistant", "assistant"),
        ("user", "no"),
        ("assistant", "no"),
    )
    messages = [{"role": role, "content": content} for role, content in said]
    text = marked(tokenizer_for(style), messages)
    learned = [part.replace("<think>\n\n</think>\n\n", "") for part in re.findall("«(.*?)»", text, re.DOTALL)]
    end = {"llama3": "<|eot_id|>", "phi3": "<|end|>", "zephyr": "</s>", "command_r": "<|END_OF_TURN_TOKEN|>"}
    assert learned == [word + end.get(style, "<|im_end|>") for word in ("no", "assistant", "no")]


def test_a_template_that_takes_no_beginning_of_the_conversation_is_read_all_the_same() -> None:
    """Some raise an error as long as no user has spoken."""
    tokenizer = tokenizer_for("chatml")
    tokenizer.chat_template = (
        "{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 -%}"
        "{{ raise_exception('no user query') }}{%- endif -%}"
    ) + tokenizer.chat_template
    greeting = [{"role": "system", "content": "S"}, {"role": "assistant", "content": "Hi"}, *CHAT[1:3]]
    assert marked(tokenizer, greeting) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>assistant\n«Hi<|im_end|>»\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n«2<|im_end|>»\n"
    )


@pytest.mark.parametrize(
    ("style", "stop"), [("chatml", "learned"), ("chatml_marked", "learned"), ("phi3", "learned"), ("alpaca", "missing")]
)
def test_whether_the_end_of_a_turn_is_learned_is_known(style: str, stop: str) -> None:
    assert write_conversation(PromptFormatter(tokenizer_for(style)), CHAT).stop == stop


CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}]
CALLED = "turn.content ~ (('\\n' if turn.content else '') ~ '<call>add</call>' if turn.tool_calls else '')"
"""Qwen's way: a line break in front of the call, unless nothing was said before it."""


@pytest.mark.parametrize("content", ["", None, "I add."])
def test_a_turn_of_tool_calls_is_learned_whatever_is_said_before_it(content: str | None) -> None:
    tokenizer = tokenizer_for("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("turn.content", CALLED)
    messages = as_messages(
        [
            CHAT[1],
            {"role": "assistant", "content": content, "tool_calls": CALLS},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "2.", "tool_calls": None},
        ]
    )
    said = "I add.\n" if content else ""
    assert marked(tokenizer, messages) == (
        f"<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n«{said}<call>add</call><|im_end|>»\n"
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n«2.<|im_end|>»\n"
    )


def test_tool_calls_that_the_template_does_not_write_are_no_empty_answer() -> None:
    messages = as_messages([CHAT[1], {"role": "assistant", "content": None, "tool_calls": CALLS}])
    with pytest.raises(ValueError, match="tool calls, which the chat template does not write"):
        marked(tokenizer_for("chatml"), messages)


def test_a_message_that_says_nothing_is_refused_and_not_learned_as_the_word_none() -> None:
    silent = [CHAT[1], {"role": "assistant", "content": None, "tool_calls": None}]
    with pytest.raises(ValueError, match=r"^row 7 cannot be read: .* assistant has no content \(None\) and no tool"):
        PromptFormatter(tokenizer_for("chatml")).check(silent, "row 7")
    with pytest.raises(ValueError, match="message of the assistant has no content"):
        as_messages([{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": None}])
