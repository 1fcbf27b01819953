#!/bin/bash
# One training of 16 processes, a GPU each, on the machines of a host file: bash examples/open_mpi.sh
# Change: -np and the slots in the host file (`machine slots=8`), --num-replicas (processes in all, divided by the devices
# of a replica: this configuration has 4 stages), the folder, which all machines must share, and the configuration.
# Where Open MPI 5 or later does not say on which machine rank 0 is, say it: -x HOTLOOP_COORDINATOR=machine:20000
# A rank that dies ends the others; started again with --resume the run goes on from its last checkpoint.
mpirun -np 16 --hostfile hosts \
    hotloop cnn train --config resnet50_8k_bn_pipeline --num-replicas 4 \
    --results-dir /shared/results --run-name resnet50
