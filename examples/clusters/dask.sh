#!/usr/bin/env bash
# A Dask scheduler and two workers on this machine. On a cluster the scheduler is there already,
# and its workers have jax_ucp and see SOURCE and TARGET by the same names.
set -euo pipefail
port=${PORT:-8786}
dask scheduler --host 127.0.0.1 --port "$port" --no-dashboard &
scheduler=$!
dask worker "tcp://127.0.0.1:$port" --nworkers 2 --nthreads 1 --no-dashboard &
workers=$!
trap 'kill $workers $scheduler' EXIT
jax-ucp convert "$SOURCE" "$TARGET" --scheduler "tcp://127.0.0.1:$port"
