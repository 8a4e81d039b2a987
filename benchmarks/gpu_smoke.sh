#!/usr/bin/env bash
# Every part of megajax once, small, on one GPU, 10 minutes at most: what runs and what does not, not how fast.
# On an H200 it took 4 minutes with 7 jobs.
#
#   benchmarks/gpu_smoke.sh [--device gpu|cpu] [--minutes N] [--jobs N] [--keep FOLDER]
#
# --device cpu tries the script itself where there is no GPU. Steps that do not need each other run side by side, --jobs
# at a time. Exit code 0: everything ran. A line for every step; the last lines of one that failed; all of what the steps
# said stays in FOLDER (else in a temporary one, which is named). Started again with the same FOLDER, it leaves out the
# steps that ran.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

device=gpu minutes=10 jobs= folder=
while (($#)); do
    case $1 in
    --device | --minutes | --jobs | --keep)
        (($# > 1)) || { echo "error: $1 needs a value; valid: see the top of $0" >&2; exit 2; }
        case $1 in
        --device) device=$2 ;;
        --minutes) minutes=$2 ;;
        --jobs) jobs=$2 ;;
        --keep) folder=$2 ;;
        esac
        shift 2
        ;;
    *) echo "error: $1: unknown flag; valid: --device, --minutes, --jobs, --keep" >&2; exit 2 ;;
    esac
done
[[ $device == gpu || $device == cpu ]] || { echo "error: --device $device; valid: gpu, cpu" >&2; exit 2; }
[[ $minutes =~ ^[1-9][0-9]*$ ]] || { echo "error: --minutes $minutes; valid: 1 or more" >&2; exit 2; }
jobs=${jobs:-$(($(nproc) > 4 ? $(nproc) / 2 : 1))}
[[ $jobs =~ ^[1-9][0-9]*$ ]] || { echo "error: --jobs $jobs; valid: 1 or more" >&2; exit 2; }

