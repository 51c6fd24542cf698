"""Errors of the command line in at most five lines."""

import dis
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pkgutil import resolve_name
from types import TracebackType

from rlhfkit.argument_names import constructor_arguments, hint

MOST_LINES = 5
_LIBRARIES = ("lightning", "lightning_fabric", "jsonargparse", "transformers", "huggingface_hub", "datasets")
_KINDS = (OSError, ValueError, TypeError, ImportError, RuntimeError)


@contextmanager
def short_errors(command: str, *, debug: bool = False) -> Iterator[None]:
    """Print an error that says what is wrong without its traceback, and exit with 1; with ``debug`` all keep theirs.

    Errors that rlhfkit raises are such, and before training those that Lightning, Transformers and the like raise.
    Those of the user's own code, and mistakes of ours, keep the traceback.
    """
    try:
        yield
    except Exception as error:
        if debug or not _says_what_is_wrong(error):
            raise
        print_error(command, str(error))
        raise SystemExit(1) from error


def print_error(command: str, text: str) -> None:
    """Print ``rlhfkit fit: error: ...``."""
    lines = (of_parser(text) if "Does not validate against any" in text else text).splitlines()
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], "  ... (all of it, with the traceback: --debug)"]
    print(f"rlhfkit {command}: error: " + "\n".join(lines), file=sys.stderr)


def of_parser(message: str) -> str:
    """Return what the parser of LightningCLI complains about, without the types that it tried.

    It writes the key, the reason of each type that is allowed there, one inside the other, and the value; the first of
    the innermost reasons is the one that says something. To wrong names the nearest is added.
    """
    noise = (
        "Does not validate",
        "Subtypes",
        "Errors:",
        "Given value",
        "Expected a <class 'NoneType'>",
        "Expected a path",
    )
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    keys: list[str] = []
    reason, owner = message, ""
    for line in lines:
        keys += re.findall(r'^Parser key "([^"]+)"', line)
        owner = next(iter(re.findall(r"^Problem with given class_path '([\w.]+)':", line)), owner)
        if line and not line.startswith(noise) and not line.endswith(":"):
            reason = re.sub(r"^Parser key \"[^\"]+\":? *|<class '(?:\w+\.)*(\w+)'>", r"\1", line)
            break
    value = re.search(r"(?:Got value|Given value): (.*)", message)
    shown = [": ".join([".".join(keys), reason + _guess(reason, owner)] if keys else [reason])]
    if value and value[1] not in shown[0] and not value[1].startswith(("Namespace(", "NestedArg(")):
        shown.append(f"  got {value[1]}")
    return "\n".join([line if len(line) <= 400 else f"{line[:399]}…" for line in shown])


def _guess(reason: str, owner: str) -> str:
    """What a wrong name probably stands for, after a colon: an argument of ``owner``, or a name of a module."""
    found = ""
    if option := re.fullmatch(r"Option '(\w+)' is not accepted", reason):
        found = hint(option[1], constructor_arguments(resolve_name(owner)))
    elif missing := re.fullmatch(r"module '([\w.]+)' has no attribute '(\w+)'", reason):
        near = get_close_matches(missing[2], dir(resolve_name(missing[1])), n=1)
        found = f"did you mean {missing[1]}.{near[0]}?" if near else ""
    return f": {found}" if found else ""


def _says_what_is_wrong(error: BaseException) -> bool:
    """Whether the message is enough."""
    steps = [*_steps(error.__traceback__)]
    room = str(steps[-1].tb_frame.f_globals.get("__name__")).split(".")[0]
    training = any(step.tb_frame.f_globals.get("__name__") == "lightning.pytorch.loops.fit_loop" for step in steps)
    if room != "rlhfkit" and (training or room not in _LIBRARIES):
        return False
    if not isinstance(error, _KINDS) and type(error).__name__ != "MisconfigurationException":
        return False
    # An error that a statement raises has a message for its reader; one of a call or an operator may be a mistake.
    raised = steps[-1].tb_frame.f_code.co_code[steps[-1].tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raised or isinstance(error, OSError | ImportError)


def _steps(found: TracebackType | None) -> Iterator[TracebackType]:
    while found is not None:
        yield found
        found = found.tb_next
