"""GPUs are found by whatever people call them, and their numbers are possible and have an origin."""

import re

import pytest

from autoaccum._estimate.gpus import custom_gpu, gpu_named, known_gpus, with_display
from autoaccum.errors import InvalidInputError

MIB, GIB = 2**20, 2**30
# Of GPUs whose names do not say it.
SOLD_GB = {"t4": 16, "rtx-2080-ti": 11, "titan-rtx": 24, "a2": 16, "a10": 24, "a10g": 24, "a30": 24, "a40": 48}
SOLD_GB |= {"rtx-3060": 12, "rtx-3080": 10, "rtx-3090": 24, "rtx-a6000": 48, "l4": 24, "l40s": 48, "rtx-4060": 8}
SOLD_GB |= {"rtx-4080": 16, "rtx-4090": 24, "rtx-6000-ada": 48, "rtx-5090": 32}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *(
            (name, "h100-80gb")
            for name in ("H100 80GB", "h100_80gb", "NVIDIA H100 80GB HBM3", "h100-sxm", " h100 - 80gb ")
        ),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_gpu_is_found_by_what_people_and_the_driver_call_it(name, found):
    assert gpu_named(name).name == found


@pytest.mark.parametrize("gpu", known_gpus(), ids=lambda gpu: gpu.name)
def test_gpu_has_its_name_an_origin_and_the_memory_that_its_name_says_less_what_the_driver_keeps(gpu):
    sold = re.search(r"-(\d+)gb$", gpu.name)
    assert sold or gpu.name in SOLD_GB, f"add the GB that {gpu.name} is sold with to SOLD_GB"
    gib = int(sold[1]) if sold else SOLD_GB[gpu.name]

    assert gpu_named(gpu.name) is gpu
    assert gpu.source.startswith("https://")
    assert 0.9 * gib * GIB < gpu.total_bytes < gib * GIB
    assert 0.9 * gpu.total_bytes < gpu.free_bytes < gpu.total_bytes


def test_bfloat16_is_there_from_ampere_on():
    assert not gpu_named("t4").bf16
    assert not gpu_named("v100-32gb").bf16
    assert gpu_named("a100-40gb").bf16
    assert gpu_named("rtx-3090").bf16


def test_gpu_of_any_size_can_be_made_up():
    gpu = custom_gpu("24GiB")

    assert gpu.total_bytes == 24 * GIB
    assert 0 < gpu.context_bytes < GIB
    assert "24GiB" in gpu.name


def test_a_gpu_whose_own_context_is_known_has_that():
    assert gpu_named("rtx-4090").context_bytes > gpu_named("l40s").context_bytes


def test_what_a_display_uses_is_not_free():
    gpu = gpu_named("rtx-4060")

    assert with_display(gpu, "1MiB").free_bytes == gpu.free_bytes - 2**20
    with pytest.raises(InvalidInputError, match="display='8GiB' leaves nothing of rtx-4060"):
        with_display(gpu, "8GiB")
