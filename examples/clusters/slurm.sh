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

# srun's status is the highest of all processes: a killed one's 137, or 134 where process 0 was it, hides the others' 75.
case "$status" in
  75 | 130 | 134 | 137) # a process was lost, or a signal stopped the run: it goes on from its checkpoint
    if [ "${SLURM_RESTART_COUNT:-0}" -lt "${JREC_MOST_RESTARTS:-20}" ]; then
      scontrol requeue "$SLURM_JOB_ID"
    else
      echo "not requeued: restarted $SLURM_RESTART_COUNT times already" >&2
    fi
    ;;
esac # 0: finished. 1, 2: a defect or a mistake, which a restart would meet again.
exit "$status"
