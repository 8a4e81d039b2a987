"""What preparing a corpus costs: `megajax prepare` beside single calls of the libraries, and its memory by size.

    python benchmarks/preparation.py --text FILE --tokenizer DIR [--megabytes 200 1000] [--json]

FILE is any text (sentences are shuffled to documents of about 4 kB, none like another), DIR a tokenizer. First the
rates of one core in single calls over 8 MB; then for each size cleaning and tokenizing alone, with the largest sum of
the processes' resident memory; last the first size with everything (near duplicates, test sets).
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokenizers import load_tokenizer
from megajax.host.ending import run
from megajax.preparation.duplicates import HASHES, band_hashes
from megajax.preparation.similarity import gram_set, normalised
from megajax.preparation.stages import clean

DOCUMENT = 4096  # characters


def documents(text: str, size: int) -> Iterator[str]:
    """Documents of shuffled sentences, `size` bytes in all."""
    rng = random.Random(0)
    sentences = [sentence.strip() + " . " for sentence in text.replace("\n", " ").split(" . ") if sentence.strip()]
    done = 0
    while done < size:
        parts, length = [], 0
        while length < DOCUMENT:
            parts.append(rng.choice(sentences))
            length += len(parts[-1])
            if rng.random() < 0.1:
                parts.append("\n\n")
        document = "".join(parts)
        done += len(document.encode())
        yield document


def rate(call: Callable[[list[str]], object], texts: list[str]) -> float:
    """Megabytes a second, the better of two calls."""
    size = sum(len(text.encode()) for text in texts) / 1e6
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        call(texts)
        seconds.append(time.perf_counter() - began)
    return size / min(seconds)


def single_calls(texts: list[str], tokenizer: Tokenizer) -> dict[str, float]:
    """MB/s of one core: the libraries by themselves, and our parts."""
    import ftfy

    plain = [normalised(text) for text in texts]
    calls: dict[str, tuple[Callable[[list[str]], object], list[str]]] = {
        "ftfy.fix_text": (lambda texts: [ftfy.fix_text(text) for text in texts], texts),
        "cleaning (ours, with ftfy)": (
            lambda texts: [clean(text, fix_unicode=True, clean_newlines=True) for text in texts],
            texts,
        ),
        "tokenizers": (tokenizer.encode_batch, texts),
        "MinHash by rensa, sets of str": (_rensa, plain[: len(plain) // 4]),
        "MinHash by rensa, hashes by NumPy (ours)": (lambda texts: band_hashes(texts, 0.7), plain),
    }
    try:
        import datasketch  # noqa: F401

        calls["MinHash by datasketch"] = (_datasketch, plain[: len(plain) // 32])
    except ImportError:
        print("datasketch is not installed: left out", file=sys.stderr)
    return {name: rate(*call) for name, call in calls.items()}


def _rensa(texts: list[str]) -> None:
    from rensa import RMinHash

    for text in texts:
        sketch = RMinHash(HASHES, 1)
        sketch.update(list(gram_set(text)))
        sketch.digest()


def _datasketch(texts: list[str]) -> None:
    from datasketch import MinHash

    for text in texts:
        MinHash(num_perm=HASHES).update_batch([gram.encode() for gram in gram_set(text)])


def prepare(corpus: Path, *flags: str) -> dict:
    """The report of `megajax prepare`, with the largest memory of its processes together, in MB."""
    prefix = corpus.with_suffix("")
    command = [
        sys.executable,
        "-m",
        "megajax",
        "prepare",
        str(corpus),
        "--output",
        str(prefix),
        "--json",
        "--overwrite",
    ]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([*command, *flags], stdout=out, start_new_session=True)
        most = 0
        while process.poll() is None:
            most = max(most, _resident(process.pid))
            time.sleep(0.1)
        out.seek(0)
        return json.loads(out.read().splitlines()[-1]) | {"peak_mb": most / 1e6}


def _resident(group: int) -> int:
    """Resident bytes of the processes of a group."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) == group:
                total += int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            continue
    return total


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    text = given.text.read_text(encoding="utf-8")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rates = single_calls(list(documents(text, 8_000_000)), load_tokenizer(given.tokenizer))
    print("| one core, single call | MB/s |\n|---|---|")
    for name, value in rates.items():
        print(f"| {name} | {value:.2f} |")
    print("\n| megajax prepare | MB | MB/s | cleaning, per core | tokenizing | MinHash | peak memory, MB |")
    print("|---|---|---|---|---|---|---|")
    results = []
    only = ("--duplicates", "keep", "--tokenizer", given.tokenizer)
    runs = [(size, "clean, tokenize", only) for size in given.megabytes]
    runs.append((given.megabytes[0], "all", ("--tokenizer", given.tokenizer, "--decontaminate", str(given.text))))
    with tempfile.TemporaryDirectory() as folder:
        for size, name, flags in runs:
            corpus = Path(folder, f"{size}.jsonl")
            if not corpus.exists():
                with corpus.open("w") as file:
                    for document in documents(text, size * 1_000_000):
                        file.write(json.dumps({"text": document}) + "\n")
            report = (
                prepare(corpus, *flags, "--decontaminate-how", "report") if name == "all" else prepare(corpus, *flags)
            )
            speed = report["throughput"]
            parts = [speed[f"{part}_mb_per_second_and_core"] for part in ("cleaning", "tokenizing", "minhash")]
            parts[2] = parts[2] if name == "all" else float("nan")
            print(
                f"| {name} | {size} | {speed['mb_per_second']:.2f} | "
                + " | ".join(f"{part:.2f}" for part in parts)
                + f" | {report['peak_mb']:.0f} |",
                flush=True,
            )
            kept = ("documents_in", "documents", "tokens", "seconds", "throughput", "peak_mb", "duplicate_index")
            results.append({"what": name, "megabytes": size} | {key: report[key] for key in kept})
    if given.json:
        print(json.dumps({"single_calls": rates, "prepare": results}))


if __name__ == "__main__":
    run(main)
