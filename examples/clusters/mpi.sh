#!/usr/bin/env bash
# One share for each rank of Open MPI or MPICH: mpirun -n 16 examples/clusters/mpi.sh
set -euo pipefail
jax-ucp convert "$SOURCE" "$TARGET" --worker auto
