"""Callers that are not the newest official client: an old version of it, langchain-openai and litellm do one chat each.

They pin other versions of shared packages, so each gets an environment of its own, made here from the package index.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import uvicorn
from http_support import MODEL, SayingEngine, text_tools, until

from sayfa.base.config import ServerOptions
from sayfa.server.app import create_app
from sayfa.server.serve import bind, make_server

pytestmark = pytest.mark.slow

OFFICIAL = """
import openai, sys
client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
messages = [{"role": "user", "content": "Hi"}]
print(client.chat.completions.create(model="tiny", messages=messages).choices[0].message.content)
chunks = client.chat.completions.create(model="tiny", messages=messages, stream=True)
print("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
print(client.completions.create(model="tiny", prompt="Say").choices[0].text)
print([model.id for model in client.models.list()][0])
"""
LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI
model = ChatOpenAI(base_url=sys.argv[1], api_key="none", model="tiny")
print(model.invoke("Hi").content)
print("".join(part.content for part in model.stream("Hi")))
"""
LITELLM = """
import sys, litellm
messages = [{"role": "user", "content": "Hi"}]
wishes = dict(model="openai/tiny", api_base=sys.argv[1], api_key="none", messages=messages)
print(litellm.completion(**wishes).choices[0].message.content)
print("".join(part.choices[0].delta.content or "" for part in litellm.completion(**wishes, stream=True)))
"""
CALLERS = {
    "official client of 2024": (["openai==1.40.0", "httpx<0.28"], OFFICIAL, ["Hello world"] * 3 + [MODEL]),
    "langchain-openai": (["langchain-openai"], LANGCHAIN, ["Hello world"] * 2),
    "litellm": (["litellm"], LITELLM, ["Hello world"] * 2),
}


def environment(folder: Path, packages: list[str]) -> str:
    """A virtual environment with these packages; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    subprocess.run(install, check=True)
    return python


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CALLERS)
async def test_one_chat(name: str, tmp_path: Path) -> None:
    """Plain and streamed."""
    packages, program, expected = CALLERS[name]
    python = await asyncio.to_thread(environment, tmp_path / "env", packages)
    options = ServerOptions(port=0)
    sock = bind(options)
    server: uvicorn.Server = make_server(create_app(SayingEngine(), text_tools(), options, [MODEL], "0"), options)
    serving = asyncio.create_task(server.serve([sock]))
    await until(lambda: server.started)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    pipe = asyncio.subprocess.PIPE
    quiet = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would ask the net for prices
    caller = await asyncio.create_subprocess_exec(python, "-c", program, url, stdout=pipe, stderr=pipe, env=quiet)
    out, errors = await asyncio.wait_for(caller.communicate(), 120)
    server.should_exit = True
    await serving
    assert out.decode().split("\n")[: len(expected)] == expected, errors.decode()[-2000:]
