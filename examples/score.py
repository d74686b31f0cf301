"""How likely does the model find each sentence? Lower perplexity is more likely. Run: python examples/score.py"""

import math

from sayfa import LLM, SamplingParams

SENTENCES = ["The cat sat on the mat.", "The mat sat on the cat.", "Cat the on mat sat the."]


def main() -> None:
    model = LLM("smollm2", max_model_len=2048)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    for output in model.generate(SENTENCES, params):
        scores = [choice.logprob for choice in output.prompt_logprobs or []]
        print(f"{math.exp(-sum(scores) / len(scores)):8.1f}  {output.prompt}")


if __name__ == "__main__":
    main()
