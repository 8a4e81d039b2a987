"""Which commands of the pages run in a test; an entry that no page has any more fails `test_commands.py`."""

QUICK = {  # by default, as they are written, in a folder with the files that pages show; what they print or draw
    "megajax schedule --mesh.pipe 4 --pipeline.schedule interleaved --pipeline.chunks 2 --microbatches 8 "
    "--plot timeline.png": "bubble",
    "megajax train mine.toml --mesh.data 8 --print-config": "# mine.toml",
    "megajax train demo --help": "--mesh.data N",
}

FULL = [  # marker `full`: in this order, one after the other, in a folder with README.md and made-up instructions
    "megajax plan gpt2-8.3b --devices 512 --search",
    "megajax plan gpt2-8.3b --mesh.data 32 --mesh.pipe 8 --mesh.tensor 2 --train.microbatch 2 --train.remat selective",
    "megajax verify gpt2-8.3b --mesh.data 32 --mesh.pipe 8 --mesh.tensor 2 --pipeline.schedule interleaved "
    "--pipeline.chunks 9 --pipeline.vocabulary split --train.microbatch 2 --train.remat selective",
    "megajax verify gpt2-355m --mesh.data 2 --mesh.pipe 2 --mesh.tensor 2",
    "megajax verify demo --exact --mesh.data 2 --mesh.pipe 2 --mesh.tensor 2",
    "megajax plan llama3.2-1b --mesh.data 8 --train.microbatch 2 --gpu h100 --no-compile",
    "megajax verify llama3.2-1b --mesh.data 8 --train.microbatch 2 --exact",
    "megajax prepare python-stdlib --output corpora/small --vocab-size 1024",
    "megajax plan llama-demo --mesh.data 2 --mesh.tensor 2 --no-compile",
    "megajax verify llama-demo --exact --mesh.data 2 --mesh.tensor 2",
    "megajax train llama-demo --data.path corpora/small --mesh.data 2 --mesh.tensor 2 --simulate-devices 4 "
    "--train.steps 100 --checkpoint.every 50 --checkpoint.keep-best 1 --run-dir runs/small",
    "megajax eval perplexity --checkpoint runs/small --step best",
    "megajax convert export-hf runs/small exported",
    "megajax train demo",
    "megajax train llama-demo --mesh.context 2 --mesh.tensor 2 --mesh.pipe 2 --simulate-devices 8 --train.steps 20 "
    "--run-dir runs/llama-context",
    "megajax train demo --mesh.data 2 --mesh.pipe 2 --mesh.tensor 2 --simulate-devices 8 --run-dir runs/demo-2x2x2",
    "megajax train moe-demo",
    "megajax train moe-demo --model.num-experts 0 --model.experts-per-token 0 --model.expert-size 0 "
    "--model.expert-capacity 0 --model.balance none --model.balance-step 0.001 --model.mlp-size 128 "
    "--run-dir runs/dense",
    "megajax train moe-demo --mesh.expert 2 --mesh.pipe 2 --mesh.tensor 2 --simulate-devices 8 "
    "--run-dir runs/moe-2x2x2",
    "megajax eval perplexity --checkpoint runs/demo",
    "megajax eval perplexity --checkpoint runs/demo --data README.md --mesh.tensor 2 --simulate-devices 2",
    'megajax generate --checkpoint runs/demo --prompt "def read("',
    'megajax generate --checkpoint runs/demo --prompt "def read(" --prompt "class " --max-tokens 64 --temperature 0.8',
    'megajax generate --checkpoint runs/demo --prompt "import " --top-k 40 --top-p 0.95 --seed 1 --json',
    "megajax train finetune/instructions-demo --init runs/demo --data.train train.jsonl --data.dev dev.jsonl",
    "megajax eval instructions --checkpoint runs/instructions-demo --data dev.jsonl",
    "megajax train finetune/preferences-demo --init runs/instructions-demo --data.train pairs.jsonl",
    "megajax eval preferences --checkpoint runs/preferences-demo --data pairs.jsonl",
    "megajax train runs/demo/config.toml --init runs/demo --run-dir runs/tuned --task.name instructions --data.train "
    "train.jsonl --train.epochs 2 --optimizer.learning-rate 5e-4 --optimizer.min-learning-rate 0 "
    "--optimizer.warmup-fraction 0.1 --optimizer.decay-steps 0",
    "megajax train runs/tuned/config.toml --init runs/tuned --run-dir runs/dpo --task.name preferences --data.train "
    "pairs.jsonl --train.epochs 1 --optimizer.learning-rate 5e-6",
    "megajax train demo --run-dir runs/profiled --train.steps 8 --profile 4:6",
    "megajax train demo --run-dir runs/stable --optimizer.schedule constant --train.steps 480 --checkpoint.every 160 "
    "--checkpoint.keep-every 160",
    "mkdir -p runs/decay/checkpoints",
    "cp -r runs/stable/config.toml runs/stable/run.json runs/stable/metrics.jsonl runs/stable/data runs/decay",
    "cp -r runs/stable/checkpoints/320 runs/decay/checkpoints",
    "megajax train runs/decay/config.toml --optimizer.schedule wsd --train.steps 400 --optimizer.decay-steps 400 "
    "--optimizer.cooldown-steps 80",
    "megajax train runs/stable/config.toml --optimizer.schedule wsd --train.steps 600 --optimizer.decay-steps 600 "
    "--optimizer.cooldown-steps 120",
]


STAND_INS = {  # what a run's configuration is read as, where it is not that of `demo`
    "runs/gpt2/config.toml": "gpt2-355m",
    "runs/qwen/config.toml": "qwen3-0.6b",
    "runs/tuned/config.toml": "finetune/instructions-demo",
}
