"""Errors of the command line: at most five lines, and a traceback where it is needed."""

import pytest

from rlhfkit.cli.errors import of_parser, print_error, short_errors


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    """``None < 0`` inside rlhfkit: a TypeError whose message says nothing to a user."""
    from rlhfkit.validation import _outside

    with pytest.raises(TypeError, match="not supported"), short_errors("fit"):
        _outside(None, 0, None, None, None)  # type: ignore[arg-type]


def test_a_long_message_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("fit", "\n".join(map(str, range(20))))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert "--debug" in lines[-1]


def test_what_the_parser_says_is_its_innermost_reason(capsys: pytest.CaptureFixture[str]) -> None:
    text = """Parser key "model":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'lightning.pytorch.core.module.LightningModule'>, <class 'NoneType'>]
  Errors:
    - Problem with given class_path 'rlhfkit.GRPOModule':
        Parser key "optimizer_arguments":
          Does not validate against any of the Union subtypes
          Subtypes: [collections.abc.Mapping[str, typing.Any], <class 'NoneType'>]
          Errors:
            - Expected a <class 'collections.abc.Mapping'>
            - Expected a <class 'NoneType'>
          Given value type: <class 'str'>
          Given value: 3
    - Expected a <class 'NoneType'>
  Given value type: <class 'jsonargparse._util.NestedArg'>
  Given value: NestedArg(key='optimizer_arguments', val='3')"""
    print_error("fit", text)
    assert capsys.readouterr().err.splitlines() == [
        "rlhfkit fit: error: model.optimizer_arguments: Expected a Mapping",
        "  got 3",
    ]
    for reason, answer in (
        ("Option 'beta' is not accepted", "did you mean kl_coef? beta is kl_coef here"),
        ("Option 'clip_hgh' is not accepted", "did you mean clip_high?"),
        ("module 'rlhfkit.rewards' has no attribute 'exact_mach'", "did you mean rlhfkit.rewards.exact_match?"),
    ):
        said = text.replace("Expected a <class 'collections.abc.Mapping'>", reason)
        assert of_parser(said).splitlines()[0].endswith(f"{reason}: {answer}")
    assert of_parser("Key 'foo' is not expected") == "Key 'foo' is not expected"
    assert of_parser("") == ""
