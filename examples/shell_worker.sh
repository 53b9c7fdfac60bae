#!/bin/sh
# A worker can be any program; it need not be Python.
#
# Run it:
#
#     holdfast run --nproc-per-node 2 --no-python examples/shell_worker.sh hello
#
# Its environment has its rank. If it fails, its exit code becomes the job's.
set -eu
echo "worker $RANK of $WORLD_SIZE says: $*"
