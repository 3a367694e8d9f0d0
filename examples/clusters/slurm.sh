#!/usr/bin/env bash
# 64 tasks of a SLURM array, each a share of the conversion; the last to finish commits.
# A task that is preempted is put back into the queue and takes up its share.
#SBATCH --array=0-63
#SBATCH --cpus-per-task=8
#SBATCH --mem=8G
#SBATCH --requeue
set -euo pipefail
jax-ucp convert "$SOURCE" "$TARGET" --worker auto
