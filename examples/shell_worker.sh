#!/bin/sh
# A worker need not be Python: any program can be one.
#
# Run it:
#
#     holdfast run --nproc-per-node 2 --no-python examples/shell_worker.sh hello
#
# It is told who it is by its environment. Its exit code is the job's, should it fail.
set -eu
echo "worker $RANK of $WORLD_SIZE says: $*"
