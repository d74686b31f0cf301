"""`sayfa generate`: prompts or a JSONL file through an engine in this process, results in the prompts' order.

Called by `app`. Every line of a file is checked before the model is loaded, so that a typing error in line 9,000 costs
a second and not an hour. A prompt that cannot be served becomes a result with an `error`; the others go on. Results of
a file go to standard output as they are complete, so that whatever ends the process leaves them.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from sayfa import llm as public
from sayfa.base import log
from sayfa.base.config import Settings
from sayfa.base.errors import ConfigError, InvalidRequest
from sayfa.base.faults import fault
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.settings import nearest
from sayfa.base.step import TokenLogprobs
from sayfa.cli.options import check_wishes
from sayfa.cli.output import check_output, tell, write_output
from sayfa.cli.show import ProgressLine
from sayfa.server.answer import Entry
from sayfa.server.openai.logprobs import chat_logprobs, prompt_logprobs

MAX_LINE_BYTES = 16 << 20
_PARAMS = {field.name for field in msgspec.structs.fields(SamplingParams)} - {"eos_token_ids"}
Take: TypeAlias = Callable[[int, public.RequestOutput], None]
_OWN = ("prompt", "messages", "id", "custom_id")
_CHAT_NAMES = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One line: a prompt or a conversation, its wishes, and the caller's own id if there is one."""

    prompt: str | None
    messages: list[dict[str, Any]] | None
    params: SamplingParams
    id: Any = None


def run_generate(
    settings: Settings, prompts: list[str], file: Path | None, output: Path | None, wishes: dict[str, Any]
) -> int:
    """Answer the prompts; return 0, or 1 if any of them failed. Raises ConfigError before any work."""
    log.setup("warning", "text")
    check_output(output)
    check_wishes(wishes)
    tasks = [_task({"prompt": prompt}, wishes, "--prompt") for prompt in prompts]
    if file is not None:
        tasks += read_tasks(file, wishes)
    if not tasks:
        raise ConfigError("nothing to do: give prompts with -p, or a JSONL file")
    model = make_llm(settings)
    to_stdout = file is not None and output is None
    results = answer_all(model, tasks, _print_result if to_stdout else None)
    code = 0
    if output is not None:
        try:
            write_output(output, "".join(_line(result, "utf-8") + "\n" for result in results).encode())
        except ConfigError as error:
            for result in results:
                _print_result(result)
            tell(f"sayfa: error: {error}; the results are on standard output\n")
            code = 1
    elif not to_stdout:
        print("\n\n".join(result["text"] for result in results))
    for failure in (failure for result in results for failure in _failures(result)):
        tell(f"sayfa: {failure}\n")
        code = 1
    return code


def _failures(result: dict[str, Any]) -> list[str]:
    """A sentence for each of a prompt's answers that failed."""
    place = f"prompt {result['index']}"
    if "choices" not in result:
        return [f"{place}: {result['error']}"] if "error" in result else []
    failed = [answer for answer in result["choices"] if "error" in answer]
    return [f"{place}, answer {answer['index']}: {answer['error']}" for answer in failed]


def _print_result(result: dict[str, Any]) -> None:
    """At once, also into a file or a pipe: what ends this process later shall not take it along."""
    print(_line(result, sys.stdout.encoding), flush=True)


def _line(result: dict[str, Any], encoding: str) -> str:
    """A result as JSON; characters that the encoding lacks are escaped."""
    line = msgspec.json.encode(result).decode()
    try:
        line.encode(encoding)
    except UnicodeEncodeError:
        line = json.dumps(json.loads(line))
    return line


def make_llm(settings: Settings) -> public.LLM:
    """An engine in this process with these settings."""
    options: dict[str, Any] = {}
    for part in (settings.model, settings.cache, settings.scheduler, settings.parallel):
        options.update(msgspec.structs.asdict(part))
    model = options.pop("model")
    return public.LLM(model, **{name: value for name, value in options.items() if value not in (None, [])})


def read_tasks(file: Path, wishes: dict[str, Any]) -> list[Task]:
    """The tasks of a JSONL file; empty lines are skipped. Raises ConfigError naming the line."""
    try:
        fault("batch.read")
        data = file.read_bytes()
    except OSError as error:
        way_out = "; a prompt is given with -p" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{file} cannot be read: {error.strerror}{way_out}") from None
    tasks = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file.name}, line {number}"
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"{where}: longer than {MAX_LINE_BYTES >> 20} MiB")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        tasks.append(_task(value, wishes, where))
    return tasks