python=${PYTHON:-.venv/bin/python}
[[ -x $python ]] || python=python3
folder=${folder:-$(mktemp -d "${TMPDIR:-/tmp}/megajax-smoke-XXXXXX")}
mkdir -p "$folder" || exit 1
[[ $device == cpu ]] && export JAX_PLATFORMS=cpu
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$folder/compiled}
export XLA_PYTHON_CLIENT_PREALLOCATE=false  # several processes share the GPU's memory
end=$((SECONDS + 60 * minutes))
rm -f "$folder"/*.failed "$folder"/*.left-out

# step NAME COMMAND...: runs it in the time that is left; `expect` is the exit code that counts as good.
expect=0 child=
step() {
    local name=$1 began=$SECONDS left=$((end - SECONDS)) code
    shift
    if [[ -e $folder/$name.ok ]]; then
        echo "ok      before  $name"
        expect=0
        return
    fi
    if ((left < 5)); then
        echo "left out        $name: no time left"
        touch "$folder/$name.left-out"
        return
    fi
    timeout --kill-after=10 "$left" "$@" >"$folder/$name.log" 2>&1 </dev/null &
    child=$!
    wait "$child"
    code=$?
    if ((code == expect)); then
        printf 'ok      %4d s  %s\n' $((SECONDS - began)) "$name"
        touch "$folder/$name.ok"
    else
        printf 'FAILED  %4d s  %s: exit code %d, see %s\n' $((SECONDS - began)) "$name" "$code" "$folder/$name.log"
        tail -n 3 "$folder/$name.log" | sed 's/^/                  /'
        touch "$folder/$name.failed"
    fi
    expect=0
}
export python

run=$folder/run corpus=$folder/corpus.txt
find megajax -name '*.py' -exec cat {} + >"$corpus"
model=(--model.num-layers 2 --model.hidden-size 128 --model.num-heads 2 --model.sequence-length 128)
small=(--data.path "$corpus" "${model[@]}" --train.global-batch 8 --train.microbatch 4 --train.steps 8
    --train.eval-batches 2 --checkpoint.every 4 --sample.tokens 8)
train() { # train NAME PRESET FLAGS...: a new run in $folder/NAME
    local name=$1 preset=$2
    shift 2
    step "train-$name" "$python" -m megajax train "$preset" --run-dir "$folder/$name" "${small[@]}" "$@"
}

# Steps of one lane follow each other; lanes run side by side.
lanes=()
lane() { lanes+=("$1"); }

step devices "$python" -c '
import sys, jax
print(jax.__version__, jax.devices())
sys.exit(jax.default_backend() != sys.argv[1])' "$device"

# A run, stopped and resumed; what can be done with it.
lane a_run
a_run() {
    train run demo --precision bf16 --model.dropout 0
    step resume "$python" -m megajax train "$run/config.toml" --train.steps 12 --resume must
    if [[ $device == gpu ]]; then # once; the second start has kept it
        step compared test "$(grep -c 'attention: cudnn is right' "$run/log.txt")" = 1
    fi
    step generate "$python" -m megajax generate --checkpoint "$run" --prompt "def read(" --max-tokens 16
    step train-lora "$python" -m megajax train "$run/config.toml" --init "$run" --run-dir "$folder/lora" \
        --lora.rank 8 --train.steps 4
    step eval-lora "$python" -m megajax eval perplexity --checkpoint "$folder/lora"
    for split in train dev; do
        for number in {1..64}; do
            echo "{\"prompt\": \"$split $number: one more than $number is\", \"completion\": \" $((number + 1))\"}"
        done >"$folder/$split.jsonl"
    done
    step instructions "$python" -m megajax train finetune/instructions-demo --init "$run" --run-dir "$folder/tuned" \
        "${model[@]}" --data.train "$folder/train.jsonl" --data.dev "$folder/dev.jsonl" --train.steps 4 --precision bf16
    step eval-instructions "$python" -m megajax eval instructions --checkpoint "$folder/tuned" --data "$folder/dev.jsonl"
    step eval "$python" -m megajax eval perplexity --checkpoint "$run"
    step export "$python" -m megajax convert export-hf "$run" "$folder/exported"
    step import "$python" -m megajax convert import-hf "$folder/exported" "$folder/imported"
    step eval-imported "$python" -m megajax eval perplexity --checkpoint "$folder/imported" --data README.md
}

# Attention: every implementation beside our blocks in fp32, in small.
for each in blocks $([[ $device == gpu ]] && echo kernel cudnn); do
    lane "attention $each"
done
attention() {
    step "attention-$1" "$python" benchmarks/gpu_attention.py --implementation "$1" --device "$device" --check \
        --seconds 150
    [[ $device == gpu && $1 != cudnn ]] && train "asked-$1" demo --precision bf16 --model.dropout 0 --model.attention "$1"
}

# Forms of the step: precisions, recomputation, scanned layers, families, experts, optimizers.
lane precisions
precisions() {
    train fp32 demo --precision fp32
    train fp16 demo --precision fp16 --model.dropout 0
    train fp8 demo --precision fp8 --model.dropout 0
    train muon demo --precision bf16 --optimizer.name muon
}
lane forms
forms() {
    train dropout demo --precision bf16 --model.dropout 0.1 --train.remat selective
    train scanned demo --precision bf16 --model.dropout 0 --train.remat layer --model.scan-layers true
    train profiled demo --precision bf16 --model.dropout 0 --profile 3:5
    train recipes demo --precision bf16 --train.ramp-start 4 --train.ramp-increment 4 --train.ramp-samples 16 \
        --optimizer.schedule wsd --optimizer.warmup-steps 2 --optimizer.cooldown-steps 3 --optimizer.decay-steps 8
}
lane families
families() {
    train llama llama-demo --precision bf16 --model.num-kv-heads 1 --model.mlp-size 256
    train window llama-demo --precision bf16 --model.sliding-window 64 --data.reset-attention --model.num-kv-heads 1 \
        --model.mlp-size 256
    train bert bert-demo --precision bf16 --model.dropout 0
    train experts moe-demo --precision bf16 --model.num-kv-heads 1
    train dropless moe-demo --precision bf16 --model.num-kv-heads 1 --model.expert-capacity 0
    train sinks moe-demo --precision bf16 --model.num-kv-heads 1 --model.attention-sinks --model.sliding-window 64 \
        --model.window-layers 1,1 --model.activation swiglu-clamped --model.bias all --model.balance loss
    train latents moe-demo --precision bf16 --model.num-kv-heads 2 --model.head-size 192 --model.value-size 128 \
        --model.rotary-size 64 --model.latent-size 64
}

# The same bits twice; a signal, at which the run stops with a checkpoint and exit code 143.
lane ends
ends() {
    for each in demo moe-demo; do
        for number in 1 2; do
            train "same-$each-$number" "$each" --precision bf16 --model.dropout 0 --deterministic --model.expert-capacity 0 \
                --model.num-kv-heads 1
        done
        step "same-bits-$each" "$python" -c '
import json, sys
one, other = ([json.loads(line).get("loss") for line in open(file)] for file in sys.argv[1:])
sys.exit(not one or one != other)' "$folder/same-$each-1/metrics.jsonl" "$folder/same-$each-2/metrics.jsonl"
    done
    expect=143
    # shellcheck disable=SC2016  # for the inner shell
    step sigterm bash -c '
"$python" -m megajax train demo --run-dir "$1" --train.steps 100000 --precision bf16 &
for _ in {1..120}; do
    sleep 1
    grep -qs loss "$1/metrics.jsonl" && break
done
kill -TERM $!
wait $!' sigterm "$folder/stopped"
    step plan "$python" -m megajax plan gpt2-355m --mesh.data 8 --no-compile
}

lane tests
tests() {
    step tests-on-gpu env JAX_PLATFORMS="$([[ $device == gpu ]] && echo cuda,)cpu" "$python" -m pytest -q -m gpu \
        -p no:cacheprovider -p no:benchmark -n 4 --dist worksteal tests/test_gpu.py
}

# Lanes do not get the signal of a Ctrl-C.
trap 'kill $(jobs -p); wait; exit 130' INT TERM
for each in "${lanes[@]}"; do
    while (($(jobs -rp | wc -l) >= jobs)); do wait -n; done
    (
        trap 'kill "$child"; exit 143' TERM
        $each # in words: a lane's name and what it is given
    ) &
done
wait

count() { find "$folder" -maxdepth 1 -name "*.$1" | wc -l; }
failed=$(count failed) left_out=$(count left-out)
echo
echo "$failed failed, $left_out left out, $SECONDS s; $device; what the steps said: $folder"
exit $((failed + left_out > 0))
