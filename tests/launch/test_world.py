"""How many ranks a command will have."""

import pytest
from autoaccum._launch.world import world_size_of

from autoaccum.errors import InvalidInputError


@pytest.mark.parametrize(
    ("command", "environment", "ranks"),
    [
        ("python train.py", {}, 1),
        ("python train.py", {"WORLD_SIZE": "8"}, 8),
        ("python train.py", {"SLURM_NTASKS": "6"}, 6),
        ("python train.py", {"WORLD_SIZE": "8", "SLURM_NTASKS": "6"}, 8),
        ("torchrun --nproc-per-node=4 train.py", {"WORLD_SIZE": "8"}, 4),
        ("/opt/bin/torchrun --nproc_per_node 4 --nnodes 2 train.py", {}, 8),
        ("srun torchrun --nnodes=2:2 --nproc-per-node 3 train.py", {}, 6),
        ("python -m torch.distributed.run --standalone --nproc-per-node 2 train.py", {}, 2),
        ("torchrun train.py", {"PET_NPROC_PER_NODE": "5", "PET_NNODES": "2"}, 10),
        ("torchrun train.py", {}, 1),
        ("python train.py --nproc-per-node 4", {}, 1),
    ],
)
def test_ranks_are_understood_from_the_launcher_or_the_environment(command, environment, ranks):
    assert world_size_of(command.split(), environment) == ranks


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("torchrun --nnodes 1:4 train.py", "--nnodes=1:4"),
        ("torchrun --nproc-per-node many train.py", "--nproc-per-node=many"),
        ("torchrun --nproc-per-node 0 train.py", "--nproc-per-node=0"),
    ],
)
def test_what_leaves_the_number_open_is_asked_for(command, told):
    with pytest.raises(InvalidInputError, match=rf"{told} does not fix .* --world-size"):
        world_size_of(command.split(), {})


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(InvalidInputError, match="SLURM_NTASKS='two'"):
        world_size_of(["python"], {"SLURM_NTASKS": "two"})