def _task(value: Any, wishes: dict[str, Any], where: str) -> Task:
    """One task from a JSON value; the line's own fields win over the command's.

    Fields have the names and forms of the completions API, where null is a field left out; only a `max_tokens` of null
    is one: up to the end of the context.
    """
    fields = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: holds neither text nor an object")
    known = _PARAMS | set(_OWN)
    for name in fields:
        if name not in known:
            hint = f"; here it is `{_CHAT_NAMES[name]}`" if name in _CHAT_NAMES else nearest(name, known)
            raise ConfigError(f"{where}: unknown field {name!r}{hint}")
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if (prompt is None) == (messages is None):
        raise ConfigError(f"{where}: needs `prompt` or `messages`, and not both")
    if isinstance(fields.get("logprobs"), bool):
        raise ConfigError(f"{where}: `logprobs` is true or false; here it is a number, how many alternatives (0: none)")
    stated = _PARAMS & {name for name, item in fields.items() if item is not None or name == "max_tokens"}
    params = {**wishes, **{name: fields[name] for name in stated}}
    try:
        task = msgspec.convert({"prompt": prompt, "messages": messages, "params": params}, Task, str_keys=True)
        task.params.check()
    except (msgspec.ValidationError, InvalidRequest) as error:
        raise ConfigError(f"{where}: {error}") from None
    return msgspec.structs.replace(task, id=_own_id(fields, where))


def _own_id(fields: dict[str, Any], where: str) -> Any:
    """The caller's id. Raises ConfigError for one that could not be written at the end of the work."""
    name = "custom_id" if "custom_id" in fields else "id"
    value = fields.get(name)
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise ConfigError(
            f"{where}: `{name}` holds a lone surrogate, NaN or an infinity, which no JSON file can hold; leave it out"
        ) from None
    return value


def answer_all(
    model: public.LLM, tasks: list[Task], emit: Callable[[dict[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """Answer all tasks with a progress bar; the results are in the tasks' order.

    emit: is given each result as soon as it and all before it are there.
    """
    line = ProgressLine("generate")
    results: dict[int, dict[str, Any]] = {}
    num_emitted = 0

    def take(index: int, output: public.RequestOutput) -> None:
        nonlocal num_emitted
        results[index] = _result(model, index, tasks[index], output)
        while emit is not None and num_emitted in results:
            line.clear()
            emit(results[num_emitted])
            num_emitted += 1
        line.show(f"{len(results)} of {len(tasks)}", len(results) / len(tasks))

    prompts = [index for index, task in enumerate(tasks) if task.prompt is not None]
    chats = [index for index, task in enumerate(tasks) if task.prompt is None]
    with line:
        for indexes, answer in ((prompts, _continue), (chats, _chat)):
            if indexes:
                answer(model, [tasks[index] for index in indexes], partial(_take_at, take, indexes))
    return [results[index] for index in range(len(tasks))]


def _take_at(take: Take, indexes: list[int], place: int, output: public.RequestOutput) -> None:
    take(indexes[place], output)


def _continue(model: public.LLM, tasks: list[Task], take: Take) -> None:
    prompts = [task.prompt or "" for task in tasks]
    model.generate(prompts, [task.params for task in tasks], on_output=take, errors="return")


def _chat(model: public.LLM, tasks: list[Task], take: Take) -> None:
    conversations = [task.messages or [] for task in tasks]
    model.chat(conversations, [task.params for task in tasks], on_output=take, errors="return")


def _result(model: public.LLM, index: int, task: Task, output: public.RequestOutput) -> dict[str, Any]:
    """One line of the results: the first answer, and with `n` above 1 all of them in `choices`."""
    result: dict[str, Any] = {"index": index}
    if task.id is not None:
        result["id"] = task.id
    result |= _answer(model, task.params, output.outputs[0])
    if len(output.outputs) > 1:
        result["choices"] = [{"index": each.index, **_answer(model, task.params, each)} for each in output.outputs]
    if output.prompt_logprobs is not None:
        scores = [_scores(choice) for choice in output.prompt_logprobs]
        num_top = task.params.prompt_logprobs or 0
        result["prompt_logprobs"] = prompt_logprobs(model.tokenizer, output.prompt_token_ids, scores, num_top)
    result["usage"] = msgspec.to_builtins(output.usage)
    return result


def _answer(model: public.LLM, params: SamplingParams, answer: public.Answer) -> dict[str, Any]:
    shown: dict[str, Any] = {"text": answer.text, "finish_reason": answer.finish_reason}
    if answer.logprobs is not None:
        entries = [Entry(0, choice.token_id, _scores(choice)) for choice in answer.logprobs]
        shown["logprobs"] = chat_logprobs(model.tokenizer, entries, params.logprobs or 0)
    if answer.error is not None:
        shown["error"] = answer.error
    return shown


def _scores(choice: public.TokenChoice) -> TokenLogprobs:
    """As the engine gave them, for the forms of the API."""
    return TokenLogprobs(choice.logprob, choice.rank, [top[0] for top in choice.top], [top[2] for top in choice.top])
