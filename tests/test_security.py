"""What docs/security.md promises and no other test shows: about the code as a whole, and about who listens where."""

import ast
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import rlhfkit
from rlhfkit.ray_session import unassigned_port
from rlhfkit.rollout.weight_sync.process_group.rendezvous import open_store

PACKAGE = Path(rlhfkit.__file__).parent


@cache
def trees() -> dict[str, ast.Module]:
    """Every file of the package, parsed."""
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(one.value) for one in call.keywords if one.arg == name), None)


PICKLES = ("pickle.load", "pickle.loads", "pickle.Unpickler", "dill.load", "dill.loads", "joblib.load", "numpy.load")
DANGEROUS: dict[str, tuple[Callable[[str, ast.Call], bool], set[str]]] = {
    "reads a pickle": (
        lambda name, call: name.endswith(PICKLES),
        {
            "rewards/sandbox/child.py",  # a pipe from its parent, which reads JSON in return
            "strategies/ray/actor.py",  # both: actors of one Ray, which lets nobody in without its token
            "strategies/ray/ranks.py",
            "rank_store.py",  # between the ranks of one run, as torch.distributed sends objects itself
        },
    ),
    "reads a checkpoint that may be a pickle": (
        lambda name, call: name == "torch.load" and keyword(call, "weights_only") != "True",
        {
            "strategies/checkpoint/io.py",  # directories of the strategy: DeepSpeed's own files are pickles
            "strategies/checkpoint/universal.py",
        },
    ),
    "runs text as code": (
        lambda name, call: name in ("eval", "exec", "os.system", "yaml.load", "yaml.unsafe_load"),
        {"rewards/programs/driver.py"},  # code that a policy wrote, in a confined process
    ),
    "starts a shell": (lambda name, call: keyword(call, "shell") not in (None, "False"), set()),
    "trusts any certificate": (lambda name, call: keyword(call, "verify") == "False", set()),
}
"""Calls, and the files that may make them."""


@pytest.mark.parametrize("what", DANGEROUS)
def test_what_is_dangerous_is_done_where_it_is_safe(what: str) -> None:
    done, allowed = DANGEROUS[what]
    calls = [(path, node) for path, tree in trees().items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert {path for path, call in calls if done(ast.unparse(call.func), call)} <= allowed


def test_neither_code_of_models_nor_an_address_of_everybody_is_a_default() -> None:
    for path, tree in trees().items():
        assert not {"0.0.0.0", "::"} & {one.value for one in ast.walk(tree) if isinstance(one, ast.Constant)}, path
        assert not re.search(r"trust_remote_code[^,)]*= ?True", (PACKAGE / path).read_text()), path


def test_the_store_of_engines_listens_on_its_address_only() -> None:
    store = open_store("127.0.0.1", 60.0)
    with pytest.raises(OSError, match="in use"):  # it is there ...
        socket.create_server(("127.0.0.1", store.port), reuse_port=False)
    with socket.create_server(("127.0.0.2", store.port)):  # ... and nowhere else
        pass


RANK = """
import importlib.util, os, sys, torch, torch.distributed as dist

spec = importlib.util.spec_from_file_location("rendezvous", sys.argv[1])  # alone, it loads in a moment
rendezvous = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rendezvous)
here = {"rank": 0, "world_size": 1, "address": "127.0.0.1", "port": int(sys.argv[2])}
rendezvous.join_process_group("gloo", init_timeout=60, timeout=None, **here)
dist.all_reduce(torch.ones(1), group=dist.new_group([0]))
mine = set()
for number in os.listdir("/proc/self/fd"):
    try:
        mine.add(os.readlink(f"/proc/self/fd/{number}").removeprefix("socket:[").removesuffix("]"))
    except FileNotFoundError:  # of the listing itself
        pass
for family in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{family}").read().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in mine:  # it listens
            print(family, words[1].split(":")[0])
dist.destroy_process_group()
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads the sockets of a process from Linux's /proc")
def test_ranks_on_one_machine_listen_on_loopback_only() -> None:
    file = PACKAGE / "strategies" / "deepspeed" / "rendezvous.py"
    command = [sys.executable, "-c", RANK, str(file), str(unassigned_port("127.0.0.1"))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    listening = ran.stdout.split("\n")[:-1]
    assert len(listening) >= 2  # the store and gloo
    assert set(listening) == {"tcp 0100007F"}  # 127.0.0.1


@pytest.mark.ray
def test_ray_started_here_answers_nobody_without_its_token(ray_session: None) -> None:
    import grpc
    import ray

    address = ray.get_runtime_context().gcs_address
    for header in ((), (("authorization", "Bearer a-guess"),)):
        for method in ("NodeInfoGcsService/GetAllNodeInfo", "JobInfoGcsService/GetAllJobInfo"):
            with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=60, metadata=header)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
