"""Docstrings: their examples run, and what they call arguments are arguments."""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from test_docs_examples import complaint, public_objects

import rlhfkit

PACKAGE = Path(rlhfkit.__file__).parent
ELSEWHERE = {
    "applied": "inside a fit",
    "NonFiniteGuard": "a file that a run which was stopped leaves",
    "JSONLWriter": "samples of a user",
    "estimate": "a model's configuration from the Hub",
    "ExperienceLoader": "a run that samples",
    "StepLoader": "data of a user",
    "ExampleTable": "data of a user",
    "MCPTools": "a server that is downloaded",
    "OpenAIEndpoint": "an engine that runs",
    "Placement": "Ray: see tests/roles/test_placement.py",
    "adapter_disabled": "inside a module",
    "reference_model": "inside a module",
    "ModuleWeights": "an engine that runs",
    "Server": "an application of Starlette",
    "local_rows": "a whole module of a user",
    "policy/base": "the body of a function",
    "preference/unpaired": "several ranks",
    "fused_head/tiles": "formulas",
    "CosineLength": "a formula",
    "LengthPenalty": "a formula",
    "EngineCheckpointMixin": "a folder",
}
"""Examples that are not run here, and what they would need or are."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A block behind ``::`` in a docstring."""

    path: Path
    owner: str
    code: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(PACKAGE).with_suffix('')}:{self.owner}"

    @property
    def is_shell(self) -> bool:
        return self.code.startswith("rlhfkit ")

    @property
    def is_elsewhere(self) -> bool:
        return self.owner in ELSEWHERE or any(str(self).startswith(f"losses/{name}:") for name in ELSEWHERE)


def documented(node: Any) -> Iterator[Any]:
    """A module, its classes and functions, and theirs."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for inner in getattr(node, "body", ()):
        if isinstance(inner, ast.stmt):
            yield from documented(inner)


def examples(path: Path) -> Iterator[Example]:
    block = re.compile(r"^( *)\S[^\n]*::\n\n?((?:\1 +\S[^\n]*\n?|\n)+)", re.MULTILINE)
    for node in documented(ast.parse(path.read_text(encoding="utf-8"))):
        for _, code in block.findall(ast.get_docstring(node) or ""):
            yield Example(path, getattr(node, "name", ""), textwrap.dedent(code).strip())


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if "::\n" in path.read_text(encoding="utf-8")]
every_file = pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What examples use without making it: our public names, and objects called as in the examples."""
    known = public_objects()

    def search(query: str) -> str:
        """Search.

        Args:
            query: What for.
        """
        return query

    def calculate(expression: str) -> str:
        """Calculate.

        Args:
            expression: What.
        """
        return expression

    def judge(prompts: Any, pairs: Any) -> list[int]:
        return [0 for _ in pairs]

    class MyEnvironment(rlhfkit.Environment):
        def step(self, action: str) -> rlhfkit.Step:
            return rlhfkit.Step("", done=True)

    reward = known["exact_match"]
    made = {
        "module": rlhfkit.GRPOModule("Qwen/Qwen3-0.6B"),
        "data": rlhfkit.PromptDataModule("gsm8k.jsonl", rollout_batch_size=72, micro_batch_size=4),
        "rollouts": rlhfkit.RolloutCallback(reward),
        "callback": rlhfkit.RolloutCallback(reward),
        "engine": rlhfkit.LocalEngine(),
        "sampling": rlhfkit.SamplingSpec(),
        "lines": [{"prompt": "2+2=", "completion": "4", "reward": 1.0}],
        "prompts": [{"prompt": "2+2="}],
        "examples": [],
        "lengths": [],
        "targets": [],
    }
    functions = {"search": search, "calculate": calculate, "judge": judge, "shorter": judge, "overlong": reward}
    return known | made | functions | {"reward": reward, "MyEnvironment": MyEnvironment, "L": L, "torch": torch}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the user's rewards, and tokens of servers."""
    (tmp_path / "my_rewards.py").write_text(
        "def unit_tests(samples): return [1.0 for _ in samples]\n"
        "grade = unit_tests\n"
        "class MyJudge:\n"
        "    def __init__(self, style): self.style = style\n"
        "    def __call__(self, samples): return [1.0 for _ in samples]\n"
        "Style = MyJudge\n"
        "key = 'secret'\n"
    )
    (tmp_path / "dump").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for variable in ("JUDGE_TOKEN", "REWARD_TOKEN"):
        monkeypatch.setenv(variable, "0123456789abcdef0123456789abcdef")


@every_file
def test_examples_run(file: Path, names: dict[str, Any], place: None) -> None:
    """Those that cannot be run here call with arguments that exist."""
    dotted = ".".join(("rlhfkit", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    mine = importlib.import_module("my_rewards")
    known = vars(importlib.import_module(dotted)) | names
    known |= {name: getattr(mine, name) for name in ("MyJudge", "Style", "key")}
    known |= {"my_rewards": mine, "my_function": mine.unit_tests}
    for example in examples(file):
        if example.is_elsewhere and not example.is_shell:
            check_calls(example, names)
        elif not example.is_shell:
            exec(compile(example.code, str(example), "exec"), dict(known))


def check_calls(example: Example, names: dict[str, Any]) -> None:
    try:
        tree = ast.parse(example.code)
    except SyntaxError:
        assert any(word in ELSEWHERE[example.owner or "fused_head/tiles"] for word in ("formula", "folder"))
        return
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    known = [(call, names[call.func.id]) for call in calls if isinstance(call.func, ast.Name) and call.func.id in names]
    assert [text for call, called in known if (text := complaint(call, called))] == [], example


def argument_names(docstring: str) -> list[str]:
    """The names under ``Args:``."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", docstring, re.MULTILINE)
    found = re.findall(r"^    (?! )([\w*, ]+): ", section[1], re.MULTILINE) if section else []
    return [name.replace("*", "") for names in found for name in names.split(", ")]


def test_described_arguments_exist() -> None:
    wrong, described = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(("rlhfkit", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        if "class " not in (text := path.read_text(encoding="utf-8")) or "Args:" not in text:
            continue
        for kind in vars(importlib.import_module(name)).values():
            if inspect.isclass(kind) and kind.__module__ == name and not getattr(kind, "_is_protocol", False):
                listed = argument_names(inspect.cleandoc(vars(kind).get("__doc__") or ""))
                taken = inspect.signature(kind).parameters if listed else {}
                described += len(listed)
                wrong += [f"{name}.{kind.__name__}: {one}" for one in listed if one not in taken]
    assert wrong == []
    assert described > 600
