"""Several answers to one prompt, computed once: they share its pages. Run: python examples/several_answers.py"""

from sayfa import LLM, SamplingParams


def main() -> None:
    model = LLM("smollm2", max_model_len=2048)
    params = SamplingParams(n=4, temperature=0.9, seed=7, max_tokens=20, stop=["\n"])
    [output] = model.chat([{"role": "user", "content": "Give my grey cat a name."}], params)
    for answer in output.outputs:
        print(f"{answer.index}: {answer.text.strip()} ({answer.finish_reason})")


if __name__ == "__main__":
    main()
