"""Answer several prompts without a server. Run: python examples/offline.py"""

from sayfa import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "A haiku about the sea:"]


def main() -> None:
    model = LLM("smollm2", max_model_len=2048)
    for output in model.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24)):
        print(f"{output.prompt!r} -> {output.text!r} ({output.usage.completion_tokens} tokens)")


if __name__ == "__main__":
    main()
