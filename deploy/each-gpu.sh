#!/usr/bin/env bash
# A command of megajax on all GPUs of this machine, one process for each, where no launcher starts them.
#
#   deploy/each-gpu.sh megajax train gpt2-1.2b --data.path corpora/web --mesh.data auto
#   deploy/each-gpu.sh python train.py demo --mesh.data auto
#
# GPUS=4 uses the first four. Process 0 prints; the others' lines begin with their number. SIGTERM and Ctrl-C go to all
# processes, which stop after the same step with a checkpoint. Exit code: the first that is not 0. In a container, it is
# the entry point to use: podman run --entrypoint /opt/megajax/deploy/each-gpu.sh megajax megajax train ...
set -uo pipefail
(($#)) || { echo "error: no command; valid: $0 megajax train PRESET ..." >&2; exit 2; }
gpus=${GPUS:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
[[ $gpus =~ ^[1-9][0-9]*$ ]] || { echo "error: GPUS=$gpus; valid: 1 or more (nvidia-smi lists those there are)" >&2; exit 2; }
port=${PORT:-$((20000 + $$ % 10000))}

processes=()
trap 'kill -TERM "${processes[@]}" 2>/dev/null' TERM INT HUP
for ((i = 0; i < gpus; i++)); do
    flags=(--distributed.coordinator "localhost:$port" --distributed.num-processes "$gpus" --distributed.process-id "$i")
    if ((i)); then
        JAX_LOCAL_DEVICE_IDS=$i "$@" "${flags[@]}" > >(sed -u "s/^/$i: /") 2>&1 &
    else
        JAX_LOCAL_DEVICE_IDS=$i "$@" "${flags[@]}" &
    fi
    processes+=($!)
done
code=0
for each in "${processes[@]}"; do
    wait "$each"
    ended=$?
    while kill -0 "$each" 2>/dev/null; do # a signal ended `wait`
        wait "$each"
        ended=$?
    done
    ((code)) || code=$ended
done
exit "$code"
