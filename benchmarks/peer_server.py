"""A small completions server around a library that has none of its own: OpenVINO GenAI, or transformers' generate().

Run by `peers.py` inside the peer's environment, so it needs nothing but the standard library and that peer. It speaks
just enough of the protocol for the bench client: GET /v1/models, POST /v1/completions with streaming. OpenVINO batches
what is there (its ContinuousBatchingPipeline); transformers answers one request after another, as its users do.
"""

import argparse
import asyncio
import json
import queue
import threading


class OpenVino:
    """Drives ContinuousBatchingPipeline in one thread: add what came, step, hand out what is new."""

    def __init__(self, model, cache_gib, max_rows):
        import openvino_genai as genai

        self.genai = genai
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.max_num_seqs = max_rows
        scheduler.enable_prefix_caching = True
        self.pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
        self.tokenizer = self.pipeline.get_tokenizer()
        self.inbox = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, prompt, max_tokens, tell):
        self.inbox.put((prompt, max_tokens, tell))

    def _add(self, number, prompt, max_tokens, tell):
        config = self.genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        encoded = self.tokenizer.encode(prompt)
        handle = self.pipeline.add_request(number, encoded.input_ids, config)
        return [handle, tell, encoded.input_ids.shape[1], 0, max_tokens]

    def _run(self):
        running, number = {}, 0
        while True:
            while not running or not self.inbox.empty():
                running[number] = self._add(number, *self.inbox.get())
                number += 1
            self.pipeline.step()
            for key in list(running):
                handle, tell, num_prompt, made, wanted = running[key]
                while handle.can_read():
                    ids = [token for output in handle.read().values() for token in output.generated_ids]
                    made += len(ids)
                    tell(self.tokenizer.decode(ids), num_prompt, made, made >= wanted)
                running[key][3] = made
                if made >= wanted:
                    del running[key]


class Transformers:
    """model.generate() with a streamer, one request after another."""

    def __init__(self, model, dtype, threads):
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.transformers = transformers
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.inbox = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, prompt, max_tokens, tell):
        self.inbox.put((prompt, max_tokens, tell))

    def _run(self):
        while True:
            prompt, max_tokens, tell = self.inbox.get()
            inputs = self.tokenizer(prompt, return_tensors="pt")
            streamer = _Streamer(tell, inputs["input_ids"].shape[1], max_tokens, self.tokenizer)
            self.model.generate(
                **inputs, streamer=streamer, do_sample=False, max_new_tokens=max_tokens, min_new_tokens=max_tokens,
                pad_token_id=0,
            )  # fmt: skip


class _Streamer:
    """What generate() calls with the prompt first and then with each token."""

    def __init__(self, tell, num_prompt, wanted, tokenizer):
        self.tell, self.num_prompt, self.wanted, self.tokenizer = tell, num_prompt, wanted, tokenizer
        self.made = -1

    def put(self, value):
        self.made += 1
        if self.made > 0:
            self.tell(self.tokenizer.decode(value.tolist()), self.num_prompt, self.made, self.made >= self.wanted)

    def end(self):
        pass


async def handle(backend, name, reader, writer):
    """One request on one connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    lengths = [line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length:")]
    body = await reader.readexactly(int(lengths[0])) if lengths else b""
    try:
        if head.startswith("GET /v1/models"):
            data = json.dumps({"data": [{"id": name}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
        elif head.startswith("POST /v1/completions"):
            await stream(backend, json.loads(body), writer)
        else:
            writer.write(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
    finally:
        writer.close()


async def stream(backend, request, writer):
    """Hand on each piece as an event as soon as it is there."""
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue()
    backend.submit(
        request["prompt"], request["max_tokens"], lambda *piece: loop.call_soon_threadsafe(pieces.put_nowait, piece)
    )
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    done = False
    while not done:
        text, num_prompt, made, done = await pieces.get()
        event = {"choices": [{"index": 0, "text": text, "finish_reason": "length" if done else None}]}
        writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await writer.drain()
    usage = {"prompt_tokens": num_prompt, "completion_tokens": made, "total_tokens": num_prompt + made}
    writer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")


async def serve(backend, port):
    """Serve until ended."""
    server = await asyncio.start_server(lambda r, w: handle(backend, "peer", r, w), "127.0.0.1", port, backlog=256)
    async with server:
        await server.serve_forever()


def main():
    """Load the peer and serve it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("peer", choices=["openvino", "transformers"])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cache-gib", type=int, default=4)
    args = parser.parse_args()
    if args.peer == "openvino":
        backend = OpenVino(args.model, args.cache_gib, 32)
    else:
        backend = Transformers(args.model, args.dtype, args.threads)
    asyncio.run(serve(backend, args.port))


if __name__ == "__main__":
    main()
