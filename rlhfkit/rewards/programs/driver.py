"""The interpreter that a program runs in. Run as a program by :mod:`rlhfkit.rewards.programs.worker`.

It starts without ``site``, which can take longer to import than the program, and sets up what programs expect from it.
Names used after the program has started are bound before, so that a program that patches modules affects only itself.

- ``run``: the program is ``__main__``, with its standard input and output.
- ``calls``: the program is a module. One pipe brings function names and arguments, another returns values. Expected
  values are neither in this process nor inside the sandbox.
- ``assertions``: test code runs in the program's interpreter, for tests that are more than calls; a hostile program can
  forge their result (see ``CodeExecution``).
"""

import importlib.util
import json
import os
import site
import sys
import types
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Arguments: folders of packages, mode, file descriptors to read from and to write to."""
    packages, mode, reading, writing = sys.argv[1:]
    sys.path += packages.split(os.pathsep)
    site.setquit()
    sys.argv = ["program.py"]
    requests = open(int(reading), "rb")  # noqa: SIM115  # used until the process ends
    if mode == "run":
        sources = json.loads(requests.readline())
        requests.close()
        names = _module("__main__")
        for source in sources:  # one by one: the program may begin with `from __future__`
            exec(compile(source, "program.py", "exec"), names)
    elif mode == "calls":
        _calls(requests, int(writing))
    else:
        _assertions(requests, int(writing))


def _calls(requests: Any, answers: int) -> None:
    values = _values()
    loads, dumps, as_value, as_text, write = json.loads, json.dumps, values.loads, values.dumps, os.write
    call, encode, readline, failure = _call, str.encode, requests.readline, BaseException

    def answer(text: str) -> None:
        data = encode(text + "\n")
        while data:
            data = data[write(answers, data) :]

    names = _module("program")  # not __main__: code under `if __name__ == "__main__"` must not run
    for source in loads(readline()):
        exec(compile(source, "program.py", "exec"), names)
    answer("{}")
    while line := readline():
        request = loads(line)
        try:
            text = as_text(call(names, request, as_value))
        except failure as error:  # SystemExit too
            text = dumps({"raised": type(error).__name__})
        answer(text)
    os._exit(0)  # without waiting for threads of the program


def _call(names: dict[str, Any], request: dict[str, Any], as_value: Callable[[str], Any]) -> Any:
    function = names[request["function"]]
    if request["method"] is not None:
        function = getattr(function(), request["method"])
    return function(*as_value(request["arguments"]), **as_value(request["keywords"]))


def _assertions(requests: Any, marks: int) -> None:
    write, leave, failure, build, run = os.write, os._exit, BaseException, compile, exec
    readline, loads, encode = requests.readline, json.loads, str.encode
    names = _module("program")
    for source in loads(readline()):
        run(build(source, "program.py", "exec"), names)
    write(marks, b"\n")
    while line := readline():  # one by one: a test and its token arrive only after the program has run
        test = loads(line)
        try:
            run(build(test["code"], "test", "exec"), names)
        except failure:
            write(marks, b"\n")
            continue
        write(marks, encode(test["token"] + "\n"))
    leave(0)


def _values() -> types.ModuleType:
    """Import ``values.py`` from this folder."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "values.py")
    spec = importlib.util.spec_from_file_location("rlhfkit_values", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["rlhfkit_values"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> dict[str, Any]:
    """Create a module that can be imported, and return its namespace."""
    module = sys.modules[name] = types.ModuleType(name)
    return module.__dict__


if __name__ == "__main__":
    main()
