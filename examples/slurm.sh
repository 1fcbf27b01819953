#!/bin/bash
# One training on 2 machines of 8 GPUs, a process a GPU: sbatch examples/slurm.sh
# Change: --nodes, --ntasks-per-node and --gpus-per-node (as many as GPUs), --num-replicas (processes in all,
# divided by the devices of a replica: this configuration has 4 stages), the folder, which all machines must share, and
# the configuration.
# Every task must see all GPUs of its machine (--gpus-per-node, not --gpus-per-task): each takes the one of its number.
# A task that dies ends the others; submitted again with --resume the run goes on from its last checkpoint.
#SBATCH --job-name=hotloop
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=08:00:00
#SBATCH --signal=TERM@120
srun --kill-on-bad-exit=1 \
    hotloop cnn train --config resnet50_8k_bn_pipeline --num-replicas 4 \
    --results-dir /shared/results --run-name resnet50
