#!/bin/bash
# A training by plain sbatch, which survives its time limit:
#
#   sbatch --time=24:00:00 --gres=gpu:1 slurm.sh recipe.py
#
# Slurm signals this script two minutes before the time limit (B:). `fit` then leaves a checkpoint and ends; the script
# puts the job back into the queue, and there the same command goes on from the checkpoint. For jobs that start again
# smaller where memory runs out, and on several cards: `autoaccum slurm` (docs/slurm.md).
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -u

recipe="$1"
name="$(basename "${recipe%%:*}" .py)"

# SIGTERM is what a job gets that is cancelled: it leaves a checkpoint, too, and must not come back.
warned=
training=
trap 'warned=1; kill -TERM $training' USR1
trap 'kill -TERM $training' TERM

autoaccum fit "$recipe" --checkpoint "runs/$name" --log "runs/$name.jsonl" &
training=$!
wait "$training"
code=$?
while kill -0 "$training" 2>/dev/null; do # a signal ends the waiting, not what is waited for
    wait "$training"
    code=$?
done
if [ "$warned" ] && [ "$code" != 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
