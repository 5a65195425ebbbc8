import pytest

from lamport_numba.launcher import Launched, launched


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launched()),
        (
            {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            Launched("MPICH", 2, 4, 1, 2),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "0",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
            },
            Launched("Open MPI", 0, 8, 0, 8),
        ),
        (
            {
                "SLURM_PROCID": "3",
                "SLURM_NTASKS": "4",
                "SLURM_LOCALID": "3",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_NODES": "1",
            },
            Launched("Slurm", 3, 4, 3, 4),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Launched()),  # the batch script itself
        ({"PMI_RANK": "x", "PMI_SIZE": "4"}, Launched()),
    ],
)
def test_launched(environ, expected):
    assert launched(environ) == expected
