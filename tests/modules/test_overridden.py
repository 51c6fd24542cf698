"""What a subclass or a part returns in place of what is asked for: the error names the method and what to return."""

from pathlib import Path
from typing import Any

import pytest
from rl_runs import fit_run

from rlhfkit import GRPOModule, Part, Stage


class Number(GRPOModule):
    def loss(self, batch: Any, out: Any) -> Any:
        return super().loss(batch, out).loss


class Forgets(GRPOModule):
    def prepare(self, experience: Any) -> Any:
        super().prepare(experience)


class Term(Part):
    def term(self, batch: Any, out: Any, old: Any) -> Any:
        return out.logprobs.mean()


class InPlace(Part):
    stage, reads, writes = Stage.SHAPE, ("rewards",), ("rewards",)

    def prepare(self, rows: Any) -> Any:
        rows.rewards.mul_(2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"module": Number}, r"^Number\.loss returned Tensor: return rlhfkit\.LossOutput\(loss, "),
        ({"module": Forgets}, r"^Forgets\.prepare returned NoneType: return what super\(\)\.prepare\(\) returns"),
        ({"module_arguments": {"parts": [Term()]}}, r"^Term\.term returned Tensor: return rlhfkit\.LossOutput"),
        ({"module_arguments": {"parts": [InPlace()]}}, r"^InPlace\.prepare returned NoneType: return rows"),
    ],
)
def test_another_type_is_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fit_run(tmp_path, max_steps=1, **arguments)
