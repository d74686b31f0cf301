"""Talk to a running server with OpenAI's own client; only the address is different.

Run: make serve, then in another terminal: python examples/chat_stream.py [http://127.0.0.1:8000]
"""

import sys

from openai import OpenAI


def main(address: str) -> None:
    client = OpenAI(base_url=f"{address}/v1", api_key="none is needed on this machine")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Name three rivers of Europe."}]
    stream = client.chat.completions.create(model=model, messages=messages, max_tokens=48, temperature=0, stream=True)
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
