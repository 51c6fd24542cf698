"""The interpreter that assertions about a program run in. Run as a program by :mod:`rlhfkit.rewards.code_worker`.

A test counts as passed when this file writes its number, with a secret word, after the test. So a program that exits
early, with whatever code, has passed nothing. (One that looks for the word in our frames finds it: see
``CodeExecution``.)
"""

import json
import os
import sys
import types


def main() -> None:
    """Define the program's names, then try each test."""
    job = json.loads(sys.stdin.buffer.read())
    marks, write, leave = int(sys.argv[1]), os.write, os._exit
    module = types.ModuleType("program")  # not __main__: what a script does when run is not tested here
    sys.modules["program"] = module
    exec(compile(job["program"], "program.py", "exec"), module.__dict__)
    for number, test in enumerate(job["tests"]):
        try:
            exec(compile(test, f"test {number}", "exec"), module.__dict__)
        except BaseException:  # SystemExit too
            continue
        write(marks, f"{job['word']} {number}\n".encode())
    leave(0)  # whatever threads the program has left


if __name__ == "__main__":
    main()
