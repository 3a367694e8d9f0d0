#!/usr/bin/env bash
# Rank 0 of Open MPI or MPICH hands pieces of work to the others. SLURM starts ranks too:
# srun --mpi=pmix jax-ucp convert "$SOURCE" "$TARGET" --scheduler mpi
set -euo pipefail
mpiexec -n "${RANKS:-16}" jax-ucp convert "$SOURCE" "$TARGET" --scheduler mpi
