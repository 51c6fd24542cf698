"""The interpreter that a program runs in. Run as a program by :mod:`rlhfkit.rewards.programs.worker`.

It is started without ``site``, which can take longer than the program, and does what a program may expect of that.

An assertion counts as passed when this file writes its number, with a secret word, after it. So a program that exits
early, with whatever code, has passed nothing. (One that looks for the word in our frames finds it: see
``CodeExecution``.)
"""

import os
import site
import sys
import types


def main() -> None:
    """Arguments: folders of packages; then, for assertions, the file descriptor for what passed."""
    sys.path += sys.argv[1].split(os.pathsep)
    site.setquit()
    arguments, sys.argv = sys.argv, ["program.py"]
    if len(arguments) == 2:
        with open("program.py", encoding="utf-8") as file:
            source = file.read()
        exec(compile(source, "program.py", "exec"), _module("__main__"))
    else:
        _assertions(int(arguments[2]))


def _assertions(marks: int) -> None:
    import json

    job = json.loads(sys.stdin.buffer.read())
    write, leave = os.write, os._exit
    names = _module("program")  # not __main__: what a script does when run is not tested here
    exec(compile(job["program"], "program.py", "exec"), names)
    for number, test in enumerate(job["tests"]):
        try:
            exec(compile(test, f"test {number}", "exec"), names)
        except BaseException:  # SystemExit too
            continue
        write(marks, f"{job['word']} {number}\n".encode())
    leave(0)  # whatever threads the program has left


def _module(name: str) -> dict[str, object]:
    """The names of a new module that can be imported."""
    module = sys.modules[name] = types.ModuleType(name)
    return module.__dict__


if __name__ == "__main__":
    main()
