"""Small breaks of the package, each of which a test of this folder must notice: tests of the tests.

The package is copied as links with one file broken, and the named test runs over the copy in another process; so do the
servers that it starts. A test that then passes is worthless.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "sayfa"
TIME_LIMIT_S = 200.0
# An editable install finds the package before the search path does; this takes it out of the way, in every process.
_SITE = 'import sys\nsys.meta_path[:] = [f for f in sys.meta_path if "sayfa" not in type(f).__module__]\n'


class Mutant(NamedTuple):
    """test: what must fail, as pytest names it, within tests/hostile."""

    name: str
    file: str
    old: str
    new: str
    test: str


_PARSER = "test_parsers.py::test_f11_a_parser_refuses_or_reads[{}]"
_WORDS = "test_parsers.py::test_an_empty_input_and_the_target_s_own_words_are_no_surprise[{}]"
_REFUSE = "test_time_to_refuse.py::test_f13_a_hostile_request_is_refused_at_once[{}]"
_STRICT = "test_http_bytes.py::test_t16_what_could_be_read_in_two_ways_is_refused[{}]"
_ENDLESS = "test_http_bytes.py::test_t16_what_never_ends_is_cut_off_before_it_costs_anything[{}]"
MUTANTS = (
    Mutant(
        "bytes of no tensor are no damage",
        "base/gguf.py",
        "    _check_dense(reader, start, tensors, alignment)\n",
        "",
        "test_damage.py::test_f12_flips_of_header_bits_give_no_other_weights[gguf]",
    ),
    Mutant(
        "a GGUF file may end anywhere",
        "base/gguf.py",
        "if num_bytes > self.size - start:",
        "if False:",
        _PARSER.format("gguf"),
    ),
    Mutant(
        "a tensor may lie past the end",
        "base/gguf.py",
        "if tensor.offset + tensor.num_bytes > reader.size:",
        "if False:",
        _PARSER.format("gguf"),
    ),
    Mutant(
        "a shape may lie about its bytes",
        "models/formats/safetensors.py",
        "if math.prod(shape) * item_bytes != end - start:",
        "if False:",
        _PARSER.format("safetensors"),
    ),
    Mutant(
        "the checksum is not compared",
        "models/formats/checksum.py",
        "if found != wanted:",
        "if False:",
        "test_damage.py::test_t09_with_a_checksum_every_flip_is_refused[safetensors]",
    ),
    Mutant(
        "a shape may be any list",
        "models/formats/safetensors.py",
        "if not _are_counts(shape, MAX_DIM) or ",
        "if ",
        _PARSER.format("safetensors"),
    ),
    Mutant(
        "config numbers have no type",
        "models/facts.py",
        "is_number = isinstance(value, int | float) and not isinstance(value, bool)",
        "is_number = True",
        _PARSER.format("config"),
    ),
    Mutant(
        "tags are used in settings",
        "cli/config_file.py",
        '"tags" if event.tag is not None else ""',
        '""',
        _WORDS.format("yaml"),
    ),
    Mutant(
        "half surrogates pass",
        "server/strict_json.py",
        "msgspec.json.decode(body)",
        "pass",
        _PARSER.format("json-body"),
    ),
    Mutant(
        "a template's mistake is our failure",
        "text/chat_template.py",
        "except jinja2.TemplateError as error:",
        "except jinja2.UndefinedError as error:",
        _PARSER.format("template"),
    ),
    Mutant(
        "a broken message is our failure",
        "text/chat_template.py",
        "except Exception:  # whatever",
        "except OSError:  #",
        _PARSER.format("messages"),
    ),
    Mutant(
        "text may spell control tokens",
        "text/tokenizer.py",
        "return self._plain_encoder().encode(text)",
        "return self._backend.encode(text, add_special_tokens=False).ids",
        _PARSER.format("text"),
    ),
    Mutant(
        "nothing is held for a stop string",
        "text/detokenizer.py",
        "keep = len(text) - self._finder.held",
        "keep = len(text)",
        _PARSER.format("detokenizer"),
    ),
    Mutant(
        "an event ends with one line end",
        "server/openai/chunks.py",
        'self._end = b"]}\\n\\n"',
        'self._end = b"]}\\n"',
        _PARSER.format("events"),
    ),
    Mutant(
        "a malformed message ends the process",
        "wire/codec.py",
        "return _to_engine.decode(payload)\n    except (msgspec.MsgspecError, ValueError, RecursionError)",
        "return _to_engine.decode(payload)\n    except KeyError",
        _PARSER.format("wire"),
    ),
    Mutant(
        "a long frame is held",
        "wire/sockets.py",
        "self._to_skip = length\n",
        "self._to_skip = 0\n",
        _PARSER.format("frames"),
    ),
    Mutant(
        "doubtful requests pass",
        "server/connection.py",
        "if self._refusal is None and self._is_doubtful():",
        "if False:",
        "test_http_bytes.py::test_t18_a_request_has_one_host_and_it_is_ours",
    ),
    Mutant(
        "codings are not looked at",
        "server/connection.py",
        'codings != [b"chunked"]',
        "False",
        _STRICT.format("gzip before chunked"),
    ),
    Mutant(
        "leaving early is a failure",
        "server/edge.py",
        "except ClientDisconnect:",
        "except ZeroDivisionError:",
        "test_http_bytes.py::test_f10_damaged_connections[0]",
    ),
    Mutant(
        "prompts are logged",
        "server/body.py",
        "    report_unknown(parsed, request.url.path)\n",
        "    log.warning('%r', value)\n",
        "test_http_bytes.py::test_f10_damaged_connections[0]",
    ),
    Mutant(
        "an error tells where the server lies",
        "server/errors.py",
        '"There is no such route here; /docs lists what there is."',
        'f"There is no such route in {__file__}."',
        "test_http_bytes.py::test_f10_damaged_connections[0]",
    ),
    Mutant(
        "headers have no limit",
        "server/connection.py",
        "self._refuse(StatusError(431))\n\n    def on_headers",
        "pass\n\n    def on_headers",
        _ENDLESS.format("many headers"),
    ),
    Mutant(
        "one header has no limit",
        "server/connection.py",
        "if self._silent_bytes > MAX_SILENT_BYTES:",
        "if False:",
        _ENDLESS.format("one header"),
    ),
    Mutant(
        "a body may come in any number of pieces",
        "server/connection.py",
        "if self._num_pieces > MAX_PIECES:",
        "if False:",
        _ENDLESS.format("chunks of one byte"),
    ),
    Mutant(
        "a refused body is read to its end",
        "server/connection.py",
        "if self._in_body and not self.transport.is_closing():",
        "if False:",
        _ENDLESS.format("a body that nobody may send"),
    ),
    Mutant(
        "a text is tokenized before it is measured",
        "server/limits.py",
        "if num_bytes > limit:",
        "if False:",
        _REFUSE.format("T14 9 MB of spaces"),
    ),
    Mutant("depth has no limit", "server/strict_json.py", "    _check_shape(body)\n", "", _WORDS.format("json-body")),
    Mutant(
        "a stopped reader keeps its connection",
        "server/connection.py",
        'cycle.scope["sayfa.hang_up"] = self.transport.abort',
        'cycle.scope["sayfa.hang_up"] = None',
        "test_crowds.py::test_f09_readers_that_stop_reading",
    ),
    Mutant(
        "books of leavers stay open",
        "server/edge.py",
        'record.close("abort")',
        "pass",
        "test_crowds.py::test_f08_what_one_client_held_is_free_at_once[0]",
    ),
    Mutant(
        "the salt is forgotten",
        "core/kv_cache.py",
        "request.adapter, request.salt)",
        'request.adapter, "")',
        "test_tenants.py::test_f29_a_prompt_of_another_tenant_is_never_found_in_the_cache[0]",
    ),
    Mutant(
        "outputs go to a neighbour",
        "core/results.py",
        "        tokens.append(token)\n",
        "        result.tokens[0] = globals().setdefault('last', [token])[0]; globals()['last'] = [token]\n"
        "        tokens.append(token)\n",
        "test_tenants.py::test_f39_no_token_of_one_tenant_reaches_another[0]",
    ),
    Mutant(
        "attention reads a token too many",
        "nn/program/reference.py",
        "end = int(batch.positions[token]) + 1",
        "end = min(int(batch.positions[token]) + 2, gathered.shape[1])",
        "test_tenants.py::test_t36_a_page_is_never_read_before_it_is_written[0]",
    ),
)
QUICK = ("a GGUF file may end anywhere", "the salt is forgotten")
"""Those that `make test` tries; the others take a server or a model each."""


def broken_text(mutant: Mutant) -> str:
    """The file's text with its break. Raises ValueError if the place is gone, or is there twice."""
    text = (PACKAGE / mutant.file).read_text("utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} holds {text.count(mutant.old)} times {mutant.old!r}, not once")
    return text.replace(mutant.old, mutant.new)


def break_package(mutant: Mutant, folder: Path) -> Path:
    """Make a copy of the package in `folder` whose files are links, except for the broken one."""
    source = folder / "src"
    for path in PACKAGE.rglob("*"):
        if path.is_file() and path.suffix in (".py", ".so", ".html"):
            link = source / "sayfa" / path.relative_to(PACKAGE)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    broken = source / "sayfa" / mutant.file
    broken.unlink()
    broken.write_text(broken_text(mutant), "utf-8")
    (source / "sitecustomize.py").write_text(_SITE)
    return source


def notice(mutant: Mutant, folder: Path) -> tuple[bool, str]:
    """Run the mutant's test over a broken package; give whether it failed, and the end of what it said."""
    source = break_package(mutant, folder)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--basetemp",
               str(folder / "temp"), f"tests/hostile/{mutant.test}"]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"PYTHONPATH": str(source)}, capture_output=True, text=True,
        timeout=TIME_LIMIT_S, check=False,
    )  # fmt: skip
    return done.returncode == 1, done.stdout[-3000:] + done.stderr[-1000:]
