"""Ten messages, each as a whole. Other tests look for what a message must name: flag, file, value, what is valid."""

TRAIN = "train.py TINY --run-dir ODD/new"
SEARCH = "plan gpt2-355m --no-compile --search --devices"
GOLDEN = {
    f"{TRAIN} --mesh.data 3": "--mesh.data 3 x --mesh.pipe 1 x --mesh.tensor 1 needs 3 devices, but there is 1; "
    "valid: sizes whose product is 1, or --simulate-devices 3",
    f"{TRAIN} --data.path ODD/beside/set": "ODD/beside/set.bin: token id 300 at position 500 is beyond the vocabulary; "
    "valid: 0 to 299, with --model.vocab-size 300; the largest id here is 300",
    "eval.py perplexitty --checkpoint TRAINED": "TASK 'perplexitty'; did you mean perplexity? valid: instructions, "
    "lambada, mnli, perplexity, preferences, qqp, race, squad1, squad2, wikitext103, harness",
    "-m megajax plan gpt2-8.3b --mesh.tensor 7": "--mesh.tensor 7 does not divide --model.num-heads 32; valid: 1, 2, "
    "4, 8, 16, 32; the nearest valid mesh: --mesh.data 1 --mesh.pipe 1 --mesh.tensor 8",
    f"-m megajax {SEARCH} 1009": "--devices 1009: no valid mesh of that size; --mesh.data must divide "
    "--train.global-batch 512, --mesh.pipe must not exceed --model.num-layers 24, and --mesh.tensor must divide "
    "--model.num-heads 16, --model.mlp-size 4096 and the padded vocabulary of 51200; valid: for example 960 or 1024",
    "-m megajax verify demo --mesh.data 3": "--train.global-batch 8 is not divisible by --mesh.data 3 x "
    "--train.microbatch 1; valid: a multiple of 3; the nearest valid mesh: --mesh.data 4 --mesh.pipe 1 --mesh.tensor 1",
}
OF_MNLI = {
    "--optimizer.warmup-steps 3 --optimizer.warmup-fraction 0.1": "--optimizer.warmup-steps and "
    "--optimizer.warmup-fraction are both given; valid: one of them",
    "--data.dev FILES/squad1-dev.json": "--data.dev: FILES/squad1-dev.json looks like a file of squad1 or "
    "squad2, not mnli; valid: TSV with the columns sentence1, sentence2 and gold_label",
    "--data.dev FILES/maybe.tsv": '--data.dev: FILES/maybe.tsv:8: label "maybe"; valid: entailment, neutral, '
    "contradiction",
    "--init BERT --model.hidden-size 64": "--init BERT holds another model; valid: --model.hidden-size "
    "32 --model.head-size 8 --model.mlp-size 128, or another run",
}
