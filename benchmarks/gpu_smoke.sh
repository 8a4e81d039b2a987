#!/usr/bin/env bash
# Every part of megajax once, small, on one GPU, 10 minutes at most: what runs and what does not, not how fast.
# It has not run on a GPU yet; on CPUs it has.
#
#   benchmarks/gpu_smoke.sh [--device gpu|cpu] [--minutes N] [--keep FOLDER]
#
# --device cpu tries the script itself where there is no GPU. Exit code 0: everything ran. A line for every step; the last
# lines of one that failed; all of what the steps said stays in FOLDER (else in a temporary one, which is named). Started
# again with the same FOLDER, it leaves out the steps that ran.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

device=gpu minutes=10 folder=
while (($#)); do
    case $1 in
    --device | --minutes | --keep)
        (($# > 1)) || { echo "error: $1 needs a value; valid: see the top of $0" >&2; exit 2; }
        case $1 in
        --device) device=$2 ;;
        --minutes) minutes=$2 ;;
        --keep) folder=$2 ;;
        esac
        shift 2
        ;;
    *) echo "error: $1: unknown flag; valid: --device, --minutes, --keep" >&2; exit 2 ;;
    esac
done
[[ $device == gpu || $device == cpu ]] || { echo "error: --device $device; valid: gpu, cpu" >&2; exit 2; }
[[ $minutes =~ ^[1-9][0-9]*$ ]] || { echo "error: --minutes $minutes; valid: 1 or more" >&2; exit 2; }

python=${PYTHON:-.venv/bin/python}
[[ -x $python ]] || python=python3
folder=${folder:-$(mktemp -d "${TMPDIR:-/tmp}/megajax-smoke-XXXXXX")}
mkdir -p "$folder" || exit 1
[[ $device == cpu ]] && export JAX_PLATFORMS=cpu
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$folder/compiled}
end=$((SECONDS + 60 * minutes))
failed=0 left_out=0

# step NAME COMMAND...: runs it in the time that is left; `expect` is the exit code that counts as good.
expect=0
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
        left_out=$((left_out + 1))
        return
    fi
    timeout --kill-after=10 "$left" "$@" >"$folder/$name.log" 2>&1 </dev/null
    code=$?
    if ((code == expect)); then
        printf 'ok      %4d s  %s\n' $((SECONDS - began)) "$name"
        touch "$folder/$name.ok"
    else
        printf 'FAILED  %4d s  %s: exit code %d, see %s\n' $((SECONDS - began)) "$name" "$code" "$folder/$name.log"
        tail -n 3 "$folder/$name.log" | sed 's/^/                  /'
        failed=$((failed + 1))
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

step devices "$python" -c '
import sys, jax
print(jax.__version__, jax.devices())
sys.exit(jax.default_backend() != sys.argv[1])' "$device"

# Attention: every implementation beside our blocks in fp32, in small; then what training compares, takes and keeps.
implementations=(blocks)
[[ $device == gpu ]] && implementations=(kernel cudnn blocks)
for each in "${implementations[@]}"; do
    step "attention-$each" "$python" benchmarks/gpu_attention.py --implementation "$each" --device "$device" --check \
        --seconds 40
done
train run demo --precision bf16 --model.dropout 0
step resume "$python" -m megajax train "$run/config.toml" --train.steps 12 --resume must
if [[ $device == gpu ]]; then
    step choice grep -E 'attention: .+ is taken; compared' "$run/log.txt"
    step choice-kept grep 'is taken, as measured before' "$run/log.txt"
    for each in kernel blocks; do
        train "asked-$each" demo --precision bf16 --model.dropout 0 --model.attention "$each"
    done
fi
step eval "$python" -m megajax eval perplexity --checkpoint "$run"
step generate "$python" -m megajax generate --checkpoint "$run" --prompt "def read(" --max-tokens 16
step export "$python" -m megajax convert export-hf "$run" "$folder/exported"
step import "$python" -m megajax convert import-hf "$folder/exported" "$folder/imported"
step eval-imported "$python" -m megajax eval perplexity --checkpoint "$folder/imported" --data README.md

# Forms of the step: own attention (dropout, fp32, windows) and cuDNN's, every precision, recomputation, scanned layers.
train fp32 demo --precision fp32
train fp16 demo --precision fp16 --model.dropout 0
train dropout demo --precision bf16 --model.dropout 0.1 --train.remat selective
train scanned demo --precision bf16 --model.dropout 0 --train.remat layer --model.scan-layers true
train llama llama-demo --precision bf16 --model.num-kv-heads 1 --model.mlp-size 256
train window llama-demo --precision bf16 --model.sliding-window 64 --data.reset-attention --model.num-kv-heads 1 --model.mlp-size 256
train bert bert-demo --precision bf16 --model.dropout 0

# Adapters in place of the weights, and the time of some steps by its parts.
step train-lora "$python" -m megajax train "$run/config.toml" --init "$run" --run-dir "$folder/lora" --lora.rank 8 \
    --train.steps 4
step eval-lora "$python" -m megajax eval perplexity --checkpoint "$folder/lora"
train profiled demo --precision bf16 --model.dropout 0 --profile 3:5
train recipes demo --precision bf16 --train.ramp-start 4 --train.ramp-increment 4 --train.ramp-samples 16 \
    --optimizer.schedule wsd --optimizer.warmup-steps 2 --optimizer.cooldown-steps 3 --optimizer.decay-steps 8

# The same bits twice.
train same-1 demo --precision bf16 --model.dropout 0 --deterministic
train same-2 demo --precision bf16 --model.dropout 0 --deterministic
step same-bits "$python" -c '
import json, sys
one, other = ([json.loads(line).get("loss") for line in open(file)] for file in sys.argv[1:])
sys.exit(not one or one != other)' "$folder/same-1/metrics.jsonl" "$folder/same-2/metrics.jsonl"

# Fine-tuning on instructions.
for split in train dev; do
    for number in {1..64}; do
        echo "{\"prompt\": \"$split $number: one more than $number is\", \"completion\": \" $((number + 1))\"}"
    done >"$folder/$split.jsonl"
done
step instructions "$python" -m megajax train finetune/instructions-demo --init "$run" --run-dir "$folder/tuned" \
    "${model[@]}" --data.train "$folder/train.jsonl" --data.dev "$folder/dev.jsonl" --train.steps 4 --precision bf16
step eval-instructions "$python" -m megajax eval instructions --checkpoint "$folder/tuned" --data "$folder/dev.jsonl"

# A signal: the run stops with a checkpoint and exit code 143.
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
[[ $device == gpu ]] && export JAX_PLATFORMS=cuda,cpu
step tests-on-gpu "$python" -m pytest -q -m gpu -p no:cacheprovider tests/test_gpu.py

echo
echo "$failed failed, $left_out left out, $SECONDS s; $device; what the steps said: $folder"
exit $((failed + left_out > 0))
