#!/usr/bin/env bash
# Two replicas under torchrun, without Ray: inside each the optimizer is sharded over two ranks, and each holds the whole model (HSDP's
# shape). Any rank can be killed meanwhile: its replica starts anew and catches up.
#
#   examples/hsdp_two_replicas.sh [KEY=VALUE ...]
#
# On one machine `everstep up` does all of this; here every process is started as it would be on machines of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
PORT=${PORT:-29510}
RUN=${RUN:-runs/hsdp_two_replicas}
export TORCHFT_LIGHTHOUSE=http://127.0.0.1:$PORT OMP_NUM_THREADS=1 NGPU=2

"$PYTHON" -m everstep lighthouse --port "$PORT" --min-replicas 2 --join-timeout-ms 10000 &
lighthouse=$!
replicas=()
trap 'kill "${replicas[@]}" "$lighthouse" 2>/dev/null; wait' EXIT

for id in 0 1; do
    # On a GPU machine: CUDA_VISIBLE_DEVICES=0,1 for one, 2,3 for the other.
    REPLICA_GROUP_ID=$id "$PYTHON" -m everstep train examples/sft_text.yaml launcher=local replica.count=2 layout.spares=0 "faults=[]" \
        recovery.min_replicas=1 run_dir="$RUN" "$@" &
    replicas+=($!)
done
for replica in "${replicas[@]}"; do wait "$replica"; done
"$PYTHON" -m everstep verify "$RUN"
