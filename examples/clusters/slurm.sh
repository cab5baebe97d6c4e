#!/usr/bin/env bash
#SBATCH --job-name=jrec
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4   # a process a GPU
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8     # threads that load, and that serve rows in host memory
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@300     # five minutes before the time is up, every process gets what makes jrec write a checkpoint
#SBATCH --open-mode=append
set -euo pipefail

status=0
# --resume goes on from the last checkpoint if there is one, so the same line starts a run and restarts it.
srun --kill-on-bad-exit=0 jrec train configs/criteo_terabyte.toml \
  data.path=/shared/terabyte out=/shared/runs/terabyte plan=/shared/terabyte.plan \
  mesh.devices="$SLURM_NTASKS" checkpoint.every_steps=2000 \
  --distributed --resume || status=$?

# 0: the run is finished. 130: a signal stopped it. 2: a process died, and the others ended with the last checkpoint.
if [ "$status" -eq 130 ] || [ "$status" -eq 2 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
