import os
import subprocess
import sys

import torch

from ztk.core.runtime.host_memory import use_huge_pages

SCRIPT = """
import resource, sys, torch
from ztk.core.runtime.host_memory import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
for step in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    activations = [torch.ones(1 << 21) for _ in range(16)]  # 8 MiB each
    del activations
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 16 * (8 << 20) // 4096


def faults(mode: str, **environment: str) -> list[int]:
    """Page faults of each of five steps that take and free 16 blocks of 8 MiB."""
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(line) for line in ran.stdout.split()]


def test_memory_that_a_step_freed_is_there_for_the_next():
    """In the second and third step a few blocks have new addresses: an aligned block requests a little more than it frees."""
    assert faults("keep")[-1] < PAGES / 16  # not one block; pages of the interpreter's own count too


def test_without_it_a_step_pays_for_its_pages_again():
    assert faults("leave")[1] > PAGES / 2  # later ones do not where something small lies at the top of the heap


def test_what_the_user_set_is_left_alone():
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="131072")[1] > PAGES / 2


RETURNING = """
from pathlib import Path

import torch

from ztk.core.runtime.host_memory import keep_freed_memory, return_freed_memory


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])


keep_freed_memory()
weights = [torch.ones(1 << 20) for _ in range(32)]  # 4 MiB each
taken = resident()
kept = torch.ones(1 << 10)  # at the top of the heap
del weights
freed = resident()
return_freed_memory()
print(taken - freed, freed - resident())
"""


def test_memory_of_weights_that_an_engine_has_taken_goes_back():
    ran = subprocess.run([sys.executable, "-c", RETURNING], capture_output=True, text=True, check=True)
    by_itself, returned = map(int, ran.stdout.split())
    pages = 32 * (4 << 20) // 4096
    assert by_itself < pages / 4 and returned > pages / 2


def test_huge_pages_change_no_value():
    """Neither values of the tensor nor of its neighbours."""
    many = [torch.full((3 << 18,), float(number)) for number in range(4)]
    for tensor in many:
        use_huge_pages(tensor)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(many))
