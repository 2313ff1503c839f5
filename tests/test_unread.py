"""What is not needed is not read: masked rows, the spare position, and in the backward rows without a gradient stand in memory that
may not be touched (a read is a segmentation fault, hence the child process)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="about memory of the CPU")

PROBE = """
import ctypes, itertools, mmap, sys
import torch
import grpo_kernels as gk
from torch.nn.functional import pad

backend, touch = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
mask = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 1]])
advantages = torch.tensor([[1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]])  # no gradient for (0, 2) and (1, 3)

def forbid_all_but(needed, address):
    for row, is_needed in enumerate(needed):
        if not is_needed:
            assert libc.mprotect(ctypes.c_void_p(address + row * mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0

for dtype, spare, one_pass in itertools.product((torch.float32, torch.bfloat16), (0, 1), (False, True)):
    pages = mmap.mmap(-1, 2 * (4 + spare) * mmap.PAGESIZE)  # a page a row
    logits = torch.frombuffer(pages, dtype=dtype).view(2, 4 + spare, -1)
    logits.copy_(torch.randn(logits.shape)).requires_grad_()
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    print(dtype, f"spare={spare} one_pass={one_pass}", "forward", flush=True)
    forbid_all_but(pad(mask, (0, spare)).flatten().tolist(), address)
    ids = torch.zeros(2, 4, dtype=torch.int64)
    out = gk.fused_grpo_loss(logits, ids, advantages, completion_mask=mask, one_pass=one_pass, backend=backend)
    print("backward", flush=True)
    used = pad(mask * (advantages != 0), (0, spare))
    forbid_all_but(used.flatten().tolist(), address)
    out.loss.backward()
    assert torch.equal((logits.grad != 0).any(-1).int(), used.int()), "gradient where there is one, zeros elsewhere"
    if touch == "touch":
        logits[0, 1].sum()
print("done")
"""


def probe(backend: str, touch: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROBE, backend, touch], capture_output=True, text=True, timeout=300)


def test_rows_without_use_are_not_read(backend: str) -> None:
    done = probe(backend)
    assert done.stdout.endswith("done\n"), f"exit status {done.returncode} (-11: a row was read) after {done.stdout}{done.stderr[-2000:]}"


def test_the_probe_notices_a_read(backend: str) -> None:
    assert probe(backend, "touch").returncode == -11
